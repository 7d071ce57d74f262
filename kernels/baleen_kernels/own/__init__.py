"""Kernels of our own: Triton modules and CUDA sources. Imported only by the backend that calls them."""
