"""GLM-Image: cut by diffusers' own plan; what its pipelines take."""

from __future__ import annotations

from seqpar.families import Pipelines

PIPELINES = Pipelines(several_images=("GlmImage",))
