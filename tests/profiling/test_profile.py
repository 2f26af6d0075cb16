"""Tests of profiles of real runs: what is planted in a run lands in its column, with its rank and its block."""

from __future__ import annotations

import csv
import gzip
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

import seqpar
from seqpar import DistributedDiT, Guidance, Sampler
from seqpar.loop.loop import draw_noise
from seqpar.profiling.ranks import Columns
from seqpar.profiling.record import StepRecorder, steps_before, steps_needed
from seqpar.profiling.report import report
from seqpar.profiling.result import Profile
from seqpar.profiling.trace import BLOCK, OUTSIDE
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import scheduler
from tests.support.meshes import mesh_for
from tests.support.pipelines import flux
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

MEASURED = 12
LATE_MS = 20.0
Slow = dict[int, tuple[str, float]]
"""Rank -> the block in which it sleeps before its work, and for how many ms."""


def run(dit: DistributedDiT, on_step: Callable[[int], None], graph: bool = False) -> None:
    noise = draw_noise((1, 4, 8, 8), torch.Generator().manual_seed(0))
    steps, prompt = steps_needed(MEASURED, steps_before(dit.mesh)), {"class_labels": torch.zeros(1, dtype=torch.int64)}
    with Sampler(dit, graph=graph) as sampler:
        sampler(scheduler(), noise, prompt, steps=steps, guidance=Guidance(3.0), on_step=on_step)


def made(world: int, device: torch.device) -> DistributedDiT:
    model = diffusers_dit().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    return DistributedDiT(model, mesh_for("ulysses", world, device), "ulysses", local(device), "collective")


def profiled(
    rank: int, world: int, device: torch.device, slow: Slow, folder: str | None = None, graph: bool = False
) -> tuple[Profile, str]:
    """Return the profile of a run and its report, after one without a profile, in which kernels compile.

    The ranks of `slow` sleep in every second step.
    """
    dit, steps = made(world, device), count()
    run(dit, lambda index: None)
    if rank in slow:
        name, ms = slow[rank]
        block: Any = dit.model.get_submodule(name)
        block.register_forward_pre_hook(lambda module, inputs: time.sleep(next(steps) % 2 * ms / 1e3))
    every: Any = {"plan": dit.plan, "load": dit.plan.ranking.load, "steps": MEASURED, "mesh": dit.mesh}
    profile = seqpar.profile(lambda on_step: run(dit, on_step, graph), folder, **every)
    dit.release()
    return profile, report(profile)


def least(profile: Profile, rank: int, block: str, column: str) -> tuple[float, float]:
    """Return the least ms of a column of a block over the even steps and over the odd ones, in which a rank sleeps.

    Other work on the machine changes it little, and both alike.
    """
    rows = [row for row in profile.rows if (row.rank, row.block) == (rank, block)]
    even, odd = ([getattr(row.columns, column) for row in rows if row.step % 2 == part] for part in (0, 1))
    return min(even), min(odd)


def misplaced(profile: Profile, ms: float) -> list[object]:
    """Return where a sleep of so many ms in block 1 shows and should not, and its gaps if it does not show there."""
    wrong = list[object]()
    for block in ("Block 0", "Block 1", "Block 2"):
        for column in ("products", "attention", "elementwise", "gaps"):
            without, asleep = least(profile, 0, block, column)
            if (block, column) == ("Block 1", "gaps"):  # a GPU may have been behind its host, a shared one by more
                right = asleep >= (0.9 if ms < LATE_MS else 0.7) * ms and asleep - without > 0.6 * ms
            else:
                right = asleep - without < 0.4 * ms
            wrong += [] if right else [(block, column, without, asleep)]
    return wrong


def test_a_sleep_of_a_millisecond_is_a_gap_in_its_block_alone(ranks: Pool) -> None:
    """On a busy machine a millisecond may be lost in what other work takes: then 20 are planted.

    Of two ranks `test_a_late_rank_is_waited_for_and_named` looks at gaps.
    """
    wrong = list[object]()
    for ms in (1.0, LATE_MS, LATE_MS, LATE_MS):
        profile, _ = ranks.run(1, profiled, {0: ("blocks.1", ms)})[0]
        if not (wrong := misplaced(profile, ms)):
            return
    raise AssertionError(wrong)


def unnamed(profile: Profile, text: str) -> list[object]:
    """Return what a profile and its report do not say of rank 1, which sleeps before block 2."""
    wrong = list[object]()
    for rank, block, column in ((0, "Block 2", "waiting"), (1, "Block 2", "gaps")):
        without, late = least(profile, rank, block, column)
        wrong += [] if without < 0.3 * LATE_MS and late > 0.7 * LATE_MS else [(rank, block, column, without, late)]
    for rank, block in ((1, "Block 2"), (0, "Block 0")):
        most = max(least(profile, rank, block, "waiting"))
        wrong += [] if most < 0.3 * LATE_MS else [(rank, block, "waiting", most)]
    wrong += [] if profile.late[0][1] > 0.3 * LATE_MS else [profile.late]  # a step, on the average
    lines = [line for line in text.splitlines() if line.startswith("waiting     rank 0: ")]
    says = ("ms for rank 1 per step, most in Block 2 (",)
    wrong += [] if len(lines) == 1 and all(words in lines[0] for words in says) else [text]
    return wrong


def test_a_late_rank_is_waited_for_and_named(ranks: Pool) -> None:
    """On a busy machine other work makes ranks late, too: then the run is profiled once more."""
    wrong = list[object]()
    for _ in range(4):
        if not (wrong := unnamed(*ranks.run(2, profiled, {1: ("blocks.2", LATE_MS)})[0])):
            return
    raise AssertionError(wrong)


def trace(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def named(events: list[dict[str, Any]], start: str) -> list[dict[str, Any]]:
    return [each for each in events if each["name"].startswith(start) and each["cat"] == "user_annotation"]


def adds_up(profile: Profile, folder: Path) -> None:
    assert len(profile.steps) == MEASURED
    assert {row.block for row in profile.rows} >= {OUTSIDE, "Block 0", "Block 1", "Block 2"}
    for rank in (0, 1):
        whole = trace(folder / f"trace-rank{rank}.json.gz")
        steps = {int(each["name"].split()[-1]): each["dur"] / 1e3 for each in named(whole, "seqpar step ")}
        assert {step: pytest.approx(profile.step(rank, step).wall, abs=1e-6) for step in profile.steps} == steps
        assert sum(profile.blocks(rank).values(), Columns()).wall == pytest.approx(profile.mean(rank).wall)
        assert profile.mean(rank).products > 0
        assert profile.mean(rank).attention > 0


def test_the_files_are_traces_a_table_and_numbers(ranks: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    profile, text = ranks.run(2, profiled, {}, str(folder))[0]
    if ranks.device == "cpu":  # a step of a GPU is not that of its host
        adds_up(profile, folder)
    files = {path.name for path in folder.iterdir()}
    assert files == {
        *("trace.json.gz", "trace-rank0.json.gz", "trace-rank1.json.gz"),
        *("profile.txt", "profile.csv", "profile.json"),
    }
    assert (folder / "profile.txt").read_text() == text + "\n"
    numbers = json.loads((folder / "profile.json").read_text())
    assert numbers["mean_ms"][1]["wall"] == pytest.approx(profile.mean(1).wall)
    with (folder / "profile.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(profile.rows)
    for row, known in zip(rows, profile.rows, strict=True):
        assert (int(row["rank"]), int(row["step"]) - 1, row["block"]) == (known.rank, known.step, known.block)
        assert float(row["gaps"]) == pytest.approx(known.columns.gaps, abs=1e-6)
    whole = trace(folder / "trace.json.gz")
    names = {each["args"]["name"].partition(":")[0] for each in whole if each["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    firsts = [
        [each["ts"] for each in whole if each["name"] == "seqpar clock" and each["pid"] // 1000 == n] for n in (1, 2)
    ]
    # on one clock no rank leaves a meeting before the other has come
    ends = [each["ts"] + each["dur"] for each in whole if each["name"] == "seqpar clock" and each["pid"] // 1000 == 1]
    assert len(firsts[0]) == len(firsts[1]) > 1
    assert all(come < left + profile.clock_us for come, left in zip(firsts[1], ends, strict=True))


def of_a_pipeline(rank: int, world: int, device: torch.device) -> tuple[Profile, int]:
    pipe, calls = flux().to(device, torch.float32), list[int]()
    seqpar.parallelize(pipe, mesh_for("ulysses", world, device), strategy="kv_gather")
    pipe.transformer.register_forward_hook(lambda *call: calls.append(1))
    arguments: Any = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "latent"}
    profile = seqpar.profile(lambda: [pipe("a cat", **arguments) for _ in range(4)], steps=3)
    seqpar.release(pipe)
    return profile, len(calls)


def test_calls_of_a_parallelized_transformer_are_steps(ranks: Pool) -> None:
    profile, calls = ranks.run(2, of_a_pipeline)[1]
    assert (profile.steps, calls) == ([1, 2, 3] if ranks.device == "cpu" else [4, 5, 6], 8)
    assert profile.plan is not None
    assert profile.plan.layout.sequence == 2
    assert profile.rates == ()  # the plan does not know the size of the pictures
    kinds = {row.block.rpartition(" ")[0] for row in profile.rows}
    assert kinds >= {"FluxTransformerBlock", "FluxSingleTransformerBlock"}


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_blocks_of_a_replayed_graph_are_known(ranks: Pool, world: int) -> None:
    profile, text = ranks.run(world, profiled, {}, None, True)[0]
    assert profile.graph
    assert profile.notes == ()
    assert {row.block for row in profile.rows} >= {OUTSIDE, "Block 0", "Block 1", "Block 2"}
    assert "blocks of replayed graphs are unknown" not in text


def registered() -> int:
    return len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)


def test_nothing_is_registered_without_a_profile() -> None:
    before, seen = registered(), list[int]()
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = seqpar.Mesh.single()

    def work(on_step: Callable[[int], None]) -> None:
        for index in range(steps_needed(1, 0)):
            layers(torch.ones(1, 2))
            seen.append(registered())
            on_step(index)

    work(lambda index: None)
    assert seen == [before] * 2
    seqpar.profile(work, steps=1, mesh=mesh)
    assert seen[2:] == [before + 2] * 2
    assert registered() == before
    with pytest.raises(RuntimeError, match="planted"), StepRecorder(mesh, 1):
        raise RuntimeError("planted")
    assert registered() == before


def test_a_block_in_a_mode_that_knows_no_spans_runs() -> None:
    """As those of a decoder in strips do, which refuse functions that they do not know."""

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.Tensor.add:
                raise ValueError(f"got {func}")
            return func(*args, **(kwargs or {}))

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add(1)

    x, block = torch.zeros(2), Block()
    with StepRecorder(seqpar.Mesh.single(), 1) as recorder:
        for index in range(2):
            with Refusing():
                x = block(x)
            recorder(index)
    assert x.tolist() == [2, 2]
    assert any(event.get("name") == f"{BLOCK}Block 0" for event in recorder.trace["traceEvents"])


def test_a_run_with_too_few_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="got a run of 2 steps, expected at least 4: 1 to warm up, 3 to measure"):
        seqpar.profile(lambda on_step: [on_step(0), on_step(1)], steps=3, mesh=seqpar.Mesh.single())
