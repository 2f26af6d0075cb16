"""Kernels that run between matrix products. Each kernel is one file, which also has its plain-torch reference."""
