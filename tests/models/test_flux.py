"""Tests that FLUX.1 on 1 to 4 ranks equals diffusers' `FluxTransformer2DModel`, and that it loads diffusers' weights.

The truth is diffusers' module in fp64 in one process. `StayDouble` keeps its roundings to fp32 in fp64, on both sides,
so that only the order of sums differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqpar import DistributedDiT
from seqpar.adapter.forward import shares
from seqpar.local import reference
from seqpar.models import flux
from seqpar.ranks.mesh import Mesh
from seqpar.ranks.shard import JointShard, Shard
from seqpar.weights.find import from_diffusers, locate
from tests.engine.test_distributed import local
from tests.support.foreign import StayDouble
from tests.support.meshes import LAYOUTS, TRANSPORTS, build, mesh_for, random
from tests.support.pairs import covering
from tests.support.pool import Pool

TOLERANCE, VISIBLE = 1e-12, 1e-3
ROWS, SIZE, AREA = 2, (6, 10), 15  # 15 image tokens divide by no world but 3, and each row has its own prompt
TEXTS = (5, 2)  # with two text tokens some ranks have none
SIZES: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 5,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 12,
    "axes_dims_rope": (4, 6, 6),
}
Mistake = Literal["none", "rotary off by one", "text shard lost", "branches swapped"]


def theirs(dtype: torch.dtype = torch.float64, guidance: bool = True, **sizes: Any) -> Any:
    """Return diffusers' module with random weights, the same in every process; no gate, norm or bias is trivial."""
    model: Any = FluxTransformer2DModel(guidance_embeds=guidance, **{**SIZES, **sizes})
    model = model.double().requires_grad_(False)
    for seed, (name, weight) in enumerate(model.named_parameters()):
        size = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.5
        weight.copy_(random(tuple(weight.shape), seed) * size + (weight.dim() == 1 and ".norm_" in name))
    return model.to(dtype).eval()


@cache
def shared(guidance: bool, device: torch.device) -> Any:
    """Return our model with these weights, made once in a process; nobody may change it."""
    return from_diffusers(theirs(guidance=guidance)).build(torch.float64, device)


def inputs(text: int, guidance: bool, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the arguments of a call of ours; timesteps go from 0 to 1000."""
    return {
        "hidden_states": random((ROWS, 4, *SIZE), 1, device, dtype),
        "timestep": torch.tensor([967.3, 31.2], device=device, dtype=dtype),
        "encoder_hidden_states": random((ROWS, text, 24), 2, device, dtype),
        "pooled_projections": random((ROWS, 12), 3, device, dtype),
        **({"guidance": torch.tensor([3.5, 2.1], device=device, dtype=dtype)} if guidance else {}),
    }


def patches(x: Tensor) -> Tensor:
    """Return tokens (B, L, 4 C) of latents, as diffusers' pipeline packs them."""
    rows, channels, height, width = x.shape
    x = x.view(rows, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(rows, height // 2 * (width // 2), 4 * channels)


def called(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Return the prediction of diffusers' module, called as its pipeline does, as tokens."""
    height, width, dtype = SIZE[0] // 2, SIZE[1] // 2, given["hidden_states"].dtype
    image = torch.zeros(height, width, 3, dtype=dtype)
    image[..., 1] += torch.arange(height)[:, None]
    image[..., 2] += torch.arange(width)[None]
    rest = {name: x for name, x in given.items() if name not in ("hidden_states", "timestep")}
    text = torch.zeros(given["encoder_hidden_states"].shape[1], 3)
    ids = {name: x.to(given["timestep"].device) for name, x in (("img_ids", image.view(-1, 3)), ("txt_ids", text))}
    return model(patches(given["hidden_states"]), timestep=given["timestep"] / 1000, **ids, **rest).sample


@cache
def truth(text: int, guidance: bool = True, device: str = "cpu") -> Tensor:
    """Return what diffusers' module computes on a device, in host memory; GPUs round timesteps' sines differently."""
    with StayDouble():
        return called(theirs(guidance=guidance).to(device), inputs(text, guidance, torch.float64, device)).cpu()


def spoiled(dit: DistributedDiT, mistake: Mistake) -> None:
    """Make the last rank (or the whole model) wrong in this way."""
    model: Any = dit.model
    last = dit.mesh.sequence.rank == dit.mesh.sequence.size - 1
    forward: Callable[..., Any] = model.forward_tokens

    def wrong(streams: dict[str, Tensor], positions: dict[str, Tensor], *rest: Any) -> Any:
        if mistake == "text shard lost" and last:
            streams = {**streams, "text": torch.zeros_like(streams["text"])}
        if mistake == "rotary off by one" and last:
            positions = {**positions, "image": positions["image"].roll(1, 0)}
        return forward(streams, positions, *rest)

    model.forward_tokens = wrong
    for block in model.blocks if mistake == "branches swapped" else ():
        block.text, block.image = block.image, block.text


def ours(
    rank: int,
    world: int,
    device: torch.device,
    strategy: str,
    transport: str,
    guidance: bool = True,
    mistake: Mistake = "none",
) -> list[Tensor]:
    """Return the predictions for both lengths of text, as tokens, after two calls with the same buffers."""
    model = shared(guidance, device) if mistake == "none" else theirs(guidance=guidance)
    dit = DistributedDiT(model, mesh_for(strategy, world, device), strategy, local(device), transport)
    if mistake != "none":
        spoiled(dit, mistake)
    found = []
    with StayDouble():
        for text in TEXTS:
            given = inputs(text, guidance, torch.float64, device)
            first, again = (dit(**given).sample for _ in range(2))
            assert torch.equal(first, again)
            found.append(patches(first))
    dit.release()
    return found


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def furthest(found: Sequence[Tensor], device: str, guidance: bool = True) -> float:
    """Return the largest error of the predictions for both lengths of text."""
    return max(error(got, truth(text, guidance, device)) for got, text in zip(found, TEXTS, strict=True))


# every strategy by every transport, on one world after the other
CASES = [*covering(LAYOUTS, TRANSPORTS, turns=(2, 3, 4)), ("ulysses", TRANSPORTS[0], 1)]


@pytest.mark.parametrize(("strategy", "transport", "world"), CASES)
def test_flux_on_shards_equals_diffusers_module(ranks: Pool, world: int, transport: str, strategy: str) -> None:
    for found in ranks.run(world, ours, strategy, transport):
        assert furthest(found, ranks.device) < TOLERANCE


@pytest.mark.parametrize("world", [1, 3])
def test_schnell_has_no_guidance(ranks: Pool, world: int) -> None:
    for found in ranks.run(world, ours, "kv_first", "collective", False):
        assert furthest(found, ranks.device, False) < TOLERANCE
    assert error(truth(TEXTS[0]), truth(TEXTS[0], False)) > VISIBLE


@pytest.mark.parametrize("mistake", ["rotary off by one", "text shard lost", "branches swapped"])
@pytest.mark.parametrize("strategy", ["ulysses", "kv_first"])
def test_flux_negative_controls_are_noticed(ranks: Pool, strategy: str, mistake: Mistake) -> None:
    for found in ranks.run(2, ours, strategy, "collective", True, mistake):
        assert all(
            error(got, truth(text, True, ranks.device)) > VISIBLE for got, text in zip(found, TEXTS, strict=True)
        )


def alone(dtype: torch.dtype, text: int = TEXTS[0]) -> tuple[Tensor, Tensor]:
    """Return our and diffusers' prediction on one rank in this dtype."""
    model, given = theirs(dtype), inputs(text, True, dtype)
    with StayDouble() if dtype == torch.float64 else nullcontext():
        return patches(DistributedDiT(model, Mesh.single())(**given).sample), called(model, given)


def test_in_fp32_only_roundings_differ() -> None:
    got, want = alone(torch.float32)
    assert error(got, want) < 1e-5
    # the sinusoids of a timestep near 1000 round by 1e-4 at most
    assert error(want.double(), truth(TEXTS[0])) < 1e-3


def test_in_bf16_the_error_is_not_larger_than_diffusers() -> None:
    """The truth is the module in fp64 with the weights and inputs that bf16 can hold, the sinusoids' included."""
    model, given = theirs(torch.bfloat16), inputs(TEXTS[0], True, torch.bfloat16)
    timestep = (given["timestep"] / 1000 * 1000).double()
    exact = {name: x.double() for name, x in given.items()} | {"timestep": timestep}
    exact["guidance"] = (given["guidance"] * 1000).double() / 1000
    want, other = called(theirs(torch.bfloat16).double(), exact), called(model, given)
    got = patches(DistributedDiT(model, Mesh.single())(**given).sample)
    assert (got - want).norm() <= 1.25 * (other - want).norm()
    assert (other - want).norm() < 0.05 * want.norm()
    exact["timestep"] = torch.tensor([967.3, 31.2], dtype=torch.float64)
    # a negative control: without diffusers' rounding of the timestep the sinusoids are others
    assert (called(theirs(torch.bfloat16).double(), exact) - want).norm() > (other - want).norm()


def test_a_call_computes_the_rows_of_the_table() -> None:
    for dtype, most in ((torch.float64, 1e-12), (torch.bfloat16, 0.03)):
        model: Any = from_diffusers(theirs(dtype)).build(dtype, torch.device("cpu"))
        given = inputs(TEXTS[0], True, dtype)
        t, guidance, pooled = given["timestep"], given["guidance"], given["pooled_projections"]
        table = model.modulate(t, pooled_projections=pooled, guidance=guidance)
        call = model.modulate_call(t / 1000, guidance, pooled)
        shared = model.modulate_call(t / 1000, guidance, pooled, spread=in_shares)
        assert all(torch.equal(shared[name], rows) for name, rows in call.items())
        assert table.keys() == call.keys()
        for name, rows in table.items():
            assert rows.shape == call[name].shape
            assert rows.dtype == call[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert error(call[name], rows) < most
        with pytest.raises(ValueError, match="got no guidance scale, expected one for each row"):
            model.modulate(t, pooled_projections=pooled)


def in_shares(widths: Sequence[int], make: Callable[[int], Tensor]) -> list[Tensor]:
    """Compute results as three ranks would, each its own, and gather them."""
    found = shares(widths, 3)
    sizes = [sum(widths[share]) for share in found]
    assert max(sizes) - min(sizes) <= max(widths)
    gathered = [torch.cat([make(index) for index in range(share.start, share.stop)], dim=1) for share in found]
    return list(torch.cat(gathered, dim=1).split(list(widths), dim=1))


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_ranks_share_the_modulation_evenly(parts: int) -> None:
    widths = [18432] * 38 + [9216] * 38 + [6144]  # FLUX.1's
    found = shares(widths, parts)
    assert [index for share in found for index in range(share.start, share.stop)] == list(range(len(widths)))
    assert max(sum(widths[share]) for share in found) <= sum(widths) / parts + max(widths)
    assert shares([4, 4], 4) == [slice(0, 0), slice(0, 1), slice(1, 1), slice(1, 2)]


def test_in_fp16_a_stream_that_overflows_stays_finite() -> None:
    model: Any = from_diffusers(theirs(torch.float16)).build(torch.float16, torch.device("cpu"))
    for block in model.single:
        block.out.bias.fill_(6e4)
        block.modulation.bias[2 * 80 :].fill_(2.0)
    given = inputs(TEXTS[0], True, torch.float16)
    got = DistributedDiT(model, Mesh.single(), local="reference")(**given).sample
    assert got.isfinite().all()


# Checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [True, False])
def test_a_pipeline_folder_with_sharded_weights_is_loaded(tmp_path: Path, guidance: bool) -> None:
    model = theirs(torch.float32, guidance)
    model.save_pretrained(tmp_path / "transformer", max_shard_size="200KB")
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    assert len(list((tmp_path / "transformer").glob("*.safetensors"))) > 1
    found = locate(tmp_path)
    assert found.config == from_diffusers(model).config
    loaded = found.build(torch.float32, torch.device("cpu"))
    memory = from_diffusers(model).build(torch.float32, torch.device("cpu"))
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), memory.parameters(), strict=True))
    given = inputs(TEXTS[0], guidance, torch.float32)
    assert error(patches(DistributedDiT(loaded, Mesh.single())(**given).sample), called(model, given)) < 1e-5


def test_every_parameter_is_rows_of_diffusers_parameters() -> None:
    """So diffusers' parameters can be views of ours."""
    model = theirs()
    blueprint = from_diffusers(model)
    assert blueprint.keys is not None
    state, used = model.state_dict(), []
    for source in blueprint.keys.sources.values():
        tensors = [state[key] for key in source.keys]
        assert torch.equal(source.combine(*tensors), torch.cat(tensors))
        used += source.keys
    assert sorted(used) == sorted(state)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_planner_counts_the_flops_that_torch_counts(rows: int) -> None:
    """The planner counts embedding and final layer for every token; the model runs them for the image only."""
    blueprint = from_diffusers(theirs())
    model: Any = blueprint.build(torch.float64, torch.device("cpu"))
    given, text = {name: x[:rows] for name, x in inputs(5, True, torch.float64).items()}, 5
    pooled, guidance = given["pooled_projections"], given["guidance"]
    conditioning = model.modulate(given["timestep"], pooled_projections=pooled, guidance=guidance)
    streams = {"text": random((rows, text, 80), 4), "image": model.patchify(given["hidden_states"])}
    positions = model.stream_positions(SIZE, {"text": text, "image": AREA})
    attend = build("ulysses", Mesh.single(), JointShard((Shard(text, 1), Shard(AREA, 1))), reference.attend)
    with FlopCounterMode(display=False) as counter:
        model.forward_tokens(streams, positions, conditioning, attend)
    work = flux.work(blueprint.config)
    ends = sum(2 * rows * text * inside * outside for inside, outside in work.once)
    in_place = 3 * 2 * rows * (text + AREA) * 80 * 80  # torch does not count addmm_, of which a single block has one
    assert counter.get_total_flops() + in_place == work.step(rows, text + AREA).flops - ends
    assert work.table == sum(table[0].numel() for table in conditioning.values())


def test_presets_are_the_published_sizes() -> None:
    assert set(flux.PRESETS) == {"flux.1-dev", "flux.1-schnell"}
    with torch.device("meta"):
        whole = FluxTransformer2DModel(guidance_embeds=True)
    for name, count in (("flux.1-dev", 11_901_408_320), ("flux.1-schnell", 11_891_178_560)):
        assert sum(x.numel() for x in locate(name).meta().parameters()) == count
    assert sum(x.numel() for x in whole.parameters()) == 11_901_408_320
    assert from_diffusers(whole).config == flux.PRESETS["flux.1-dev"]
    assert flux.PRESETS["flux.1-schnell"] == replace(flux.PRESETS["flux.1-dev"], guidance_embeds=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_single_layers": 0}, "num_single_layers=0, expected int >= 1"),
        ({"patch_size": 2}, "got a FLUX.1 config with patch_size=2, expected 1"),
        ({"in_channels": 63}, "in_channels=63, expected int that's a multiple of 4"),
        ({"axes_dims_rope": (16, 56)}, r"axes_dims_rope=tuple \(16, 56\), expected array of length 3"),
        ({"axes_dims_rope": (16, 56, 58)}, r"got axes_dims_rope \(16, 56, 58\), expected three .* with sum 128"),
        ({"quantization_config": {}}, "got a FLUX.1 config: Object contains unknown field quantization_config"),
    ],
)
def test_unknown_variants_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flux.recognise({}, {"_class_name": "FluxTransformer2DModel", **change})


def test_true_guidance_needs_the_embeddings_of_a_negative_prompt() -> None:
    with torch.device("meta"):
        model = flux.Model(replace(flux.PRESETS["flux.1-dev"], num_layers=1, num_single_layers=1))
    with pytest.raises(ValueError, match="got classifier-free guidance without a negative prompt"):
        model.null_prompt({})
