"""DeepSeek-V3.2 and V3 in PyTorch, module paths equal to checkpoint keys."""
