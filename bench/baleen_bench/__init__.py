"""Measures kernels on a GPU against the limits of the machine and against libraries; `python -m baleen_bench`."""
