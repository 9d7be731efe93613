"""The detokenizer daemon: ids to text, as they come, and stop strings."""
