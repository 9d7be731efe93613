"""Transports of KV between workers, and the choice of one by settings."""
