"""Schedulers of a router: links, the pool of them, placement, and the frames of Serve."""
