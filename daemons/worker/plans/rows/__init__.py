"""Rows of a step: from a plan to the batch of a forward, and from its outputs to results."""
