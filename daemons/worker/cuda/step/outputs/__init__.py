"""Outputs of a step on their way to the host: tokens, logprobs, vectors."""
