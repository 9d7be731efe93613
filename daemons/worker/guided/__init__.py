"""Guided decoding in the worker: grammars that were put here, and each slot's position in its own."""
