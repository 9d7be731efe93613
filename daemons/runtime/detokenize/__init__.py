"""Ids to text while they arrive: for the detokenizer, and for a router with --tokenizer-path."""
