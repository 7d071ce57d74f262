"""Ops of DeepSeek-V3.2 serving, one a file: contract, float32 reference, cases, backends."""
