"""Attention over a paged KV pool: the seam and its implementations."""
