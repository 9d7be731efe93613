"""Networks that draft: a model of its own (standalone), an EAGLE-3 head, a layer for multi-token prediction."""
