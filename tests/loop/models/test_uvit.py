"""Tests that UniDiffuser's U-ViT on 1 to 4 ranks equals diffusers' `UniDiffuserModel` and the original arithmetic.

The truth is computed in fp64 in one process. `tests/support/uvit.py` has the arithmetic of the original code.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.deprecated.unidiffuser.modeling_uvit import UniDiffuserModel
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seqpar import DistributedDiT, Guidance
from seqpar.cli.main import command
from seqpar.convert.formats import FORMATS, TEXT_TOKENS, Original
from seqpar.convert.originals import open_transformer
from seqpar.loading.checkpoint import from_state_dict
from seqpar.local import reference
from seqpar.loop.blueprint import Blueprint, from_diffusers, locate
from seqpar.loop.interface import Split
from seqpar.loop.models import uvit
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import JointShard, Shard
from seqpar.transports.collective import gather
from tests.graphs.test_distributed import local
from tests.support.foreign import StayDouble, bound
from tests.support.meshes import LAYOUTS, TRANSPORTS, build, mesh_for, random
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.row_by_row import by_rows, exact_mode
from tests.support.uvit import MISTAKES, Outputs, original, original_state, weights

TOLERANCE, VISIBLE = bound(1e-12), 1e-3
TEXT, TEXT_WIDTH, CLIP_WIDTH = 7, 6, 5  # few text tokens, so that ranks have different numbers of them
STREAMS = ("image", "clip", "text")
# heads, layers, whether it is version 1, batch rows: heads do not divide by the ranks, and five layers are four and one
CASES: dict[uvit.Mode, tuple[int, int, bool, int]] = {"text2img": (3, 4, False, 1), "joint": (5, 5, True, 3)}


@cache
def theirs(heads: int, layers: int, version_1: bool) -> Any:
    sizes = {"num_attention_heads": heads, "attention_head_dim": 8, "num_layers": layers, "num_text_tokens": TEXT}
    sizes |= {"text_dim": TEXT_WIDTH, "clip_img_dim": CLIP_WIDTH, "in_channels": 4, "out_channels": 4}
    others: dict[str, Any] = {"activation_fn": "gelu", "use_data_type_embedding": version_1}
    model: Any = UniDiffuserModel(**sizes, sample_size=8, patch_size=2, **others)
    model = model.double().requires_grad_(False).eval()
    model.load_state_dict(weights(model.state_dict()))
    return model


def inputs(
    rows: int, mode: uvit.Mode = "text2img", device: torch.device | str = "cpu", size: tuple[int, int] = (8, 8)
) -> dict[str, Tensor]:
    """The state, the timesteps of image and text, and the kinds of data; every row has its own.

    In mode "joint", image and text have the same timestep; without a condition, the other one is noise.
    """
    t = torch.tensor([967.3, 31.0, 1000.0], dtype=torch.float64, device=device)[:rows]
    other = torch.tensor([1000.0, 0.0, 3.7], dtype=torch.float64, device=device)[:rows]
    other = t if mode == "joint" else other if "2" in mode else torch.full_like(t, 1000)
    times = (other, t) if mode in ("img2text", "text") else (t, other)
    return {
        "image": random((rows, 4, *size), 1, device),
        "clip": random((rows, 1, CLIP_WIDTH), 2, device),
        "text": random((rows, TEXT, TEXT_WIDTH), 3, device),
        **dict(zip(("t_image", "t_text"), times, strict=True)),
        "data_type": torch.tensor([1, 0, 1], device=device)[:rows],
    }


def by_diffusers(model: Any, given: Mapping[str, Tensor]) -> Outputs:
    # the image's as tokens
    with StayDouble():
        image, clip, text = model(*(given[name] for name in (*STREAMS, "t_image", "t_text", "data_type")))
    return {"image": uvit.Model.patchify(_Patch(), image), "clip": clip, "text": text}


class _Patch(uvit.Model):
    """A model of which only the size of its patches is asked."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.config = uvit.Config()


@cache
def truth(mode: uvit.Mode) -> Outputs:
    *sizes, rows = CASES[mode]
    made = by_diffusers(theirs(*sizes), inputs(rows, mode))
    return made if mode == "joint" else {name: made[name] for name in ("image", "clip")}


@cache
def shared(mode: uvit.Mode, device: torch.device) -> Any:
    *sizes, _ = CASES[mode]
    return with_mode(theirs(*sizes), mode).to(device)


def with_mode(model: Any, mode: uvit.Mode, dtype: torch.dtype = torch.float64) -> Any:
    blueprint = from_diffusers(model)
    changed = replace(blueprint, config=replace(blueprint.config, mode=mode))
    return changed.build(dtype, torch.device("cpu"))


def prompt_of(model: Any, given: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    # the timestep of the state and the prompt
    both = given["t_image"], given["t_text"]
    t, other = both if "image" in model.STATE else both[::-1]
    return t, {
        name: x for name, x in (("other_timestep", other), ("data_type", given["data_type"])) if name in model.PROMPT
    }


def predicted(dit: DistributedDiT, given: Mapping[str, Tensor], lossy: bool = False) -> Outputs:
    """The whole predictions of all streams of the state, as a run computes them; lossy: without this rank's text."""
    model, axis = dit.model, dit.mesh.sequence
    t, prompt = prompt_of(model, given)
    encoded = model.encode(**prompt)
    streams = {name: x.expand(len(t), -1) for name, x in encoded.streams.items()}  # without a prompt there is one row
    streams |= {"clip": given["clip"], "text": given["text"], "image": model.patchify(given["image"])}
    split = Split.of(model, {name: x.shape[1] for name, x in streams.items()}, axis)
    local_streams = {name: split.mine(name, x) for name, x in streams.items()}
    if lossy:
        local_streams["text"] = torch.zeros_like(local_streams["text"])
    with StayDouble():
        table, attend = model.modulate(t, **encoded.pooled), dit.keeper.attend(len(t), split.tokens)
        positions = dit.positions(tuple(given["image"].shape[2:]), split)
        out = model.forward_tokens(local_streams, positions, table, attend)
    dit.check_delivered()
    return {name: gather(x, axis, split.shard(name).sizes, dim=1) for name, x in out.items()}


# a strategy, a transport, and whether the last rank loses its text
Row = tuple[str, str, bool]


def ours(rank: int, world: int, device: torch.device, *rows: Row) -> list[dict[uvit.Mode, Outputs]]:
    """For each row the predictions of each mode in `CASES`, after two calls with the same buffers."""
    results = []
    for strategy, transport, lossy in rows:
        mesh, found = mesh_for(strategy, world, device), {}
        for mode, (*_, batch) in CASES.items():
            dit, given = DistributedDiT(shared(mode, device), mesh, strategy, local(device), transport), inputs
            lost = lossy and mesh.sequence.rank == world - 1
            first, again = (predicted(dit, given(batch, mode, device), lost) for _ in range(2))
            assert all(torch.equal(x, again[name]) for name, x in first.items())
            found[mode] = first
            dit.release()
        results.append(found)
    return results


def error(got: Outputs, want: Outputs) -> float:
    assert got.keys() == want.keys()
    return max(float((x.cpu() - want[name]).abs().max() / want[name].abs().max()) for name, x in got.items())


# every strategy by every transport, on one world after the other
ROWS: dict[int, list[Row]] = {1: [("ulysses", TRANSPORTS[0], False)], 2: [], 3: [], 4: []}
for case in covering(LAYOUTS, TRANSPORTS, turns=(2, 3, 4)):
    ROWS[case.values[2]].append((*case.values[:2], False))
ROWS[2] += [(strategy, "collective", True) for strategy in ("ulysses", "kv_first")]


@pytest.mark.parametrize("world", ROWS)
def test_uvit_on_shards_equals_diffusers_module(ranks: Pool, world: int) -> None:
    """One rank in three or four has no time token, and only the first has the CLIP-image token."""
    for results in ranks.run(world, ours, *ROWS[world]):
        for row, found in zip(ROWS[world], results, strict=True):
            errors = [error(got, truth(mode)) for mode, got in found.items()]
            assert min(errors) > VISIBLE if row[2] else max(errors) < TOLERANCE, row


@pytest.mark.parametrize("mode", ["img2text", "text", "image"])
def test_modes_predict_their_streams(mode: uvit.Mode) -> None:
    *sizes, rows = CASES["joint"]
    given = inputs(rows, mode)
    want = by_diffusers(theirs(*sizes), given)
    got = predicted(DistributedDiT(with_mode(theirs(*sizes), mode), Mesh.single()), given)
    assert set(got) == ({"image", "clip"} if mode == "image" else {"text"})
    assert error(got, {name: want[name] for name in got}) < TOLERANCE


def test_in_bf16_the_error_is_not_larger_than_diffusers() -> None:
    """The truth is the module in fp64 with the weights and inputs that bf16 can hold."""
    model = copy.deepcopy(theirs(5, 5, True)).bfloat16()
    narrow = {name: x.bfloat16() if x.is_floating_point() and x.dim() > 1 else x for name, x in inputs(3).items()}
    wide = {name: x.double() if x.dtype == torch.bfloat16 else x for name, x in narrow.items()}
    found = predicted(DistributedDiT(with_mode(model, "text2img", torch.bfloat16), Mesh.single()), narrow)
    other, want = by_diffusers(model, narrow), by_diffusers(copy.deepcopy(model).double(), wide)
    for name, got in found.items():
        assert (got - want[name]).norm() <= 1.25 * (other[name] - want[name]).norm()
        assert (other[name] - want[name]).norm() < 0.05 * want[name].norm()


# The original arithmetic ---------------------------------------------------------------------------------------


def from_original(state: Mapping[str, Tensor], mode: uvit.Mode = "joint") -> tuple[uvit.Model, uvit.Config]:
    """Our model with the weights of an original file, and the config that its shapes tell."""
    checkpoint, original_uvit = from_state_dict("original", state), FORMATS[2]
    config = original_uvit.config_of(Original(checkpoint, {}, None, 1))
    keys = original_uvit.key_map(config)
    blueprint = Blueprint("original", uvit, replace(config, mode=mode), checkpoint, keys)
    model: Any = blueprint.build(torch.float64, torch.device("cpu"))
    return model, config


def of_original(state: Mapping[str, Tensor], given: Mapping[str, Tensor], mode: uvit.Mode) -> Outputs:
    model, _ = from_original(state, mode)
    got = predicted(DistributedDiT(model, Mesh.single()), given)
    return {**got, "image": model.unpatchify(got["image"], *given["image"].shape[2:])}


def long_inputs(mode: uvit.Mode, size: tuple[int, int] = (8, 8)) -> dict[str, Tensor]:
    return {**inputs(3, mode, size=size), "text": random((3, TEXT_TOKENS, TEXT_WIDTH), 3)}


@pytest.mark.parametrize(("version_1", "size"), [(False, (8, 8)), (True, (6, 10))], ids=str)
def test_the_arithmetic_is_the_originals(version_1: bool, size: tuple[int, int]) -> None:
    """For another image size, the positions are resized."""
    state, given = original_state(3, 2, version_1), long_inputs("joint", size)
    sizes = uvit.Config(3, 64, 4, 8, text_width=6, clip_width=5, data_type=version_1)
    assert from_original(state)[1] == sizes
    assert error(of_original(state, given, "joint"), original(state, given)) < TOLERANCE


def test_mistakes_in_the_arithmetic_are_noticed() -> None:
    state, given = original_state(1, 2, True), long_inputs("text2img")
    got, right = of_original(state, given, "text2img"), original(state, given)
    assert error(got, {name: right[name] for name in got}) < TOLERANCE
    for mistake in MISTAKES:
        wrong = original(state, given, mistake)
        assert error(got, {name: wrong[name] for name in got}) > VISIBLE, mistake


def test_original_files_and_diffusers_folders_load(tmp_path: Path) -> None:
    state = original_state(2, 1, True)
    torch.save(state, tmp_path / "uvit_v1.pth")
    found, _ = open_transformer(tmp_path / "uvit_v1.pth")
    assert (found.config.num_attention_heads, found.config.sample_size, found.config.data_type) == (2, 8, True)
    command(["convert", str(tmp_path / "uvit_v1.pth"), str(tmp_path / "new")])
    again: Any = UniDiffuserModel.from_pretrained(tmp_path / "new")  # a missing or unknown key would warn
    assert again.state_dict().keys() == load_file(next((tmp_path / "new").glob("*.safetensors"))).keys()
    kept, made = (x.build(torch.float64, torch.device("cpu")) for x in (found, from_diffusers(again)))
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(kept.parameters(), made.parameters(), strict=True))
    model = theirs(3, 4, True)
    model.save_pretrained(tmp_path / "unet")
    loaded, memory = (
        x.build(torch.float64, torch.device("cpu")) for x in (locate(tmp_path / "unet"), from_diffusers(model))
    )
    assert all(torch.equal(x, y) for x, y in zip(loaded.parameters(), memory.parameters(), strict=True))


VARIANTS: list[tuple[dict[str, Any], str]] = [
    ({"activation_fn": "geglu"}, "with activation_fn='geglu', expected 'gelu'"),
    ({"pre_layer_norm": True}, "with pre_layer_norm=True, expected False"),
    ({"patch_size": None}, "config: Object missing required field patch_size"),
    ({"patch_size": 0}, "with patch_size=0, expected int >= 1"),
    ({"num_layers": 2.0}, "with num_layers=2.0, expected int, got float"),
    ({"num_attention_heads": "2"}, "with num_attention_heads='2', expected int"),
    ({"use_data_type_embedding": 1}, "with use_data_type_embedding=1, expected bool"),
    ({"depth": 3}, "config: Object contains unknown field depth"),
]


def test_variants_that_are_not_implemented_are_refused() -> None:
    for change, message in VARIANTS:
        config = dict(theirs(3, 4, True).config) | {"_class_name": "UniDiffuserModel"} | change
        with pytest.raises(ValueError, match=f"got a UniDiffuser config.*{message.removeprefix('config')}"):
            uvit.recognise({}, config)
    with pytest.raises(ValueError, match="got guidance in mode joint, expected text2img or img2text"):
        with_mode(theirs(3, 4, False), "joint").null_prompt({})
    with pytest.raises(ValueError, match="got mode 'img', expected one of text2img, img2text, joint, image, text"):
        uvit.Config(mode="img")  # pyright: ignore


# A run ---------------------------------------------------------------------------------------------------------


def guided(rank: int, world: int, device: torch.device, cfg: int) -> Outputs:
    """The first guided prediction of a run from noise, and the streams after its steps."""
    model, given = with_mode(theirs(5, 5, True), "text2img").to(device), inputs(2, device=device)
    dit = DistributedDiT(model, mesh_for("ulysses", world, device, cfg), "ulysses", local(device))
    prompt = {"other_timestep": torch.zeros(2), "data_type": torch.ones(2, dtype=torch.int64)}
    noise, drawn = {name: given[name] for name in ("image", "clip")}, {"text": given["text"].expand(2, -1, -1, -1)}
    request = Request(DDIMScheduler(clip_sample=False), noise, prompt, 2, Guidance(3.0), drawn=drawn)
    with StayDouble():
        run = begin(dit, request)
        first = {f"first {name}": run.steppers[name].state.gather(x) for name, x in run.predict().items()}
        for _ in range(2):
            run.step()
    return first | run.latents()


def exactly(rank: int, world: int, device: torch.device, cfg: int, on: bool = True) -> Outputs:
    """The same in exact mode, by products whose rows do not depend on each other."""
    with exact_mode() if on else nullcontext(), by_rows():
        return guided(rank, world, device, cfg)


def test_a_guided_run_is_the_same_on_every_mesh(ranks: Pool) -> None:
    """In the unconditional branch the text counts as noise, whose timestep is 1000."""
    (want,) = ranks.run(1, guided, 1)
    given, t = inputs(2), torch.full((2,), 500)
    given |= {"t_image": t, "data_type": torch.ones(2, dtype=torch.int64)}
    cond, uncond = (
        by_diffusers(theirs(5, 5, True), {**given, "t_text": torch.full_like(t, other)}) for other in (0, 1000)
    )
    first = {f"first {name}": uncond[name] + 3.0 * (cond[name] - uncond[name]) for name in ("image", "clip")}
    first["first image"] = uvit.Model.unpatchify(_Patch(), first["first image"], 8, 8)
    assert error({name: want[name] for name in first}, first) < TOLERANCE
    for world, cfg in ((2, 2), (3, 1)):
        for got in ranks.run(world, guided, cfg):
            assert error(got, want) < bound(1e-10)


def test_in_exact_mode_a_guided_run_has_one_ranks_bits(cpu_ranks: Pool) -> None:
    want = exactly(0, 1, torch.device("cpu"), 1)
    for world, cfg, on in ((3, 1, True), (3, 1, False)):
        for got in cpu_ranks.run(world, exactly, cfg, on):
            same = all(torch.equal(x, want[name]) for name, x in got.items())
            assert same is on  # the last one is a negative control


# The planner ---------------------------------------------------------------------------------------------------


def test_the_planner_counts_the_flops_that_torch_counts() -> None:
    """The planner counts the products before and after the blocks for the image only."""
    model, rows = with_mode(theirs(5, 5, True), "text2img"), 2
    given = inputs(rows)
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


def test_sizes_are_the_published_ones() -> None:
    """Parameters of the original files, and the FLOPs of a guided step."""
    for name, parameters, tokens in (("unidiffuser-v0", 952_504_912, 1104), ("unidiffuser-v1", 952_509_520, 1105)):
        blueprint = locate(f"random:{name}")
        assert sum(x.numel() for x in blueprint.meta().parameters()) == parameters
        assert sum(blueprint.config.lengths.values()) == tokens
        work = uvit.work(blueprint.config)
        assert work.step(2, 1024, work.joined).flops == pytest.approx(4.66e12, rel=2e-3)
    assert uvit.Config() == uvit.Config(24, 64, 30, 64, 2, 4, 4, 77, 64, 512, False)
