"""Routed experts on a GPU: routing, rows grouped by expert, grouped GEMMs. Nothing waits for the host."""
