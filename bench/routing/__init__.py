"""Placement policies in virtual time: replicas as a cost model, the router's own placement, workloads."""
