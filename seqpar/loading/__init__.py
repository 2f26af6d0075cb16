"""Finds, checks and loads checkpoints: it turns a name into a model."""
