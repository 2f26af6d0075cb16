"""Checkpoints: formats, key maps, checks; from a name to a model."""
