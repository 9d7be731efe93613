"""Bodies of HTTP requests: bounded, counted, parsed by their type."""
