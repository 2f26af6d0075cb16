"""What GLM-Image's pipelines take. Its transformer has no cuts."""

from __future__ import annotations

from seqpar.families import Pipelines

PIPELINES = Pipelines(several_images=("GlmImage",))
