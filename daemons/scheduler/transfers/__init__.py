"""KV transfers of a scheduler: what it waits for from others, and what it hands over to them."""
