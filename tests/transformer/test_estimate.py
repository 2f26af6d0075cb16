"""Tests that the planner's description of published transformers has their published amounts of work."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seqpar.families import _find as _guided
from seqpar.families._find import WORK, cuts_of
from seqpar.families._prove import tiny_of
from seqpar.families._tiny import BATCH, TEXT, arguments, build
from seqpar.planner.rates import H200
from seqpar.planner.search import Preferences, search
from seqpar.transformer import estimate
from seqpar.transformer.blocks import blocks_of
from seqpar.transformer.parallelize import parallelize, release
from seqpar.types.facts import Work
from tests.support.diffusers_tiny import MODELS

THEIRS: Any = diffusers
WAN_14B = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40}
SD35 = {"num_layers": 38, "num_attention_heads": 38, "attention_head_dim": 64, "joint_attention_dim": 4096}


# TFLOP of one forward of image tokens and, as the planner counts them, text tokens
@pytest.mark.parametrize(
    ("kind", "config", "tokens", "teraflop", "heads", "head_dim"),
    [
        ("FluxTransformer2DModel", {}, 4608, 74.4, 24, 128),
        ("QwenImageTransformer2DModel", {}, 4224, 70.6, 24, 128),
        ("WanTransformer3DModel", WAN_14B, 32760, 1665, 40, 128),
        ("SD3Transformer2DModel", {**SD35, "caption_projection_dim": 2432}, 4429, 28.6, 38, 64),
    ],
)
def test_published_transformers(
    kind: str, config: dict[str, Any], tokens: int, teraflop: float, heads: int, head_dim: int
) -> None:
    with torch.device("meta"):
        module = getattr(THEIRS, kind)(**config)
    work = estimate.work_of(module)
    assert (work.heads, work.kv_heads, work.head_dim) == (heads, heads, head_dim)
    assert work.step(1, tokens).flops / 1e12 == pytest.approx(teraflop, rel=0.1)
    assert cuts_of(module).attention
    # its modules make q, k and v, so that kv_first hides nothing: measured 82.3 ms, ulysses 78.4 (Qwen-Image, 2 GPUs)
    run = estimate.load_of(module, torch.bfloat16, guided=False)
    picks = {world: search(work, run, world, Preferences(), H200, "peer", None).best.strategy for world in (2, 4)}
    assert "kv_first" not in picks.values()
    assert picks[4] == "ulysses"
    fused = estimate.planned_work(module)
    counted = fused.step(1, tokens - sum(fused.joined), fused.joined)
    assert counted.flops / 1e12 == pytest.approx(teraflop, rel=0.1)
    run = estimate.load_of(module, torch.bfloat16, False, fused.joined)
    picks = {world: search(fused, run, world, Preferences(), H200, "peer", None).best.strategy for world in (2, 4)}
    # kv_first sends keys while another projection runs
    assert ("kv_first" in picks.values()) == bool(blocks_of(module))
    if kind == "FluxTransformer2DModel":
        assert set(picks.values()) == {"kv_first"}


@pytest.mark.parametrize("name", MODELS)
def test_every_transformer_of_the_table_is_described(name: str) -> None:
    module = MODELS[name].build()
    work = estimate.work_of(module)
    assert isinstance(work, Work)
    assert work.layers >= 1
    assert work.heads % work.kv_heads == 0
    load = estimate.load_of(module, torch.float64, guided=True)
    assert load.tokens > 0
    assert load.parameters == sum(x.numel() for x in module.parameters())


DESCRIBED = [name for name, tiny in MODELS.items() if tiny.kind in WORK and tiny.splits]
# the part that is described where sound, blocks of the text alone, or weights for reference images are left out, or a
# picture is counted as if it were text
PARTLY = {
    "flux3": 3 / 4,
    "flux3_reference": 3 / 4,
    "wan_i2v": 24 / 29,
    "ltx2": 1 / 2,
    "ltx2_3": 0.6673,
    "z_image": 8 / 11,
    "z_image_controlnet": 8 / 11,
}


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_family_of_blocks_describes_all_weights_of_its_blocks(name: str) -> None:
    """A product of each linear layer, and no other; how many rows it has, `test_rows.py` counts by FLOPs."""
    module, described = MODELS[name].build(), WORK[MODELS[name].kind]
    layers = [x for _, block in blocks_of(module) for x in block.modules() if isinstance(x, torch.nn.Linear)]
    theirs, ours = sum(x.weight.numel() for x in layers), 0
    for kind in described(module.config).blocks:
        cross = () if kind.cross is None else kind.cross.gemms
        gemms = (*kind.gemms, *(gemm for other in kind.apart for gemm in other), *kind.modulation, *cross)
        ours += kind.count * sum(inputs * outputs for inputs, outputs in gemms)
    assert ours / theirs == pytest.approx(PARTLY.get(name, 1), rel=1e-3)
    assert ours == theirs or name in PARTLY
    outputs = ({**module.config, "out_channels": count} for count in (None, module.config["in_channels"]))
    assert len(set(map(described, outputs))) == 1  # as many outputs as inputs, if the config says none


# of each kind some; the rows of text are one stream with those of the image in the first
JOINED = ("ErnieImageTransformer2DModel",)
MADE = (
    "WanTransformer3DModel",
    "WanAnimateTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "ZImageTransformer2DModel",
)
DESCRIBED_BY_MODULES = [
    *JOINED,
    *("AuraFlowTransformer2DModel", "BriaFiboTransformer2DModel", "CogView4Transformer2DModel"),
    *("CosmosTransformer3DModel", "EasyAnimateTransformer3DModel", "GlmImageTransformer2DModel"),
    *("HiDreamImageTransformer2DModel", "Ideogram4Transformer2DModel", "Kandinsky5Transformer3DModel"),
    *("PixArtTransformer2DModel", "SkyReelsV2Transformer3DModel", "StableAudioDiTModel"),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # Kandinsky's, whose embeddings are fp32
@pytest.mark.parametrize("kind", [*DESCRIBED_BY_MODULES, *MADE])
def test_tokens_and_flops_are_those_of_a_call(kind: str) -> None:
    """Tokens are the rows that are cut; FLOPs are torch's, but for modulation, which few rows make."""
    tiny = tiny_of(kind)
    module = build(getattr(THEIRS, kind), tiny)
    given, conditions = arguments(module, tiny), list[int]()

    def watch(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = inputs[0].numel() // layer.in_features
        conditions.append(2 * rows * layer.weight.numel() if rows <= BATCH else 0)

    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(watch)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        module(**given, return_dict=False)
    counted = counter.get_total_flops() - sum(conditions)
    parallelize(module, cfg=False, native=False)
    with torch.no_grad():
        module(**given, return_dict=False)
    call: Any = module.forward
    lengths = dict(call.state.lengths)
    release(module)
    state = next((lengths[name] for name in ("image", "sound") if name in lengths), max(lengths.values()))
    if (latents := latents_of(module.config, given)) is not None:
        assert _guided.tokens_of(module, latents)[0] == state - TEXT * (kind in JOINED)
    if kind in DESCRIBED_BY_MODULES:
        ours = estimate.work_of(module, TEXT).step(BATCH, sum(lengths.values())).flops
        assert ours == pytest.approx(counted, rel=1 / 8)


def latents_of(config: Any, given: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return frames, rows and columns of the latents in a call's arguments; None for tokens."""
    shape = given["x"][0].shape if "x" in given else given["hidden_states"].shape[1:]
    channels = config["in_channels"] if "in_channels" in config else config["in_visual_dim"]
    sides = [side for side in shape if side != channels]
    frames, rows, columns = (*[1] * (3 - len(sides)), *sides)
    return (frames, rows, columns) if len(shape) > 2 or "rotary_embedding" in given else None


def test_a_class_that_derives_from_a_described_one_is_described() -> None:
    module = MODELS["flux"].build()
    wanted = estimate.planned_work(module)
    module.__class__ = type("Mine", (type(module),), {})
    assert estimate.planned_work(module) == wanted != estimate.work_of(module)


def test_guidance_that_is_an_input_needs_no_second_branch() -> None:
    guided = {name: _guided.is_guided(MODELS[name].build()) for name in ("flux", "flux2", "qwen", "wan", "sd3")}
    assert guided == {"flux": False, "flux2": False, "qwen": True, "wan": True, "sd3": True}


def test_a_few_weights_in_fp32_do_not_decide_the_dtype() -> None:
    module = MODELS["wan"].build().to(torch.bfloat16)
    module.scale_shift_table.data = module.scale_shift_table.data.float()
    assert next(module.parameters()).dtype == torch.float32
    assert estimate.dtype_of(module) == torch.bfloat16


def test_what_has_no_attention_is_refused() -> None:
    module = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    with pytest.raises(ValueError, match="without a list of blocks whose attention has heads, to_q and to_k"):
        estimate.work_of(module)
