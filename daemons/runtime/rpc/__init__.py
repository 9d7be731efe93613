"""gRPC as every daemon uses it: servers, channels, health, hello, typed errors, bounds of messages."""
