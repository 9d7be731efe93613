"""Answers over HTTP: whole or as server-sent events, logprobs, usage."""
