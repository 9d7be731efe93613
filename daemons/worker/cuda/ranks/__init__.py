"""Ranks that hold one model together on GPUs: collectives of their steps."""
