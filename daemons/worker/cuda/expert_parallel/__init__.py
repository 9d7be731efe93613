"""Experts of a layer divided among ranks on GPUs: what carries rows to the ranks that hold them, inside steps."""
