"""Kernels compiled by processes of their own while a worker starts."""
