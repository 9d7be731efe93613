"""Replacement of a running cluster's processes, one after the other, while it serves."""
