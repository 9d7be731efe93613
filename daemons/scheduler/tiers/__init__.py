"""KV beyond the device: what the workers' host memory holds, what is saved there, and what comes back."""
