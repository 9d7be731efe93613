"""Intake: messages of clients made into requests that any router can run again."""
