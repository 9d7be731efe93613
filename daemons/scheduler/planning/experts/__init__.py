"""Experts that ranks share: the mode in which they are reached, and their balance over ranks."""
