"""Sampling of tokens: a pure function of (logits, parameters, seed, position), the same on every rank and device."""
