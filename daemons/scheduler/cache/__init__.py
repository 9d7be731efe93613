"""The prefix cache: its seam, the radix tree, eviction, and the feed for those who watch it."""
