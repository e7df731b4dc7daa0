"""A timeline for the eye: picture, trace, text."""
