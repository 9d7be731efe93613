"""Model families, a folder each: `ARCHITECTURES` (names in config.json) and `create_family()` in its `__init__.py`."""
