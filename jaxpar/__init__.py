"""jaxpar: PyTorch's distributed-training stack, re-made for JAX and Flax."""
