"""HTTP connections: TLS, bounds on heads and pace, keys, guards against web pages."""
