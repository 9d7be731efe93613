"""A decoder of attention blocks with grouped queries and gated MLPs or routed experts: the shape of many families.

A family that has it reads its config.json into a DecoderConfig, and says what differs in its checkpoint's names.
"""
