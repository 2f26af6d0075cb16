"""Pipelines from a prompt or labels to pictures, one file for each family of models."""
