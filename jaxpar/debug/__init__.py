"""See what a program communicates and where an array lies."""
