"""GEMMs of the model's dtype on a GPU: cuBLASLt's, our own, and the choice among them by measurement."""
