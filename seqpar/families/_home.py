"""The package in which diffusers defines its models."""

from __future__ import annotations

HOME = "diffusers.models."  # where classes are defined whose arithmetic and construction functions know
