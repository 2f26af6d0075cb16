"""Where Lumina 2's tokens are split."""

from __future__ import annotations

from seqpar.families import Pipelines, Published
from seqpar.families._cuts import (
    ALONE,
    IMAGE,
    OUT,
    Boundary,
    Cuts,
    CutTokens,
    GatherTokens,
    Joint,
    StepBlocks,
    reads_lengths,
)
from seqpar.families._tiny import Tiny


def _lumina2() -> Cuts:
    joint = CutTokens("text and image")
    places = {
        "rope_embedder": Boundary(outputs={2: IMAGE, 3: joint}),
        "noise_refiner.0": Boundary(inputs={"hidden_states": IMAGE}),
        "noise_refiner.-1": OUT,
        "layers.0": Boundary(inputs={"hidden_states": joint}),
        "norm_out": Boundary(gathers={0: GatherTokens(joint.stream)}),
    }
    both = {"noise_refiner.*.attn": ALONE, "layers.*.attn": Joint((joint.stream,))}
    return Cuts(places, both, why_eager=reads_lengths, local=("context_refiner.*.attn",), calls_twice=True)


CUTS = {"Lumina2Transformer2DModel": _lumina2()}
STEPS = {"Lumina2Transformer2DModel": StepBlocks({"layers": ("hidden_states",)})}
PIPELINES = Pipelines(sigmas="Lumina2Pipeline")
PUBLISHED = {
    "Alpha-VLLM/Lumina-Image-2.0": Published("Lumina2Pipeline", "Lumina2Transformer2DModel", {"cap_feat_dim": 2304})
}
TINY = {
    "Lumina2Transformer2DModel": Tiny(
        inputs=lambda config, random: {"hidden_states": random(2, config["in_channels"], 6, 10)}
    )
}
