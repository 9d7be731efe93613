"""The worker group: found, claimed, fed with plans; requests that kill it are isolated."""
