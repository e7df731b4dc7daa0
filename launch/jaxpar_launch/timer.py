"""Time limits for pieces of a worker's script: `with jaxpar_launch.timer.expires(after_s=30): ...`."""

from jaxpar_launch._timer import expires as expires
