"""API keys, TLS, and files that can be trusted."""
