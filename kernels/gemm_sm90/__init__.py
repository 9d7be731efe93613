"""GEMMs with few rows on Hopper, in CUDA C++ compiled by NVRTC."""
