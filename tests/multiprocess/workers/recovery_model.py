"""The problem that recovery.py trains on, and its solution in numpy."""

import numpy as np

NUM_STEPS, NUM_ROWS, WIDTH = 8, 12, 6


def initial_weights() -> np.ndarray:
    """f32[D]."""
    return np.linspace(-1, 1, WIDTH, dtype=np.float32)


def make_batch(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of step i: f32[B, D], f32[B]."""
    x = np.random.default_rng(i).normal(size=(NUM_ROWS, WIDTH)).astype(np.float32)
    return x, np.sin(x.sum(axis=1))


def expected_losses() -> list[float]:
    """Of a run that nothing interrupts: SGD with momentum 0.9, rate 0.1, in float64."""
    w, trace, losses = initial_weights().astype(np.float64), np.zeros(WIDTH), []
    for i in range(NUM_STEPS):
        x, y = (part.astype(np.float64) for part in make_batch(i))
        error = x @ w - y
        losses.append(float(np.mean(error**2)))
        trace = 0.9 * trace + 2 * x.T @ error / NUM_ROWS
        w = w - 0.1 * trace
    return losses
