"""Distributed data parallel: parameters on every device, gradients averaged in buckets."""
