"""Models on a device: the seam that runner, loader, memory and tuning see, and the parts that models are made of."""
