"""Where Z-Image's tokens are split."""

from __future__ import annotations

from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint
from seqpar.families._shared import ALONE, BETWEEN, IMAGE, OUT


def _z_image() -> Cuts:
    joint = CutTokens("text and image")
    places = {
        "noise_refiner.*": Boundary(inputs={"freqs_cis": IMAGE, "noise_mask": IMAGE}),
        "noise_refiner.0": Boundary(inputs={"x": IMAGE}),
        "noise_refiner.-1": OUT,
        "layers.*": Boundary(inputs={"freqs_cis": joint, "noise_mask": joint}),
        "layers.0": Boundary(inputs={"x": joint}),
        "layers.-1": Boundary(gathers={0: GatherTokens(joint.stream)}),
    }
    both = {"noise_refiner.*.attention": ALONE, "layers.*.attention": Joint((joint.stream,))}
    local = ("context_refiner.*.attention",)
    return Cuts(places, both, refused={"controlnet_block_samples": BETWEEN}, local=local)
