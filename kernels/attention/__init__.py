"""Paged attention: decode, extend, shared prefixes, split KV."""
