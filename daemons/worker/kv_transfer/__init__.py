"""KV transfers between workers: staging memory, its lifecycle on both sides, and transports."""
