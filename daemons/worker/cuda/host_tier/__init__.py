"""KV pages between a GPU and page-locked host memory: who copies, by which way, and who waits for what."""
