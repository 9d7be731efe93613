"""A worker without a model: the contract to the letter, made-up tokens, a latency model."""
