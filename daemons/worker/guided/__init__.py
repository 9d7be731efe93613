"""Guided decoding in the worker: grammars that were put here, and each slot's place in its own."""
