"""Networks that draft on a GPU, beside the model whose tokens they propose."""
