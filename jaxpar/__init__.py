"""jaxpar: PyTorch's distributed-training stack, re-made for JAX and Flax."""

from jaxpar._mean import Mean as Mean
