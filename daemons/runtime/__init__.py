"""What every daemon shares: servers and channels, health, typed errors, settings, logs, metrics, lifecycle."""
