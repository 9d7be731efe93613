"""KV in host memory: pages, segments that outlive a worker, and the tiers that settings name."""
