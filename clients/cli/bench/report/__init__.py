"""Records of requests, and the figures, tables and plots that are made of them."""
