"""Where Ovis-Image's tokens are split: as FLUX.1's (`flux.py`), though its MLPs are SwiGLU."""

from __future__ import annotations

from seqpar.families import Pipelines, Published
from seqpar.families.flux import STEPS_OF_KIN, cuts_of_kin

CUTS = {"OvisImageTransformer2DModel": cuts_of_kin()}
STEPS = {"OvisImageTransformer2DModel": STEPS_OF_KIN}
PIPELINES = Pipelines(sigmas="Ovis")
PUBLISHED = {"AIDC-AI/Ovis-Image-7B": Published("OvisImagePipeline", "OvisImageTransformer2DModel")}
