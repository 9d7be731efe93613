"""Plans and results of steps as types and as messages."""
