"""Experts that ranks share: their slots, the seam that carries rows to them, and their moves."""
