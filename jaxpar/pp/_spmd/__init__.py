"""The grid of a schedule as one compiled program over the whole mesh."""
