"""KV pages: states, transitions and owners, and the invariant over all of them."""
