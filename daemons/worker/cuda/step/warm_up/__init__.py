"""Warm-up: the first steps of a worker, and the kernels that they compile."""
