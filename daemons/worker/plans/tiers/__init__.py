"""Tiers below the device, as plans use them: host memory, and the store below it."""
