"""Sampling of a step, with options, masks and chains kept by slot."""
