"""Choice of the scheduler for an output: the view of every replica's prefix cache, and policies over it."""
