"""jaxpar-launch: starts, watches and explains a group of worker processes. Standard library only."""
