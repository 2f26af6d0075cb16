"""Where the tokens of DiT and PixArt are split."""

from __future__ import annotations

from seqpar.families._cuts import ALONE, IMAGE, OUT, Boundary, Cuts


def _from_patches(out: str) -> Cuts:
    """Return the cuts of models of one stream of image patches, with or without cross-attention to text."""
    places = {"pos_embed": Boundary(outputs={0: IMAGE}), out: OUT}
    return Cuts(places, {"transformer_blocks.*.attn1": ALONE}, local=("transformer_blocks.*.attn2",))


CUTS = {"PixArtTransformer2DModel": _from_patches("proj_out"), "DiTTransformer2DModel": _from_patches("proj_out_2")}
