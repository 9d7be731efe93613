"""Attention over a paged KV pool on CPUs: the seam and its implementations."""
