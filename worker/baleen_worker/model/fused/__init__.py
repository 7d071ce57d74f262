"""The model as deployed: FP8 matrix products and fused ops, chosen through `baleen_kernels.selection`."""
