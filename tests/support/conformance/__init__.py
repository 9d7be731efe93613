"""Schemas of many kinds, texts written under their grammars at random, and what jsonschema says of these."""
