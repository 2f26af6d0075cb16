"""Where Ovis-Image's tokens are split: as FLUX.1's (`flux.py`), though its MLPs are SwiGLU."""

from __future__ import annotations

from seqpar.families import Pipelines
from seqpar.families.flux import cuts_of_kin

CUTS = {"OvisImageTransformer2DModel": cuts_of_kin()}
PIPELINES = Pipelines(sigmas="Ovis")
