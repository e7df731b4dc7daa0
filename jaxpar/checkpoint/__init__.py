"""Checkpoints over Orbax: saved from any layout, restored into any other."""

from jaxpar._errors import CheckpointError as CheckpointError
from jaxpar.checkpoint._manager import CheckpointManager as CheckpointManager
from jaxpar.checkpoint._manager import Restored as Restored
