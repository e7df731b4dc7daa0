"""A timeline for the eye: a picture, or a trace."""
