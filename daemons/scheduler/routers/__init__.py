"""The routers that are connected: their streams, outboxes and load reports."""
