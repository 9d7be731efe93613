"""Health of a daemon: its progress, and the gRPC service that tells it."""
