"""Tests of `verify`: faults that are planted into the ranks' run are found and named, and correct runs hold."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar import Guidance
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.distributed import DistributedDiT
from seqpar.fidelity import own_loop
from seqpar.fidelity.blocks import Share, blocks_of
from seqpar.fidelity.verify import VerificationError, verify
from seqpar.fidelity.widened import other_weights, widened
from seqpar.kernels.flags import Flags
from seqpar.mesh import Mesh
from seqpar.models import large_dit
from seqpar.pipelines import flux, unidiffuser
from seqpar.pipelines.class_labels import Files, Pipeline
from seqpar.planner.search import Wish
from seqpar.sampling.loop import digest
from seqpar.transports.collective.exchange import CollectiveToHeads
from seqpar.weights.find import Blueprint
from tests.fidelity.test_judging import Fault, lost_shard, narrow_sums, rotary_off_by_one, swapped_branches
from tests.models.test_large_dit import TINY, ours
from tests.support import pipelines
from tests.support.meshes import mesh_for
from tests.support.pool import Pool

LABELS = {"guidance": Guidance(4.0), "size": (64, 64)}
LATE_S = 0.003
Layout = tuple[str, int, str]
"""Strategy, size of the cfg axis, transport."""


def none(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Plant nothing."""


def stale_flag(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 0 find flags of peer memory raised already, as if they were left from before, and rank 1 be late."""
    true, forward = Flags.of, nn.Linear.forward

    def of(*args: Any) -> Flags:
        made = true(*args)
        made.counts[1] = -(10**6) if rank == 0 else 0
        return made

    def late(layer: nn.Linear, x: Tensor) -> Tensor:
        time.sleep(LATE_S if rank == 1 else 0)
        return forward(layer, x)

    patch.setattr(Flags, "of", of)
    patch.setattr(nn.Linear, "forward", late)


def lost_in_block_5_of_step_2(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1 lose the first rank's values in one block of one step, whichever of the step's runs it is."""
    true, calls = CollectiveToHeads.deliver, list[int]()

    def lossy(exchange: Any, met: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = true(exchange, met)
        calls.append(1)
        block, step = (len(calls) - 1) % 7, (len(calls) - 1) // 14  # two runs of the seven blocks in each step
        if rank == 1 and (block, step) == (4, 1):
            v[:, : exchange._layout.tokens[0]] = 0
        return q, k, v

    patch.setattr(CollectiveToHeads, "deliver", lossy)


def labels(rank: int, world: int, device: torch.device, layout: Layout, dtype: torch.dtype, config: Any = None) -> Any:
    """Return a pipeline of the built-in model, or of a tiny Large-DiT with this config, without a decoder."""
    strategy, cfg, transport = layout
    files = Files.locate("builtin") if config is None else Files(Blueprint("tiny", large_dit, config), None, None, {})
    model = files.blueprint.build(dtype, device) if config is None else ours(config, device).to(dtype)
    dit = DistributedDiT(model, mesh_for(strategy, world, device, cfg), strategy, transport=transport)
    return Pipeline(dit, files, None)


def verified(
    rank: int, world: int, device: torch.device, layout: Layout, dtype: torch.dtype, fault: Fault, tiny: bool = False
) -> str:
    """Return what is found; every rank must find the same."""
    pipeline = labels(rank, world, device, layout, dtype, TINY if tiny else None)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        fault(patch, rank)
        try:
            found = verify(pipeline, ["3"], **LABELS)
        except VerificationError as error:
            assert bool(shown.getvalue()) is (rank == 0)
            return str(error)
    assert found.blocks >= 2
    return f"holds {found.ratio:.2f}" if found.ratio < 1.6 else str(found)


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("layout", "dtype", "fault", "found"),
    [
        (("ulysses", 1, "peer"), BF16, none, "holds"),
        (("ring", 1, "collective"), FP32, none, "holds"),
        (("kv_gather", 1, "collective"), FP32, rotary_off_by_one, "blocks.0, output 1 of step 1 on rank 1: "),
        (("ulysses", 2, "collective"), BF16, swapped_branches, "prediction of step 1 on rank 1: "),
        (("ulysses", 1, "collective"), BF16, lost_shard, "blocks.0, output 1 of step 1 on rank 0: "),
        (("ulysses", 1, "collective"), BF16, lost_in_block_5_of_step_2, "blocks.4, output 1 of step 2 on rank 1: "),
        (("ulysses", 1, "peer"), BF16, stale_flag, "blocks.0, output 1 of step 1 on rank 0: "),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_first_block_and_step_that_are_wrong_are_named(
    ranks: Pool, layout: Layout, dtype: torch.dtype, fault: Fault, found: str
) -> None:
    answers = ranks.run(2, verified, layout, dtype, fault, fault is rotary_off_by_one)
    assert answers[0] == answers[1]
    assert found in answers[0], answers[0]


def pipe_of(kind: str, mesh: Mesh, device: torch.device, layout: Layout) -> tuple[Any, dict[str, Any]]:
    """Return a tiny pipeline, ours or a parallelized one of diffusers, and the arguments of a run."""
    strategy, _, transport = layout
    name, _, how = kind.partition(" ")
    wish = Wish(strategy=strategy, transport=transport)
    asked = {"prompt": "a red cat", "height": 32, "width": 48}
    if how == "ours":
        found = {"flux": flux, "unidiffuser": unidiffuser}[name].Pipeline.of(pipelines_of(name, device), mesh, wish=wish)
        guidance = Guidance(2.0, embedded=3.5) if name == "flux" else Guidance(4.0)
        return found, {"prompts": ["a red cat"], "guidance": guidance, "size": (32, 48)}
    pipe = pipelines_of(name, device)
    pipe.to(BF16)
    given = {"flux": {"true_cfg_scale": 2.0, "negative_prompt": "x"}, "sd3": {"guidance_scale": 4.0}}[name]
    seqpar.parallelize(pipe, mesh, strategy=strategy, transport=transport, native=how == "native")
    return pipe, {**asked, **given, "output_type": "latent"}


def pipelines_of(name: str, device: torch.device) -> Any:
    return getattr(pipelines, name)(*([False] if name == "unidiffuser" else [])).to(device)


def called(
    rank: int, world: int, device: torch.device, kind: str, layout: Layout, fault: Fault
) -> tuple[str, str, str]:
    """Return what is found in two steps of a run, and digests of the run before and after."""
    pipe, asked = pipe_of(kind, mesh_for(layout[0], world, device, layout[1]), device, layout)
    ours = hasattr(pipe, "latents")

    def seeded() -> dict[str, Any]:
        return asked if ours else {**asked, "generator": torch.Generator().manual_seed(1)}

    def latents() -> str:
        return digest(pipe.latents(**asked, steps=2) if ours else pipe(**seeded(), num_inference_steps=2).images)

    before, found = latents(), "holds"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()):
        fault(patch, rank)
        try:
            assert verify(pipe, **seeded(), evaluations=2).blocks >= 3
        except VerificationError as error:
            found = str(error)
    return found, before, latents()
