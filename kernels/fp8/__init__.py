"""FP8 GEMMs and the quantisation of rows."""
