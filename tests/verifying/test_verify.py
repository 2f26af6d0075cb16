"""Tests of `verify`: faults that are planted into the ranks' run are found and named, and correct runs hold."""

from __future__ import annotations

import io
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import seqpar
from seqpar import Guidance
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.local import sdpa
from seqpar.loop.blueprint import Blueprint
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import digest
from seqpar.loop.models import large_dit
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import unidiffuser
from seqpar.pipelines.classes import Files, Pipeline
from seqpar.pipelines.load import keep_fp32
from seqpar.planner.search import Preferences
from seqpar.verifying import compare as blocks
from seqpar.verifying import own_loop
from seqpar.verifying.compare import TokenShare, blocks_of
from seqpar.verifying.copies import unequal, weights_of
from seqpar.verifying.one_rank import widened
from seqpar.verifying.verify import Verdict, VerificationError, verify
from tests.loop.models.test_large_dit import TINY, ours
from tests.support import pipelines
from tests.support.diffusers_tiny import MODELS
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.transformer.test_lora import add
from tests.verifying.faults import (
    Fault,
    after,
    buffer_off,
    cut_off,
    ending,
    guidance_of_pipeline_off,
    guidance_off,
    head_of_kernel_off,
    head_off,
    last_layer_off,
    layer_off,
    lost_in_block_5_of_step_2,
    lost_shard,
    mask_off,
    merged_off,
    modulation_off,
    none,
    position_in_block_off,
    position_off,
    reference_off,
    rotary_off_by_one,
    stale_flag,
    swapped_branches,
)

pytestmark = pytest.mark.slow

LABELS = {"guidance": Guidance(4.0), "size": (40, 40)}  # 25 tokens, which ranks share unevenly
TEXT = 16  # tokens of a prompt, where pipelines have hundreds by default
Layout = tuple[str, int, str]
"""Strategy, size of the cfg axis, transport."""


def labels(rank: int, world: int, device: torch.device, layout: Layout, dtype: torch.dtype, config: Any = None) -> Any:
    strategy, cfg, transport = layout
    files = Files.locate("builtin") if config is None else Files(Blueprint("tiny", large_dit, config), None, None, {})
    model = files.blueprint.build(dtype, device) if config is None else ours(config, device).to(dtype)
    dit = DistributedDiT(model, mesh_for(strategy, world, device, cfg), strategy, transport=transport)
    return Pipeline(dit, files, None)


def evaluations_of(fault: Fault) -> int:
    """Return how many evaluations are compared: one for faults that its first step shows."""
    return 2 if fault in (none, lost_in_block_5_of_step_2, guidance_of_pipeline_off) else 1


def verified(
    rank: int, world: int, device: torch.device, layout: Layout, dtype: torch.dtype, fault: Fault, tiny: bool = False
) -> str:
    pipeline, verdicts = labels(rank, world, device, layout, dtype, TINY if tiny else None), list[Verdict]()
    size = (48, 48) if tiny else LABELS["size"]  # the tiny model takes multiples of 16, these are 9 tokens
    asked = {**LABELS, "size": size, "evaluations": evaluations_of(fault)}
    shown, ended = ending(rank, fault, lambda: verdicts.append(verify(pipeline, ["3"], **asked)))
    assert bool(shown) is (rank == 0)
    if ended:
        return ended
    assert verdicts[0].blocks >= 2
    return f"holds {verdicts[0].ratio:.2f}" if verdicts[0].ratio < 1.6 else str(verdicts[0])


BF16, FP32 = torch.bfloat16, torch.float32
COLLECTIVE = ("ulysses", 1, "collective")
FIRST = "attention in blocks.0 of step 1 on rank "


def by_rank(world: int, strategy: str, fault: Fault, seen: str, computed: bool = True) -> tuple[Any, ...]:
    """A fault of the last rank, and the ranks that see it: Ulysses shares its heads."""
    last, ranks = world - 1, f"rank{'s' * (',' in seen)} {seen} ("
    told = f"computed by rank {last}, " if computed else "; "
    return world, (strategy, 1, "collective"), fault, (f" of step 1 on rank {last}: ", f"{told}seen on {ranks}")


@pytest.mark.parametrize(
    ("world", "layout", "fault", "found"),
    [
        (2, ("ulysses", 1, "peer"), none, ("holds",)),
        (2, ("kv_gather", 1, "collective"), rotary_off_by_one, ("positions (cosines) of stream 1 of step 1 on rank",)),
        (2, ("ulysses", 2, "collective"), swapped_branches, ("the state after the prediction of step 1 on rank 1",)),
        (2, COLLECTIVE, lost_in_block_5_of_step_2, ("attention in blocks.4 of step 2 on rank 1: ",)),
        (2, ("ulysses", 1, "peer"), stale_flag, (FIRST,)),
        (2, ("kv_first", 1, "peer"), head_off, ("attention in blocks.4 of step 1 on rank 1: head 1 of row 0 ",)),
        (2, COLLECTIVE, head_of_kernel_off, (f"{FIRST}1: ", "seen on ranks 0, 1 (")),
        (2, ("ulysses", 2, "peer"), guidance_off, ("the state after the prediction of step 1 on rank 1: ",)),
        (2, COLLECTIVE, reference_off, ("prediction of step 1 on rank 1",)),
        by_rank(2, "kv_gather", head_of_kernel_off, "1"),
        by_rank(3, "ring", head_of_kernel_off, "2"),
        by_rank(3, "ring", guidance_off, "0, 1, 2"),
        by_rank(2, "kv_first", position_off, "1", computed=False),
        by_rank(2, "kv_gather", modulation_off, "1", computed=False),
        by_rank(3, "ulysses", layer_off, "0, 1, 2"),
        by_rank(4, "usp", head_of_kernel_off, "2, 3"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_first_block_and_step_that_are_wrong_and_the_rank_are_named(
    ranks: Pool, world: int, layout: Layout, fault: Fault, found: tuple[str, ...]
) -> None:
    (answer,) = {*ranks.run(world, verified, layout, BF16, fault, fault is rotary_off_by_one)}
    assert all(text in answer for text in found), answer


def transformer(
    rank: int, world: int, device: torch.device, name: str, strategy: str, native: bool, fault: Fault
) -> str:
    """Return what is found in a call of a tiny transformer in bf16, which has an adapter where merging is at fault."""
    tiny = MODELS[name]
    module, mesh = tiny.build().to(device), mesh_for(strategy, world, device)
    if fault is merged_off:
        add(module, "adapter", seed=1)
    given = pytree.tree_map_only(Tensor, lambda x: x.to(BF16) if x.is_floating_point() else x, tiny.arguments(device))
    seqpar.parallelize(module.to(BF16), mesh, strategy=strategy, native=native)
    module(**given)  # what is merged at the first call would be right at the second
    try:
        with redirect_stdout(io.StringIO()):
            verify(module, **given, evaluations=1)
        return ending(rank, fault, lambda: (seqpar.refresh(module), verify(module, **given, evaluations=1)))[1]
    finally:
        seqpar.release(module)


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of a layer that is adapted
@pytest.mark.parametrize(
    ("world", "name", "strategy", "native", "fault", "found"),
    [
        (3, "flux", "ulysses", True, cut_off, "a cut of image"),
        (2, "flux", "ring", False, cut_off, "a cut of image"),
        (2, "flux", "kv_first", True, position_in_block_off, "positions (cosines) of stream 2"),
        (2, "flux", "ulysses", True, merged_off, "the merged adapters"),
        (2, "flux", "kv_gather", True, modulation_off, "the output of transformer_blocks.0.norm1"),
        (2, "sd3", "ulysses", False, modulation_off, "the output of transformer_blocks.0.norm1"),
        (3, "sd3", "kv_first", True, buffer_off, "the whole of a cut of image"),
        (2, "qwen_masked", "ulysses", True, mask_off, "the key mask"),
        (2, "flux", "ulysses", True, last_layer_off, "the result"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_one_rank_with_other_numbers_is_found_in_bf16(
    ranks: Pool, world: int, name: str, strategy: str, native: bool, fault: Fault, found: str
) -> None:
    """Most faults are within the rounding of a block, or two percent of what they change; the rank is named."""
    answers = ranks.run(world, transformer, name, strategy, native, fault)
    assert len(set(answers)) == 1
    assert f": {found}" in answers[0], answers[0]
    assert f" of step 1 on rank {world - 1}: " in answers[0], answers[0]


def pipe_of(kind: str, mesh: Mesh, device: torch.device, layout: Layout) -> tuple[Any, dict[str, Any]]:
    """Return a tiny pipeline, ours or a parallelized one of diffusers, and the arguments of a run."""
    (strategy, _, transport), (name, how) = layout, kind.split()
    pipe = getattr(pipelines, name)(*([False] if name == "unidiffuser" else [])).to(device)
    if how == "ours":
        settings = {"prompts": ["a red cat"], "guidance": Guidance(4.0), "size": (32, 48)}
        preferences = Preferences(strategy=strategy, transport=transport)
        with tempfile.TemporaryDirectory() as local:
            folder = mesh.on_rank_0(lambda: (pipe.save_pretrained(local), local)[1], str)
            given: Any = {"preferences": preferences, "prompts": settings["prompts"]}
            made = unidiffuser.Pipeline.load(unidiffuser.Files.locate(folder), mesh, pipe.unet.dtype, **given)
            mesh.on_all_ranks(lambda: None)  # before rank 0 removes its folder
        return made, settings
    pipe.to(BF16)
    seqpar.parallelize(pipe, mesh, strategy=strategy, transport=transport, native=how != "generic")
    if how == "fp32":
        assert keep_fp32(pipe) is None
    guided = {"flux": {"true_cfg_scale": 2.0, "negative_prompt": "x"}, "sd3": {"guidance_scale": 4.0}}[name]
    sizes = {"height": 32, "width": 48, "max_sequence_length": TEXT}
    return pipe, {"prompt": "a red cat", "output_type": "latent", **sizes, **guided}


def called(
    rank: int, world: int, device: torch.device, kind: str, layout: Layout, fault: Fault
) -> tuple[str, str, str, str]:
    """Return what is found in two steps of a run without and with a fault, and digests of the run before and after."""
    pipe, asked = pipe_of(kind, mesh_for(layout[0], world, device, layout[1]), device, layout)
    ours = hasattr(pipe, "latents")

    def seeded() -> dict[str, Any]:
        return asked if ours else {**asked, "generator": torch.Generator().manual_seed(1)}

    def latents() -> str:
        return digest(pipe.latents(**asked, steps=2) if ours else pipe(**seeded(), num_inference_steps=2).images)

    def verified(planted: Fault) -> str:
        blocks, count = list[int](), evaluations_of(fault)
        _, ended = ending(rank, planted, lambda: blocks.append(verify(pipe, **seeded(), evaluations=count).blocks))
        return ended or ("holds" if blocks[0] >= 3 else "no blocks")

    before = latents()
    return verified(none), "holds" if fault is none else verified(fault), before, latents()


@pytest.mark.parametrize(
    ("kind", "layout", "fault", "found"),
    [
        ("unidiffuser ours", ("ring", 1, "peer"), none, "holds"),
        # each is verified without its fault, too
        ("flux fused", ("ulysses", 1, "collective"), lost_shard, "attention in transformer_blocks.0 of step 1 on rank"),
        ("flux fp32", ("ring", 1, "peer"), head_of_kernel_off, "attention in transformer_blocks.0 of step 1 on rank 1"),
        ("sd3 generic", ("ulysses", 2, "peer"), guidance_of_pipeline_off, "the call of step 2 on rank 1: other bits"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_pipelines_are_verified_and_left_as_they_were(
    ranks: Pool, kind: str, layout: Layout, fault: Fault, found: str
) -> None:
    first, second = ranks.run(2, called, kind, layout, fault)
    assert first == second
    assert first[0] == "holds", first[0]
    assert found in first[1], first[1]
    assert first[2] == first[3]


def padded_text(rank: int, world: int, device: torch.device, name: str) -> tuple[int, int]:
    tiny = MODELS[name]
    module = tiny.build().to(device)
    mesh = mesh_for("ulysses", world, device)
    seqpar.parallelize(module, mesh, strategy="ulysses")
    verdict = verify(module, **tiny.arguments(device), evaluations=2)
    return verdict.steps, verdict.blocks


@pytest.mark.parametrize("name", ["mochi", "hunyuan15"])
def test_padding_that_a_processor_of_ours_masks_holds(ranks: Pool, name: str) -> None:
    """diffusers' own processors return 0 for it; what follows in a block is compared for every token."""
    assert ranks.run(2, padded_text, name) == [(2, 4)] * 2  # video and text of two blocks


def with_other_noise(rank: int, world: int, device: torch.device) -> tuple[str, ...]:
    """Return the notes on a run for which each rank draws noise of its own, of which rank 0's is everyone's."""
    pipe, asked = pipe_of("sd3 generic", mesh_for("ulysses", world, device), device, ("ulysses", 1, "peer"))
    with redirect_stdout(io.StringIO()):
        return verify(pipe, **asked, generator=torch.Generator().manual_seed(rank), evaluations=2).notes


def test_ranks_that_draw_other_noise_are_no_fault_but_noted(ranks: Pool) -> None:
    first, second = ranks.run(2, with_other_noise)
    assert first == second
    assert "guidance and scheduler are not compared" in first[0]


def test_weights_that_differ_between_ranks_are_found(ranks: Pool) -> None:
    assert ranks.run(2, with_weights) == [[(1, "bias"), (1, "weight"), (1, "table"), None]] * 2


def with_weights(rank: int, world: int, device: torch.device) -> list[tuple[int, str] | None]:
    """Return what is found where one rank has another weight, two swapped rows, another buffer, and none of these."""
    changed, swapped, tabled, same = layers = [linear().to(device) for _ in range(4)]
    changed.bias.view(torch.int16)[1] += rank
    swapped.weight.copy_(swapped.weight.roll(rank, 0))
    for layer in layers:
        layer.register_buffer("table", torch.polar(torch.ones(2), torch.ones(2)).to(device), persistent=False)
    tabled.get_buffer("table").mul_(1 + rank)
    return [unequal(Mesh.joined(device), weights_of(layer)) for layer in (changed, swapped, tabled, same)]


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2, dtype=BF16).requires_grad_(False)


def test_layers_read_wider_weights_for_a_time_and_quantised_ones_are_refused() -> None:
    layer, x = linear(), torch.ones(1, 3, dtype=torch.float64)
    with widened([layer], torch.float64):
        assert torch.equal(layer(x), x @ layer.weight.T + layer.bias)
        assert {each.dtype for each in (*layer.parameters(), layer.weight)} == {torch.float64}
    assert isinstance(layer.weight, nn.Parameter)
    assert {each.dtype for each in (*layer.parameters(), layer.weight)} == {BF16}
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"Linear.weight is a Parameter of torch.float8"), widened([layer], FP32):
        pass


def test_a_ranks_tokens_of_joined_streams_are_taken_in_every_order_that_fits() -> None:
    whole, lengths = torch.arange(14.0).view(2, 7, 1), {"text": 3, "image": 4}
    share = TokenShare(lengths, 2, 1)
    for mine in ([2, 5, 6], [2, 3, 6]):  # text before image, and image before text
        assert share.nearest(whole, whole[:, mine] + 0.1)(whole)[0, :, 0].tolist() == mine
    (rows,) = TokenShare({"image": 7}, 2, 1, torch.tensor([1]), 2).takes(whole, whole[:1, :3])
    assert rows(whole)[..., 0].tolist() == [[11, 12, 13]]
    with pytest.raises(ValueError, match="expected a share of the tokens of"):
        share.takes(whole, whole[:, :5])
    TokenShare({"image": 7}, 9, 8).takes(whole, whole[:, :0])  # the ninth rank of nine has no token of seven
    with pytest.raises(ValueError, match="expected a share"):
        TokenShare({"image": 7}, 2, 1).takes(whole, whole[:, :0])


def test_only_blocks_that_are_called_count() -> None:
    model = large_dit.Model(TINY)
    assert [name for name, _ in blocks_of(model)] == [f"blocks.{i}" for i in range(TINY.num_layers)]


def test_in_exact_mode_the_first_place_without_the_bits_of_one_rank_is_named(ranks: Pool) -> None:
    found = ranks.run(2, exactly)
    assert found[0] == found[1]
    assert ": blocks.0" in found[0]
    assert "other bits than one rank has" in found[0]
    assert exactly(0, 1, torch.device("cpu")).startswith("holds")


def exactly(rank: int, world: int, device: torch.device) -> str:
    """Return what is found where one rank's bits are expected: of a ring, which has others, or of one rank."""

    def of_16_bits(out_lse: tuple[Tensor, Tensor], q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        assert q.dtype == BF16  # as the kernels of exact mode demand
        return out_lse

    with pytest.MonkeyPatch.context() as patch:
        after(patch, sdpa, "attend", of_16_bits)
        patch.setattr(own_loop, "_is_exact", lambda dit: True)
        return verified(rank, world, device, ("ring" if world > 1 else "ulysses", 1, "auto"), BF16, none)


def test_what_is_not_finite_or_not_asked_rightly_does_not_hold() -> None:
    assert seqpar.verify is verify  # also after its module was imported
    pipeline = labels(0, 1, torch.device("cpu"), ("ulysses", 1, "auto"), torch.float16)
    pipeline.dit.model.get_parameter("blocks.3.fc2.bias").fill_(torch.inf)
    with redirect_stdout(io.StringIO()), pytest.raises(VerificationError, match=r"blocks.3, .* that are not finite"):
        verify(pipeline, ["3"], **LABELS)
    pipeline.dit.model.get_parameter("blocks.3.fc2.bias").zero_()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        patch.setattr(blocks, "blocks_of", lambda model: [])
        with pytest.raises(VerificationError, match="the blocks: none was compared"):
            verify(pipeline, ["3"], **LABELS, evaluations=1)
    wrongs: list[Any] = [0, True, 2.5]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="got evaluations="):
            verify(pipeline, ["3"], evaluations=wrong)
    with pytest.raises(ValueError, match=r"not parallelized, expected seqpar.parallelize before verify"):
        verify(nn.Linear(1, 1))


def sampled(rank: int, world: int, device: torch.device, out: Path, fault: Fault) -> tuple[str, str]:
    layout: Any = {"mesh": "cfg=1", "strategy": "ulysses", "transport": "collective"}
    args = Args(classes=("cat",), steps=2, size="40", **layout, verify=True, out=out)
    return ending(rank, fault, lambda: run(args))


def test_the_command_makes_pictures_only_if_the_run_holds(ranks: Pool, tmp_path: Path) -> None:
    out = tmp_path / "cat.png"
    (shown, ended), (_, other) = ranks.run(2, sampled, out, lost_shard)
    assert ended == other
    assert ended.startswith("the ranks do not compute what one rank computes: attention in blocks.0")
    assert "verify    FAILS at attention in blocks.0" in shown
    assert not out.exists()
    shown, ended = ranks.run(2, sampled, out, none)[0]
    assert ended == ""
    assert re.search(
        r"verify    2 ranks \(ulysses 2, ulysses, \w+, \w+\), \w+: 2 evaluations of 14 block outputs", shown
    )
    assert "verify    every step holds" in shown
    assert out.exists()
