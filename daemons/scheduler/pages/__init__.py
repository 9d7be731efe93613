"""KV pages: who holds each, and the invariant over all of them."""
