"""Tests of the mesh: which ranks share an axis, and which sizes are refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from seqpar.cli.exits import Kind, kind_of
from seqpar.loading import pipeline
from seqpar.loading.folder import PipelineParts
from seqpar.loop import distributed
from seqpar.mesh import inputs
from seqpar.mesh.boundary import StepBoundary
from seqpar.mesh.errors import SMALL
from seqpar.mesh.mesh import Mesh, fill, pick_device
from seqpar.mesh.watch import LostRankError
from seqpar.serve.messages import ImageRequest, ServedModel
from seqpar.serve.ranks import checked
from seqpar.serve.ranks.preview import PreviewMap, Previews
from tests.support.pool import Pool


@pytest.mark.parametrize(
    ("world", "given", "guidance", "expected"),
    [
        (1, {}, True, (1, 1, 1, 1)),
        (4, {}, False, (1, 1, 1, 4)),
        (4, {}, True, (1, 2, 1, 2)),
        (3, {}, True, (1, 1, 1, 3)),
        (8, {"ring": 2}, True, (1, 2, 2, 2)),
        (8, {"data": 2, "cfg": 1, "ulysses": 2, "ring": 2}, True, (2, 1, 2, 2)),
        (4, {"ulysses": 3}, False, "ulysses=3, 3 ranks, for 4 process"),
        (4, {"data": 3}, False, ", 3 ranks, for 4"),
        (4, {"ring": 8}, False, "for 4 process"),
        (2, {"ring": 0}, False, "got ring=0"),
        (6, {"cfg": 3}, False, "two branches"),
    ],
)
def test_fill_chooses_what_is_not_given_or_says_what_does_not_multiply(
    world: int, given: dict[str, int], guidance: bool, expected: tuple[int, ...] | str
) -> None:
    sizes: Any = {"data": 1, "cfg": None, "ring": 1, "ulysses": None, **given}
    if isinstance(expected, tuple):
        assert fill(world, **sizes, guidance=guidance) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            fill(world, **sizes, guidance=guidance)


def places(rank: int, world: int, device: torch.device) -> dict[str, int]:
    mesh = Mesh.from_env(cfg=2, ring=2, ulysses=1, device=device)
    return {name: getattr(mesh, name).rank for name in ("data", "cfg", "ring", "ulysses", "sequence", "world")}


def test_rank_order_is_data_cfg_ring_ulysses(ranks: Pool) -> None:
    for rank, place in enumerate(ranks.run(4, places)):
        cfg, ring = divmod(rank, 2)
        assert place == {"data": 0, "cfg": cfg, "ring": ring, "ulysses": 0, "sequence": ring, "world": rank}


def replicas(rank: int, world: int, device: torch.device) -> list[tuple[int, list[int]]]:
    kinds = ((2, 2), (1, 2), (2, 1))
    meshes = [Mesh.from_env(data=data, cfg=cfg, device=device) for data, cfg in kinds]
    seen = []
    for mesh in meshes:
        ranks = [torch.empty(1, dtype=torch.int64) for _ in range(mesh.replica.size)]
        dist.all_gather(ranks, torch.tensor([rank]), group=mesh.replica.group)
        seen.append((mesh.replica.rank, [int(each) for each in ranks]))
    return seen


def test_a_replica_is_the_ranks_that_share_pictures(ranks: Pool) -> None:
    for rank, seen in enumerate(ranks.run(4, replicas)):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert seen == [(rank % 2, pair), (rank, [0, 1, 2, 3]), (rank % 2, pair)]


FULL = (errno.ENOSPC, os.strerror(errno.ENOSPC), "x.png")


def agree(rank: int, world: int, device: torch.device) -> list[tuple[str, Kind, str]]:
    """Return the class, the blame and the text of errors of one rank, by `on_all_ranks` and by `on_rank_0`."""
    mesh, found = Mesh.from_env(device=device), []
    errors = ValueError("only here"), FileNotFoundError("no file"), TimeoutError("late"), OSError(*FULL)
    for error, ways in product(errors, ((mesh.on_all_ranks, 1), (partial(mesh.on_rank_0, kind=str), 0))):

        def work(error: Exception = error, wrong: int = ways[1]) -> None:
            if rank == wrong:
                raise error

        with pytest.raises((ValueError, OSError)) as caught:
            ways[0](work)
        found.append((type(caught.value).__name__, kind_of(caught.value), str(caught.value)))
    return found


def test_an_error_on_one_rank_is_raised_on_all_with_the_same_blame(ranks: Pool) -> None:
    kinds: dict[str, tuple[str, Kind]] = {
        "only here": ("ValueError", "mistake"),
        "no file": ("ValueError", "mistake"),
        "late": ("TimeoutError", "failure"),
        str(OSError(*FULL)): ("OSError", "failure"),
    }
    wanted = [(*kind, f"rank {rank}: {text}") for text, kind in kinds.items() for rank in (1, 0)]
    assert ranks.run(2, agree) == [wanted] * 2


def objects(rank: int, world: int, device: torch.device) -> tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]:
    """Exchange objects around the size that travels in one exchange; one rank's may be short and another's long."""
    mesh, sizes = Mesh.from_env(device=device), (0, SMALL - 40, SMALL, 5 * SMALL)
    every = [mesh.collect((rank, bytes(size if rank else 3)), tuple[int, bytes]) for size in sizes]
    shared = [mesh.share((rank, bytes(size)), tuple[int, bytes]) for size in sizes]
    return [(r, len(x)) for r, x in shared], [[(r, len(x)) for r, x in one] for one in every]


def test_objects_of_any_size_are_exchanged(ranks: Pool) -> None:
    sizes = (0, SMALL - 40, SMALL, 5 * SMALL)
    wanted = [(0, size) for size in sizes], [[(0, 3), (1, size)] for size in sizes]
    assert ranks.run(2, objects) == [wanted] * 2


def failing_alone(rank: int, world: int, device: torch.device, elsewhere: bool) -> tuple[str, list[str]]:
    """Return the error of a rank that shares its failure while the other one passes a boundary, and a value after."""
    mesh = Mesh.from_env(device=device)
    others = partial(mesh.collect, "failed", str) if elsewhere else partial(inputs.agree, mesh, {})
    with pytest.raises(LostRankError) as error:
        (others if rank else StepBoundary(mesh, lambda: None))()
    return str(error.value), mesh.collect(str(rank), str)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rank_at_another_exchange_than_the_others_is_told_at_once(ranks: Pool, elsewhere: bool) -> None:
    told = ranks.run(2, failing_alone, elsewhere)
    assert told[0][0].startswith("ranks do different things: rank 0 is at the step boundary, rank 1 at another")
    assert [after for _, after in told] == [["0", "1"]] * 2


def from_rank_0(rank: int, world: int, device: torch.device, fails: bool) -> list[str]:
    mesh, ran = Mesh.from_env(device=device), []

    def work() -> str:
        ran.append(f"ran on {rank}")
        if fails:
            raise OSError("no file")
        return "made"

    try:
        return [mesh.on_rank_0(work, str), *ran]
    except ValueError as error:
        return [str(error), *ran]


@pytest.mark.parametrize("world", [1, 2])
def test_work_of_rank_0_counts_on_all_ranks(ranks: Pool, world: int) -> None:
    error = "rank 0: no file" if world > 1 else "no file"
    assert ranks.run(world, from_rank_0, False) == [["made", "ran on 0"], ["made"]][:world]
    assert ranks.run(world, from_rank_0, True) == [[error, "ran on 0"], [error]][:world]


def test_too_few_gpus_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match=r"2 processes for 1 GPU"):
        pick_device(2)


def test_a_mesh_takes_the_name_of_a_device() -> None:
    assert {mesh.device for mesh in (Mesh.from_env(device="cpu"), Mesh.joined("cpu"))} == {torch.device("cpu")}


def a_name(rank: int, mesh: Mesh) -> object:
    """Find a model of a server whose name only rank 1 does not find, as where the hub answers rank 0 alone."""
    with pytest.MonkeyPatch.context() as patch:
        found = SimpleNamespace(having=lambda controls: None)
        patch.setattr(checked, "find", fails if rank == 1 else lambda name: found)
        return checked.CheckedModel.of("x", torch.float32, mesh, {})


def a_part(rank: int, mesh: Mesh) -> object:
    """Read a folder that lacks a part on rank 1's host."""
    index, fitted = {"vae": ["diffusers", "AutoencoderKL"]}, {} if rank == 1 else {"vae": None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "why_not", lambda *_: None)
        patch.setattr(pipeline.Weights, "of", lambda *_: None)
        parts = PipelineParts(Path("p"), index, {}, None, None, fitted)  # pyright: ignore
        return pipeline._weights(parts, torch.float32, mesh, False)  # pyright: ignore


def a_plan(rank: int, mesh: Mesh) -> object:
    """Give a plan on rank 1 alone; the others would make one together."""
    return distributed._ranks_of(mesh, None if rank == 1 else object())


def a_preview(rank: int, mesh: Mesh) -> object:
    """Show latents that are no rows of tokens, on rank 0 alone."""
    previews, model = Previews(mesh), ServedModel("x", "texts", (8, 8), 4, "", 0.1)
    previews._maps["x"] = PreviewMap(torch.zeros(5, 3), 1, 8, 0.0)
    watch = previews.watch(ImageRequest("", "x", "a", partial_images=1), model, fails, fails)
    assert watch is not None
    (index,), look = watch(None)(4)
    return look(index, torch.zeros(1, 5, 4))


def fails(*_: object) -> NoReturn:
    raise ValueError("got x")


def alone(rank: int, world: int, device: torch.device, work: Callable[[int, Mesh], object]) -> tuple[str, str]:
    """Return the error of work that fails on one rank, and what a value that is exchanged next becomes."""
    mesh = Mesh.joined(device)
    with pytest.raises(ValueError, match=r"got|support") as error:
        work(rank, mesh)
    return str(error.value), mesh.share("next", str)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (a_name, "rank 1: got x"),
        (a_part, "rank 1: got p without vae, which rank 0 has; give all hosts the same files"),
        (a_plan, "got a plan on some ranks and none on others, expected the same plan on all"),
        (a_preview, "partial_images do not support latents of shape (1, 5, 4)"),
    ],
    ids=["name", "part", "plan", "preview"],
)
def test_what_fails_on_one_rank_fails_on_all_and_they_stay_in_step(ranks: Pool, work: Any, message: str) -> None:
    told = ranks.run(3, alone, work)
    assert told == [(told[0][0], "next")] * 3
    assert told[0][0].startswith(message)
