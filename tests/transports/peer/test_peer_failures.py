"""Tests of failures with peer memory: ranks that are late or gone, memory that cannot be had or shared."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import socket
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from seqpar import DistributedDiT, Guidance, Sampler
from seqpar.cli.ranks import FOLDERS, remove_sockets
from seqpar.kernels import flags, prepare
from seqpar.loop.loop import draw_noise
from seqpar.mesh.inputs import collect_on_axis
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard
from seqpar.planner.plan import Choice, choose_transport
from seqpar.transports import peer
from seqpar.transports.peer import arena, transport
from seqpar.transports.peer.arena import Arena
from seqpar.types.protocols import Prepare
from tests.graphs.test_distributed import local
from tests.loop.test_sampling import STEPS, scheduler
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit
from tests.transports.test_moves import layout_of, payload

NBYTES = 1 << 26
DEADLINE_S = 3.0  # long enough for ranks on a busy machine to meet in time


def no_handles(*_: object) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def full(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_room(rank: int, world: int, device: torch.device, what: str) -> tuple[str, str]:
    """Make an arena where rank 1 lacks something; return the error, and what a value that is exchanged next becomes."""
    mesh, told = make_mesh(device, cfg=1), "nothing"
    limit = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and what == "addresses":
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + NBYTES // 2, limit[1]))
        elif rank == 1:
            patch.setattr(*{"space": (os, "posix_fallocate", full), "files": (arena, "anonymous", no_handles)}[what])
        try:
            arena.Arena(mesh.sequence, NBYTES, torch.device("cpu"))
        except (ValueError, RuntimeError) as error:
            told = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limit)
    return told, mesh.share("next", str)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the size of a process in /proc")
@pytest.mark.parametrize(
    ("what", "why"),
    [("space", "No space left"), ("files", "Too many open files"), ("addresses", "Cannot allocate memory")],
)
def test_memory_that_one_rank_does_not_get_is_an_error_of_all(ranks: Pool, what: str, why: str) -> None:
    told = ranks.run(3, no_room, what)
    assert [after for _, after in told] == ["next"] * 3  # the ranks are still in step
    assert len({error for error, _ in told}) == 1
    assert why in told[0][0]


def met(rank: int, world: int, device: torch.device, fails: bool) -> tuple[int, list[int], bool | str]:
    """Make symmetric memory on ranks that have had as many rendezvous as their rank; torch's part is faked.

    fails: whether rank 1 has no memory for it.
    """
    axis, meetings = make_mesh(device, cfg=1).sequence, []
    rendezvous = arena._Rendezvous()
    rendezvous.count = rank

    def meet(memory: torch.Tensor, group: dist.ProcessGroup) -> Any:
        rendezvous.count += 1
        meetings.append(group.size())
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype, start: memory[start : shape[0]])

    def memory_of(nbytes: int, device: torch.device) -> torch.Tensor:
        if fails and rank == 1 and nbytes == 64:
            raise torch.OutOfMemoryError("out of memory")
        return torch.zeros(nbytes, dtype=torch.uint8)

    rendezvous.meet, rendezvous.memory = meet, memory_of
    real, arena._rendezvous = arena._rendezvous, lambda: rendezvous  # pyright: ignore
    try:
        views, (memory, _) = arena._on_gpus(axis, 64, torch.device("cpu"))  # pyright: ignore
    except RuntimeError as error:
        return rendezvous.count, meetings, str(error)
    finally:
        arena._rendezvous = real
    return rendezvous.count, meetings, views[0].data_ptr() == memory.data_ptr()


def test_ranks_that_have_met_less_often_make_up_for_it_alone(ranks: Pool) -> None:
    """torch counts the rendezvous of a process, whatever the group, and ranks need equal counts for the next one."""
    assert ranks.run(3, met, False) == [(3, [1, 1, 3], True), (3, [1, 3], True), (3, [3], True)]
    # where a rank has no memory, nobody waits for it
    assert ranks.run(3, met, True) == [
        (2, [1, 1], "out of memory"),
        (2, [1], "out of memory"),
        (2, [], "out of memory"),
    ]


def test_an_arena_keeps_what_its_views_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, memory = object(), torch.ones(64, dtype=torch.uint8)
    monkeypatch.setattr(arena, "_on_gpus", lambda axis, nbytes, device: ([memory], owner))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    made = arena.Arena(Axis("sequence"), 64, torch.device("cuda"))
    assert made._owner is owner
    assert not memory.any()
    made.close()
    assert made._owner is None


def again(rank: int, world: int, device: torch.device, between: str) -> tuple[bool, bool]:
    """Return whether a run is kept, and has the bits of a first run, after an event between two calls of a sampler."""
    model = diffusers_dit().to(device, torch.bfloat16 if device.type == "cuda" else torch.float64)
    dit = DistributedDiT(model, mesh_for("ulysses", world, device), "ulysses", local(device), "peer")
    order = (scheduler(), draw_noise((1, 4, 6, 10), torch.Generator().manual_seed(0)))
    labels = {"class_labels": torch.tensor([3])}
    with Sampler(dit) as sampler:
        with torch.inference_mode(between == "inference mode"):
            first = sampler(*order, labels, steps=STEPS, guidance=Guidance(3.0))
        run = sampler._run
        if between == "release":
            dit.release()
        if between == "other weights":
            dit.model.load_state_dict({name: x.clone() for name, x in dit.model.state_dict().items()}, assign=True)
        second = sampler(*order, labels, steps=STEPS, guidance=Guidance(3.0))
        return sampler._run is run, torch.equal(first, second)


@pytest.mark.parametrize(
    ("between", "kept"), [("nothing", True), ("inference mode", True), ("release", False), ("other weights", False)]
)
def test_a_kept_run_is_used_as_long_as_its_memory_is_where_it_was(ranks: Pool, between: str, kept: bool) -> None:
    assert ranks.run(2, again, between) == [(kept, True)] * 2


FEW = (1, 3, 3, 3)  # batch, tokens, heads, kv heads: one each for a rank


def silent(rank: int, world: int, device: torch.device, how: str) -> tuple[str, float]:
    """Let the last rank take no part; return the error on this rank and the seconds until then."""
    mesh = make_mesh(device, cfg=1)
    moves = peer.Transport(DEADLINE_S)
    into, _ = moves._heads(mesh.ulysses, layout_of(mesh.ulysses, FEW, device))  # not checked for order
    mesh.collect(rank, int)
    start = time.monotonic()
    for _ in range(5 if rank < world - 1 else 0):  # only the first wait takes time; later ones do not wait again
        if how == "kernel":
            flags.launch(moves._made[0][2].all_flags[0], True, True)
        elif how == "kernel that writes":
            q, k, v = (x[:, Shard(FEW[1], world).slice(rank)] for x in payload(FEW, 0, device))
            prepare.launch_into(q, k, v, Prepare(), into.outboxes(), into.flags)
        else:
            into.deliver()
    try:
        moves.check()
    except TimeoutError as error:
        return str(error), time.monotonic() - start
    return "nothing", time.monotonic() - start


@pytest.mark.parametrize("how", ["deliver", "kernel", "kernel that writes"])
def test_peer_that_is_gone_is_named_within_the_deadline(ranks: Pool, how: str) -> None:
    *late, last = ranks.run(3, silent, how)
    for rank, (message, seconds) in enumerate(late):
        assert f"rank {rank}: timed out after 3 s waiting for rank 2 (axis ulysses, exchange 1 of q, k, v" in message
        assert DEADLINE_S * (how == "deliver") <= seconds < 20 * DEADLINE_S  # the interpreter has no clock
    assert last[0] == "nothing"  # the last rank did not wait


@pytest.mark.parametrize("come_s", [None, 0.05])
def test_a_kernel_looks_at_the_clock_until_the_deadline(monkeypatch: pytest.MonkeyPatch, come_s: float | None) -> None:
    """Run the timed loop with a fake clock, as the interpreter has none: a rank that never comes, and a late one."""
    if torch.cuda.is_available():
        pytest.skip("a GPU has a clock: see the test above")
    extra, start = flags.tl.extra, time.monotonic_ns()
    late = flags.Late.on(torch.device("cpu"), 0.2)
    theirs, mine = torch.zeros(2, 2, dtype=torch.int64)
    made = flags.Flags.of(tuple(theirs), mine, late, 4, (0, 1))
    mine[0] = 1

    def clock() -> int:
        if come_s is not None and time.monotonic_ns() - start > come_s * flags.NANOSECONDS:
            mine[1] = 1
        return time.monotonic_ns()

    monkeypatch.setattr(extra.cuda, "globaltimer", clock)
    monkeypatch.setattr(flags, "compiled", lambda kernel: True)
    monkeypatch.setattr(flags, "LOOKS", 4)
    flags.launch(made, True, True)
    assert theirs.tolist() == [1, 1]
    assert made.counts.tolist()[:3] == [1, 1, 0]
    assert late.seen.tolist() == ([5, 2, 1] if come_s is None else [0, 0, 0])
    assert int(late.note[0]) == int(late.seen[0])
    assert (time.monotonic_ns() - start > 0.2 * flags.NANOSECONDS) == (come_s is None)


def no_files(rank: int, world: int, device: torch.device) -> tuple[int, list[str]]:
    """Return 0 if an arena is shared, and the files that exist in /dev/shm while it is mapped."""
    axis = make_mesh(device, cfg=1).sequence
    there = {*Path("/dev/shm").glob("seqpar-*")}  # left by processes that were killed before
    collect_on_axis(axis, None, None)
    made = Arena(axis, 1 << 16, device)
    made.view((axis.rank + 1) % world, 8 * axis.rank, (), torch.int64).fill_(7 + axis.rank)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    collect_on_axis(axis, None, None)
    before = (axis.rank - 1) % world
    got = int(made.view(axis.rank, 8 * before, (), torch.int64))
    left = {*Path("/dev/shm").glob("seqpar-*")} - there
    made.close()
    return got - 7 - before, sorted(map(str, left))


def test_an_arena_is_shared_and_leaves_no_file(ranks: Pool) -> None:
    assert ranks.run(2, no_files) == [(0, []), (0, [])]


@pytest.mark.parametrize(
    ("reason", "name", "told"),
    [
        (None, "peer", "GPUs that reach each other's memory"),
        ("the ranks are on 2 machines", "collective", "NCCL; not peer: the ranks are on 2 machines"),
    ],
)
def test_gpus_use_each_others_memory_unasked_or_it_is_said_why_not(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, name: str, told: str
) -> None:
    for name_of in ("why_not", "why_not_tried"):
        monkeypatch.setattr(peer, name_of, lambda *_: reason)
    gpu = replace(Mesh.single(), device=torch.device("cuda", 0))
    assert choose_transport("auto", gpu) == Choice("collective", "nothing to exchange")
    two = Axis("sequence", 0, 2)
    for mesh in (replace(gpu, sequence=two), replace(gpu, cfg=two)):
        assert choose_transport("auto", mesh) == Choice(name, told)
    mesh = replace(Mesh.single(), sequence=two)
    assert choose_transport("auto", mesh) == Choice("collective", "gloo")
    if reason is not None:
        with pytest.raises(ValueError, match="does not work here: the ranks are on 2 machines; use transport coll"):
            choose_transport("peer", replace(gpu, sequence=two))


def tried(rank: int, world: int, device: torch.device, fault: str) -> str | None:
    """Return why these ranks do not write each other's memory if rank 1 has a fault."""
    axis = make_mesh(device, cfg=1).sequence
    kept = transport.TRIAL_S, flags.Flags.meet, arena.Arena.view
    transport.TRIAL_S = 1.0
    if rank == 1 and fault == "flags that nobody sees":
        flags.Flags.meet = flags.Flags.wait
    if rank == 1 and fault == "writes that go elsewhere":
        arena.Arena.view = lambda self, _, *where: kept[2](self, rank, *where)  # pyright: ignore
    try:
        return transport.trial(axis, device)
    finally:
        transport.TRIAL_S, flags.Flags.meet, arena.Arena.view = kept


def groups_kept(rank: int, world: int, device: torch.device) -> tuple[int, bool]:
    """Return how often new groups of the same ranks are tried, and whether the answer keeps their axes."""
    trials, axes, groups = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "_ANSWERS", {})
        patch.setattr(transport, "trial", lambda axis, _: trials.append(axis.size))
        for _ in range(2):
            axis = Axis("sequence", rank, world, dist.new_group(list(range(world))))  # pyright: ignore
            assert peer.why_not_tried(axis, device) is None
            axes.append(weakref.ref(axis))
            groups.append(axis.group)
            del axis
        gc.collect()
        found = len(trials), any(axis() is not None for axis in axes)
        dist.barrier()  # once, gloo failed to connect a new group just after another one was destroyed
        for group in groups:
            dist.destroy_process_group(group)
        return found


def test_a_trial_is_kept_by_ranks_and_keeps_no_group(ranks: Pool) -> None:
    assert ranks.run(2, groups_kept) == [(1, False)] * 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("none", "None"),
        ("flags that nobody sees", "a test exchange failed: rank .: timed out after 1 s waiting for rank 1"),
        ("writes that go elsewhere", "a test exchange (delivered|failed)"),
    ],
)
def test_peers_are_tried_before_they_are_used_unasked(ranks: Pool, fault: str, told: str) -> None:
    answers = ranks.run(3, tried, fault)
    assert len(set(answers)) == 1  # all ranks decide the same
    assert re.search(told, str(answers[0]))
    assert ranks.run(3, tried, "none") == [None] * 3  # a later test exchange works again


def test_only_sockets_of_these_processes_are_removed_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMP", str(tmp_path))
    made = {number: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for number in (1, 2, 3)}
    for number, one in made.items():
        one.bind(str(tmp_path / f"symm_mem-{number}"))
    (tmp_path / "symm_mem-4").write_text("a file")
    for number in (1, 3):
        made[number].close()
    remove_sockets([1, 2, 4, 5])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["symm_mem-2", "symm_mem-3", "symm_mem-4"]
    made[2].close()
    remove_sockets([2])
    assert not (tmp_path / "symm_mem-2").exists()
