"""Where LongCat-Image's tokens are split: as FLUX.1's (`flux.py`)."""

from __future__ import annotations

from seqpar.families import Published
from seqpar.families.flux import STEPS_OF_KIN, cuts_of_kin

CUTS = {"LongCatImageTransformer2DModel": cuts_of_kin()}
STEPS = {"LongCatImageTransformer2DModel": STEPS_OF_KIN}
PROMPT_TOKENS = {"LongCatImageTransformer2DModel": 512}
PUBLISHED = {
    "meituan-longcat/LongCat-Image": Published(
        "LongCatImagePipeline", "LongCatImageTransformer2DModel", {"num_layers": 10, "num_single_layers": 20}
    )
}
