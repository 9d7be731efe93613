"""Sampling on the device: penalties, filters, one token a row."""
