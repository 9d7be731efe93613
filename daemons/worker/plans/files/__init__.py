"""Plans in files: dumps of steps that died, and recordings."""
