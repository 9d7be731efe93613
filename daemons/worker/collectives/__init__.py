"""Collectives between the ranks of a group: rendezvous, transports, and the group as a model's maths sees it."""
