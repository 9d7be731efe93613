"""Outputs that wait in the router for a scheduler."""
