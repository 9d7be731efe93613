"""Ranks that compute together: one model over them, how they form a group, and one build for all."""
