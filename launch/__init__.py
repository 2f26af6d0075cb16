"""torchrun entry points."""
