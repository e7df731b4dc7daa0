"""Schedule -> Schedule: each file one rewriting of the grid."""
