"""Tests that UniDiffuser's U-ViT on 1 to 4 ranks equals diffusers' `UniDiffuserModel` and the original arithmetic.

The truth is computed in fp64 in one process. `original` is the arithmetic of the original code, written from its
description (UniDiffuser, arXiv 2303.06555) with the names of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from diffusers import UniDiffuserModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqpar import DistributedDiT, Guidance
from seqpar.local import reference
from seqpar.mesh import Mesh
from seqpar.models import uvit
from seqpar.models._uvit_files import TEXT_TOKENS
from seqpar.sampling.request import Request
from seqpar.sampling.run import begin
from seqpar.shard import JointShard, Shard
from seqpar.streams import Split
from seqpar.transports.collective.point_to_point import gather
from seqpar.weights.checkpoint import from_state_dict
from seqpar.weights.find import Blueprint, from_diffusers, locate
from tests.support.foreign import StayDouble, bound
from tests.support.meshes import LAYOUTS, TRANSPORTS, build, mesh_for, random
from tests.support.pool import Pool
from tests.test_distributed import local

TOLERANCE, VISIBLE = bound(1e-12), 1e-3
TEXT, TEXT_WIDTH, CLIP_WIDTH = 7, 6, 5  # few text tokens, so that ranks have different numbers of them
STREAMS = ("image", "clip", "text")
# heads, layers, whether it is version 1, batch rows: heads do not divide by the ranks, and five layers are four and one
CASES = ((3, 4, False, 1), (5, 5, True, 3))
Case = tuple[int, int, bool, int]
Outputs = dict[str, Tensor]
Mistake = Literal[
    "none", "skips in order", "positions off by one", "no data type", "norm before the sum", "timesteps swapped"
]


def weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return random fp64 weights of these shapes, the same in every process; no norm, bias or position is trivial."""
    made = {}
    for seed, (name, x) in enumerate(state.items()):
        size = 0.5 if x.dim() == 1 or "pos_embed" in name else x[0].numel() ** -0.5
        made[name] = random(tuple(x.shape), seed) * size + (x.dim() == 1 and "norm" in name and "weight" in name)
    return made


@cache
def theirs(heads: int, layers: int, version_1: bool) -> Any:
    """Return diffusers' module with random weights."""
    sizes = {"text_dim": TEXT_WIDTH, "clip_img_dim": CLIP_WIDTH, "num_text_tokens": TEXT, "sample_size": 8}
    model: Any = UniDiffuserModel(
        **sizes,
        num_attention_heads=heads,
        attention_head_dim=8,
        num_layers=layers,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        activation_fn="gelu",
        use_data_type_embedding=version_1,
    )
    model = model.double().requires_grad_(False).eval()
    model.load_state_dict(weights(model.state_dict()))
    return model


def inputs(rows: int, device: torch.device | str = "cpu", size: tuple[int, int] = (8, 8)) -> dict[str, Tensor]:
    """Return the state, the timesteps of image and text and the kinds of data; every row has its own."""
    return {
        "image": random((rows, 4, *size), 1, device),
        "clip": random((rows, 1, CLIP_WIDTH), 2, device),
        "text": random((rows, TEXT, TEXT_WIDTH), 3, device),
        "t_image": torch.tensor([967.3, 31.0, 1000.0], dtype=torch.float64, device=device)[:rows],
        "t_text": torch.tensor([1000.0, 0.0, 3.7], dtype=torch.float64, device=device)[:rows],
        "data_type": torch.tensor([1, 0, 1], device=device)[:rows],
    }


def by_diffusers(model: Any, given: Mapping[str, Tensor]) -> Outputs:
    """Return the outputs of diffusers' module, the image's as tokens."""
    with StayDouble():
        image, clip, text = model(*(given[name] for name in (*STREAMS, "t_image", "t_text", "data_type")))
    return {"image": uvit.Model.patchify(_Patch(), image), "clip": clip, "text": text}


class _Patch(uvit.Model):
    """A model of which only the size of its patches is asked."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = uvit.Config()


@cache
def truth(case: Case) -> Outputs:
    *sizes, rows = case
    return by_diffusers(theirs(*sizes), inputs(rows))


def with_mode(model: Any, mode: uvit.Mode) -> Any:
    """Return our model in another mode with the weights of diffusers' module."""
    blueprint = from_diffusers(model)
    changed = replace(blueprint, config=replace(blueprint.config, mode=mode))
    return changed.build(torch.float64, torch.device("cpu"))


def prompt_of(model: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the timestep of the state and the prompt, from those of image and text."""
    both = given["t_image"], given["t_text"]
    t, other = both if "image" in model.STATE else both[::-1]
    return t, {
        name: x for name, x in (("other_timestep", other), ("data_type", given["data_type"])) if name in model.PROMPT
    }


def predicted(
    dit: DistributedDiT, given: Mapping[str, Tensor], spoil: Callable[[dict[str, Tensor]], None] | None = None
) -> Outputs:
    """Return the whole predictions of all streams of the state, as a run computes them; spoil: changes rank's share."""
    model, axis = dit.model, dit.mesh.sequence
    t, prompt = prompt_of(model, given)
    encoded = model.encode(**prompt)
    streams = {name: x.expand(len(t), -1) for name, x in encoded.streams.items()}  # without a prompt there is one row
    streams |= {"clip": given["clip"], "text": given["text"], "image": model.patchify(given["image"])}
    split = Split.of(model, {name: x.shape[1] for name, x in streams.items()}, axis)
    mine = {name: split.mine(name, x) for name, x in streams.items()}
    if spoil is not None:
        spoil(mine)
    with StayDouble():
        table, size = model.modulate(t, **encoded.pooled), tuple(given["image"].shape[2:])
        out = model.forward_tokens(mine, dit.positions(size, split), table, dit.attend(len(t), split.tokens))
    dit.check_delivered()
    return {name: gather(x, axis, split.shard(name).sizes, dim=1) for name, x in out.items()}


def ours(
    rank: int, world: int, device: torch.device, strategy: str, transport: str, case: Case, spoiled: bool = False
) -> Outputs:
    """Return the predictions of all streams after two calls with the same buffers."""
    *sizes, rows = case
    mesh, given = mesh_for(strategy, world, device), inputs(rows, device)
    both = {**given, "t_text": given["t_image"]}  # mode "joint" has one timestep
    spoil = zeros if spoiled and mesh.sequence.rank == world - 1 else None
    found: Outputs = {}
    for mode, asked in (("text2img", given), ("joint", both)):
        dit = DistributedDiT(with_mode(theirs(*sizes), mode), mesh, strategy, local(device), transport)
        first, again = (predicted(dit, asked, spoil) for _ in range(2))
        assert all(torch.equal(x, again[name]) for name, x in first.items())
        found |= {f"{mode} {name}": x for name, x in first.items()}
        dit.release()
    return found


def zeros(mine: dict[str, Tensor]) -> None:
    mine["text"] = torch.zeros_like(mine["text"])


def error(got: Outputs, want: Outputs) -> float:
    assert got.keys() == want.keys()
    return max(float((x.cpu() - want[name]).abs().max() / want[name].abs().max()) for name, x in got.items())


@cache
def wanted(case: Case) -> Outputs:
    *sizes, rows = case
    given = inputs(rows)
    joint = by_diffusers(theirs(*sizes), {**given, "t_text": given["t_image"]})
    made = {f"text2img {name}": truth(case)[name] for name in ("image", "clip")}
    return made | {f"joint {name}": x for name, x in joint.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("strategy", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_uvit_on_shards_equals_diffusers_module(ranks: Pool, world: int, strategy: str, case: Case) -> None:
    """One rank in three or four has no time token, and only the first has the CLIP-image token."""
    transport = TRANSPORTS[world % len(TRANSPORTS)]
    for found in ranks.run(world, ours, strategy, transport, case):
        assert error(found, wanted(case)) < TOLERANCE


@pytest.mark.parametrize("strategy", ["ulysses", "kv_first"])
def test_a_lost_shard_of_the_text_is_noticed(ranks: Pool, strategy: str) -> None:
    for found in ranks.run(2, ours, strategy, "collective", CASES[1], True):
        assert error(found, wanted(CASES[1])) > VISIBLE


@pytest.mark.parametrize("mode", ["img2text", "text", "image"])
def test_modes_predict_their_streams(mode: uvit.Mode) -> None:
    *sizes, rows = CASES[1]
    given = inputs(rows)
    noise = torch.full_like(given["t_text"], uvit.NOISE)
    given |= {"t_image": noise} if mode == "text" else {"t_text": noise} if mode == "image" else {}
    want = by_diffusers(theirs(*sizes), given)
    got = predicted(DistributedDiT(with_mode(theirs(*sizes), mode), Mesh.single()), given)
    assert set(got) == ({"image", "clip"} if mode == "image" else {"text"})
    assert error(got, {name: want[name] for name in got}) < TOLERANCE


# The original arithmetic ---------------------------------------------------------------------------------------


def original_state(heads: int, half: int, version_1: bool) -> dict[str, Tensor]:
    """Return random weights with the names and shapes of an original file: patches of 2 x 2 on a latent of 8 x 8."""
    width = 64 * heads
    linear = {
        "text_embed": (width, 6),
        "text_out": (6, width),
        "clip_img_embed": (width, 5),
        "clip_img_out": (5, width),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (width, 4, 2, 2),
        "patch_embed.proj.bias": (width,),
    }
    shapes |= {"pos_embed": (1, 3 + TEXT_TOKENS + 16, width), "norm.weight": (width,), "norm.bias": (width,)}
    if version_1:
        shapes |= {"pos_embed_token": (1, 1, width), "token_embedding.weight": (2, width)}
    linear |= {"decoder_pred": (16, width)}
    blocks = [f"in_blocks.{i}" for i in range(half)] + ["mid_block"] + [f"out_blocks.{i}" for i in range(half)]
    for block in blocks:
        shapes[f"{block}.attn.qkv.weight"] = (3 * width, width)
        for norm in ("norm1", "norm2", "norm3")[not block.startswith("out") :]:
            shapes |= {f"{block}.{norm}.weight": (width,), f"{block}.{norm}.bias": (width,)}
        linear |= {f"{block}.attn.proj": (width, width), f"{block}.mlp.fc1": (4 * width, width)}
        linear |= {f"{block}.mlp.fc2": (width, 4 * width)}
        linear |= {f"{block}.skip_linear": (width, 2 * width)} if block.startswith("out") else {}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return weights({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def original(w: Mapping[str, Tensor], given: Mapping[str, Tensor], mistake: Mistake = "none") -> Outputs:
    """Return the original's outputs, the image's as a latent; mistake: what is wrong on purpose."""
    rows, _, height, width = given["image"].shape
    grid, dim = (height // 2, width // 2), w["norm.weight"].shape[0]
    image = F.conv2d(given["image"], w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=2)
    frequencies = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(dim // 2) / (dim // 2))
    times = [given[name].double()[:, None] * frequencies for name in ("t_image", "t_text")]
    times = times[::-1] if mistake == "timesteps swapped" else times
    tokens = [torch.cat((angles.cos(), angles.sin()), dim=1)[:, None] for angles in times]
    if "token_embedding.weight" in w:
        kind = w["token_embedding.weight"][given["data_type"]][:, None]
        tokens.append(torch.zeros_like(kind) if mistake == "no data type" else kind)
    tokens += [_linear(w, "text_embed", given["text"]), _linear(w, "clip_img_embed", given["clip"])]
    x = torch.cat([*tokens, image.flatten(2).transpose(1, 2)], dim=1) + _positions(w, grid, mistake)
    skips = []
    for index in range(_count(w)):
        x = _block(w, f"in_blocks.{index}", x, mistake)
        skips.append(x)
    x = _block(w, "mid_block", x, mistake)
    for index in range(_count(w)):
        skip = skips.pop(0 if mistake == "skips in order" else -1)
        x = _linear(w, f"out_blocks.{index}.skip_linear", torch.cat((x, skip), dim=-1))
        x = _block(w, f"out_blocks.{index}", _norm(w, f"out_blocks.{index}.norm1", x), mistake)
    x = _norm(w, "norm", x)
    patches = x.shape[1] - grid[0] * grid[1]
    text, clip, image = x[:, patches - 1 - TEXT_TOKENS : patches - 1], x[:, patches - 1 : patches], x[:, patches:]
    latent = _linear(w, "decoder_pred", image).view(rows, *grid, 2, 2, 4).permute(0, 5, 1, 3, 2, 4)
    made = {"image": latent.reshape(rows, 4, height, width)}
    return made | {"clip": _linear(w, "clip_img_out", clip), "text": _linear(w, "text_out", text)}


def _count(w: Mapping[str, Tensor]) -> int:
    return sum(name.startswith("in_blocks.") and name.endswith("qkv.weight") for name in w)


def _linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def _norm(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)


def _block(w: Mapping[str, Tensor], name: str, x: Tensor, mistake: Mistake) -> Tensor:
    q, k, v = F.linear(x, w[f"{name}.attn.qkv.weight"]).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    branches: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("norm2", lambda _: _linear(w, f"{name}.attn.proj", attended)),
        ("norm3", lambda h: _linear(w, f"{name}.mlp.fc2", F.gelu(_linear(w, f"{name}.mlp.fc1", h)))),
    ]
    for norm, branch in branches:
        made = branch(x)
        early = mistake == "norm before the sum"
        x = x + _norm(w, f"{name}.{norm}", made) if early else _norm(w, f"{name}.{norm}", x + made)
    return x


def _positions(w: Mapping[str, Tensor], grid: tuple[int, int], mistake: Mistake) -> Tensor:
    others, image = w["pos_embed"][:, :-16], w["pos_embed"][:, -16:]
    if grid != (4, 4):
        square = image.transpose(1, 2).unflatten(2, (4, 4))
        image = F.interpolate(square, grid, mode="bilinear").flatten(2).transpose(1, 2)
    if mistake == "positions off by one":
        image = image.roll(1, 1)
    kind = [w["pos_embed_token"]] if "pos_embed_token" in w else []
    return torch.cat([others[:, :2], *kind, others[:, 2:], image], dim=1)


def from_original(state: Mapping[str, Tensor], mode: uvit.Mode = "joint") -> tuple[uvit.Model, uvit.Config]:
    """Return our model with the weights of an original file, and the config that its shapes tell."""
    checkpoint = from_state_dict("original", state)
    found = uvit.recognise(checkpoint.shapes, None)
    assert found is not None
    config, name = found
    keys = uvit.KEY_MAPS[name](config)
    blueprint = Blueprint("original", uvit, replace(config, mode=mode), checkpoint, keys)  # pyright: ignore
    model: Any = blueprint.build(torch.float64, torch.device("cpu"))
    return model, config


def joint_inputs(size: tuple[int, int]) -> dict[str, Tensor]:
    given = inputs(3, size=size)
    return {**given, "text": random((3, TEXT_TOKENS, TEXT_WIDTH), 3), "t_text": given["t_image"]}


@pytest.mark.parametrize("size", [(8, 8), (6, 10)], ids=str)
@pytest.mark.parametrize("version_1", [False, True])
def test_the_arithmetic_is_the_originals(version_1: bool, size: tuple[int, int]) -> None:
    """For another image size, the positions are resized."""
    state = original_state(3, 2, version_1)
    model, config = from_original(state)
    assert config == uvit.Config(3, 64, 4, 8, text_width=6, clip_width=5, data_type=version_1)
    given = joint_inputs(size)
    got = predicted(DistributedDiT(model, Mesh.single()), given)
    assert error({**got, "image": model.unpatchify(got["image"], *size)}, original(state, given)) < TOLERANCE


@pytest.mark.parametrize("mistake", Mistake.__args__[1:])
def test_mistakes_in_the_arithmetic_are_noticed(mistake: Mistake) -> None:
    state, given = original_state(1, 2, True), inputs(3)
    given["text"] = random((3, TEXT_TOKENS, TEXT_WIDTH), 3)
    model, _ = from_original(state, "text2img")
    got = predicted(DistributedDiT(model, Mesh.single()), given)
    got["image"] = model.unpatchify(got["image"], 8, 8)
    for wrong, most, least in (("none", TOLERANCE, 0.0), (mistake, 99.0, VISIBLE)):
        want = original(state, given, wrong)
        assert least <= error(got, {name: want[name] for name in got}) < most


def test_original_files_and_diffusers_folders_load(tmp_path: Path) -> None:
    state = original_state(2, 1, True)
    torch.save(state, tmp_path / "uvit_v1.pth")
    found = locate(tmp_path / "uvit_v1.pth")
    assert (found.config.num_attention_heads, found.config.sample_size, found.config.data_type) == (2, 8, True)
    with pytest.raises(ValueError, match=r"got a UniDiffuser of width 96 with 16 image tokens, expected a multiple"):
        uvit.recognise({name: tuple(96 if n == 128 else n for n in x.shape) for name, x in state.items()}, None)
    model = theirs(3, 4, True)
    model.save_pretrained(tmp_path / "unet")
    loaded, memory = (
        x.build(torch.float64, torch.device("cpu")) for x in (locate(tmp_path / "unet"), from_diffusers(model))
    )
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), memory.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_fn": "geglu"}, "got a UniDiffuser config with activation_fn='geglu', expected 'gelu'"),
        ({"pre_layer_norm": True}, "got a UniDiffuser config with pre_layer_norm=True, expected False"),
        ({"patch_size": None}, "got a UniDiffuser config without patch_size, expected all sizes"),
        ({"depth": 3}, "got a UniDiffuser config with the unknown field depth=3"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_variants_that_are_not_implemented_are_refused(change: dict[str, Any], message: str) -> None:
    config = dict(theirs(3, 4, True).config) | {"_class_name": "UniDiffuserModel"} | change
    with pytest.raises(ValueError, match=message):
        uvit.recognise({}, config)


# A run ---------------------------------------------------------------------------------------------------------


def guided(rank: int, world: int, device: torch.device, cfg: int) -> Outputs:
    """Return the first guided prediction of a run from noise, and the streams after its steps."""
    model, given = with_mode(theirs(5, 5, True), "text2img"), inputs(2, device)
    dit = DistributedDiT(model, mesh_for("ulysses", world, device, cfg), "ulysses", local(device))
    prompt = {"other_timestep": torch.zeros(2), "data_type": torch.ones(2, dtype=torch.int64)}
    noise = {name: given[name] for name in ("image", "clip")}
    drawn = {"text": given["text"].expand(2, -1, -1, -1)}
    request = Request(DDIMScheduler(clip_sample=False), noise, prompt, 2, Guidance(3.0), drawn=drawn)
    with StayDouble():
        run = begin(dit, request)
        first = {f"first {name}": run._states[name].gather(x) for name, x in run.predict().items()}
        for _ in range(2):
            run.step()
    return first | run.all_latents()


@pytest.mark.parametrize(("world", "cfg"), [(2, 2), (3, 1)])
def test_a_guided_run_is_the_same_on_every_mesh(ranks: Pool, world: int, cfg: int) -> None:
    """In the unconditional branch the text counts as noise, whose timestep is 1000."""
    (want,) = ranks.run(1, guided, 1)
    given, t = inputs(2), torch.full((2,), 500)
    cond, uncond = (
        by_diffusers(
            theirs(5, 5, True),
            {**given, "t_image": t, "t_text": torch.full_like(t, other), "data_type": torch.ones(2, dtype=torch.int64)},
        )
        for other in (0, 1000)
    )
    first = {f"first {name}": uncond[name] + 3.0 * (cond[name] - uncond[name]) for name in ("image", "clip")}
    first["first image"] = uvit.Model.unpatchify(_Patch(), first["first image"], 8, 8)
    assert error({name: want[name] for name in first}, first) < TOLERANCE
    for got in ranks.run(world, guided, cfg):
        assert error(got, want) < bound(1e-10)


def test_modes_without_a_condition_take_no_guidance() -> None:
    with pytest.raises(ValueError, match="got guidance in mode joint, expected text2img or img2text"):
        with_mode(theirs(3, 4, False), "joint").null_prompt({})
    with pytest.raises(ValueError, match="got mode 'img', expected one of text2img, img2text, joint, image, text"):
        uvit.Config(mode="img")  # pyright: ignore


# The planner ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
def test_the_planner_counts_the_flops_that_torch_counts(rows: int) -> None:
    """The planner counts the products before and after the blocks for the image only."""
    model, given = with_mode(theirs(5, 5, True), "text2img"), inputs(rows)
    work, (_, prompt) = uvit.work(model.config), prompt_of(model, given)
    table = model.modulate(given["t_image"], **prompt)
    streams = {"text": given["text"], "clip": given["clip"], "image": model.patchify(given["image"])}
    lengths = model.config.lengths
    attend = build("ulysses", Mesh.single(), JointShard(tuple(Shard(n, 1) for n in lengths.values())), reference.attend)
    places, streams = model.stream_positions((8, 8), lengths), {**streams, **model.encode(**prompt).streams}
    with FlopCounterMode(display=False) as counter:
        model.forward_tokens(streams, places, table, attend)
    others = 2 * rows * 40 * (TEXT * TEXT_WIDTH + 2 * CLIP_WIDTH)  # of text and CLIP token, once in and out
    assert counter.get_total_flops() - others == work.step(rows, 16, work.joined).flops
    assert work.table == sum(rows_[0].numel() for rows_ in table.values())
    assert sum(work.joined) + 16 == sum(lengths.values()) == len(model.pos_embed)


def test_presets_have_the_published_sizes() -> None:
    """Parameters of the original files, and the FLOPs of a guided step."""
    for name, parameters, tokens in (("unidiffuser-v0", 952_504_912, 1104), ("unidiffuser-v1", 952_509_520, 1105)):
        blueprint = locate(name)
        assert sum(x.numel() for x in blueprint.meta().parameters()) == parameters
        assert sum(blueprint.config.lengths.values()) == tokens
        work = uvit.work(blueprint.config)
        assert work.step(2, 1024, work.joined).flops == pytest.approx(4.66e12, rel=2e-3)
    assert uvit.Config() == uvit.Config(24, 64, 30, 64, 2, 4, 4, 77, 64, 512, False)
