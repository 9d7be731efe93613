"""A dense decoder whose projections are FP8."""
