"""Compose files: read, merged, interpolated, translated to this machine."""
