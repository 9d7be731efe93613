"""Attention over the paged pool on a GPU: the seam, our own kernels, plain torch."""
