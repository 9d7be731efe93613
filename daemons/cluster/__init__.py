"""Runs the services of a compose file as local processes and keeps them alive, for machines without Docker."""
