"""The plan layer: schedules as data, in pure Python; nothing here imports jax or knows a model."""
