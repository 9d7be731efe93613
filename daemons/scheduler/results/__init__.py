"""Results of steps: lengths, tokens, ends, and the outputs for those who submitted."""
