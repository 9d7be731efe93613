"""Speculative decoding: drafters, which propose tokens that a step verifies beside the last token of a row."""
