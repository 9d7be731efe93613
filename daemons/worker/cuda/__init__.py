"""The worker on a GPU: dense decoders over a paged KV pool, launched ahead of their tokens."""
