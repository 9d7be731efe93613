"""Admission: waiting sequences get slots and pages, and prompts their chunks."""
