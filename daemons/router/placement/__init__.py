"""Which scheduler gets an output: the routers' view of every replica's prefix cache, and the policies over it."""
