"""GEMMs of up to 256 rows on Hopper, in CUDA C++ compiled by NVRTC."""
