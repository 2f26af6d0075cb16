"""Where LongCat-Image's tokens are split: as FLUX.1's (`flux.py`)."""

from __future__ import annotations

from seqpar.families.flux import STEPS_OF_KIN, cuts_of_kin

CUTS = {"LongCatImageTransformer2DModel": cuts_of_kin()}
STEPS = {"LongCatImageTransformer2DModel": STEPS_OF_KIN}
