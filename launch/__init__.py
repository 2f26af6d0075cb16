"""Entry points that run from a clone, with python or torchrun."""
