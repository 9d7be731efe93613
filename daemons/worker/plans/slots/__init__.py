"""Slots: their columns, and the blobs and traces that belong to them."""
