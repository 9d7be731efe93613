"""FlashInfer's attention kernels behind the seam of attention on a device."""
