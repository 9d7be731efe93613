"""Shared by every daemon: servers and channels, health, typed errors, settings, logs, metrics, lifecycle."""
