"""Boundaries, joints and reasons of several families."""

from __future__ import annotations

from typing import Any

from seqpar.families._cuts import Boundary, CutTokens, GatherTokens, Joint

IMAGE, TEXT = CutTokens("image"), CutTokens("text", may_be_empty=True)
OUT = Boundary(gathers={0: GatherTokens("image")})
TEXT_IMAGE, IMAGE_TEXT = Joint(("text", "image")), Joint(("image", "text"))
ALONE = Joint(("image",))
BETWEEN = "residuals that are added between blocks would have to be split as the blocks' tokens are"


def _reads_lengths(module: Any) -> str:
    return "it reads the lengths of the texts on the host"
