"""Guided decoding: what the tokenizer, which compiles grammars, and the worker, which follows them, have in common."""
