"""Tests of the contract of all transports: the order of calls, separate exchanges, and how long memory is kept."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from torch import Tensor

from seqpar import DistributedDiT, Guidance
from seqpar.kernels.prepare import prepare_into
from seqpar.kernels.push import push
from seqpar.local import reference
from seqpar.loop.loop import draw_noise
from seqpar.loop.request import Request
from seqpar.loop.run import begin
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports import _folder
from seqpar.transports._contract import Transport, TurnError
from seqpar.transports._layout import HeadLayout
from seqpar.transports._turns import Turns
from seqpar.transports.peer import arena
from seqpar.types.protocols import Given, Prepare
from tests.graphs.test_distributed import local
from tests.support.meshes import TRANSPORTS, build, coded, counted_calls, mesh_for, random
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

TOKENS, HEADS, DIM = 7, 3, 2
KINDS = ("heads", "key_values", "overlap", "ring", "gather", "halo")
HEADS_TURNS = ("to_heads.outboxes", "to_heads.deliver", "to_tokens.outboxes", "to_tokens.deliver")
TURNS = {
    "heads": ("an exchange of heads", HEADS_TURNS),
    "key_values": ("an exchange of keys and values", ("outboxes", "deliver")),
    "overlap": ("an exchange of keys and values", ("outboxes", "start_keys", "start_values", "deliver")),
    "ring": ("a ring", ("outbox", "rotate", "rotate, read to its end")),
    "gather": ("a gather", ("outbox", "deliver")),
    "halo": ("a halo", ("swap",)),
}
MISUSES = [  # kind of exchange, number of correct calls before, the call that is out of order
    ("heads", 0, "to_tokens.outboxes"),  # only the second half is used
    ("heads", 0, "to_tokens.deliver"),
    ("heads", 0, "to_heads.deliver"),
    ("heads", 1, "to_heads.outboxes"),
    ("heads", 2, "to_heads.outboxes"),  # only the first half is used
    ("heads", 2, "to_tokens.deliver"),
    ("heads", 4, "to_tokens.outboxes"),
    ("key_values", 0, "deliver"),
    ("key_values", 1, "outboxes"),
    ("key_values", 1, "start_keys"),  # the exchange was made without overlap
    ("key_values", 0, "start"),
    ("overlap", 1, "start"),  # the exchange was made with overlap
    ("heads", 0, "to_heads.start"),
    ("heads", 2, "to_heads.start"),
    ("key_values", 2, "deliver"),
    ("overlap", 1, "start_values"),
    ("overlap", 1, "deliver"),
    ("overlap", 2, "start_keys"),
    ("overlap", 2, "deliver"),
    ("overlap", 3, "start_values"),
    ("overlap", 4, "start_keys"),
    ("ring", 0, "rotate"),
    ("ring", 1, "outbox"),
    ("ring", 2, "rotate"),  # the last rotation has not ended
    ("ring", 2, "outbox"),
    ("gather", 0, "deliver"),
    ("gather", 1, "outbox"),
    ("gather", 2, "deliver"),
]


class Used:
    """One exchange of a kind on an axis. It can be called by name, or used whole with a check of all data."""

    def __init__(self, transport: Transport, kind: str, axis: Axis, device: torch.device) -> None:
        self._kind, self._rank, sizes = kind, axis.rank, Shard(TOKENS, axis.size).sizes
        self._layout = HeadLayout(1, sizes, HEADS, HEADS, DIM, torch.float32, device)
        self._mine, self._device, self._size = Shard(TOKENS, axis.size).slice(axis.rank), device, axis.size
        like = torch.zeros((), device=device)
        if kind == "heads":
            self.made: Any = transport.heads(axis, self._layout)
        elif kind in ("ring", "gather"):
            make = transport.ring if kind == "ring" else transport.gather
            self.made = make(axis, sizes, (DIM,), like)
        elif kind == "halo":
            self.made = transport.halo(axis, DIM, like)
        else:
            self.made = transport.key_values(axis, self._layout, kind == "overlap")

    def call(self, name: str) -> None:
        """Make the call of this name."""
        if name == "rotate":
            next(iter(self.made.rotate()))
        elif name == "swap":
            self._edges(0)
        elif self._kind == "heads":
            way, method = name.split(".")
            getattr(self.made[way == "to_tokens"], method)()
        else:
            getattr(self.made, name)()

    def right(self, round_: int) -> bool:
        """Use the exchange once; return whether every element arrived at its place."""
        if self._kind in ("ring", "gather"):
            return self._block(round_)
        if self._kind == "halo":
            return self._edges(round_)
        q, k, v = (
            coded(1, TOKENS, HEADS, DIM, 0).to(self._device, torch.float32) + 1000 * (name + 3 * round_)
            for name in range(3)
        )
        mine = q[:, self._mine], k[:, self._mine], v[:, self._mine]
        if self._kind == "heads":
            to_heads, to_tokens = self.made
            met = prepare_into(*mine, Prepare(), to_heads.outboxes(), to_heads.flags)
            got = to_heads.deliver(met)[0]
            boxes = to_tokens.outboxes()
            met = bool(got.shape[2]) and push(got, boxes, to_tokens.flags)
            return torch.equal(to_tokens.deliver(met), mine[0])
        met = prepare_into(*mine, Prepare(), self.made.outboxes(), self.made.flags)
        if self._kind == "overlap":
            self.made.start_keys()
            self.made.start_values()
        got = self.made.deliver(met)
        return all(torch.equal(a, b) for a, b in zip(got, (mine[0], k, v), strict=True))

    def _edges(self, round_: int) -> bool:
        blocks = torch.zeros(4, DIM, device=self._device)
        blocks[:2] = self._rank + 1000 * round_
        ends = self._rank > 0, self._rank < self._size - 1
        self.made.swap(*(block if ends[place % 2] else None for place, block in enumerate(blocks)))
        if blocks.is_cuda and torch.cuda.is_current_stream_capturing():
            return True  # nothing has moved, and a capture cannot read
        from_ = [
            number + 1000 * round_ if end else 0
            for number, end in zip((self._rank - 1, self._rank + 1), ends, strict=True)
        ]
        return blocks[2:].tolist() == [[number] * DIM for number in from_]

    def _block(self, round_: int) -> bool:
        whole = coded(1, TOKENS, 1, DIM, 0)[0, :, 0].to(self._device, torch.float32) + 1000 * round_
        self.made.outbox().copy_(whole[self._mine])
        if self._kind == "gather":
            return torch.equal(self.made.deliver(), whole)
        shard = Shard(TOKENS, len(self._layout.tokens))
        arrived = [torch.equal(block, whole[shard.slice(owner)]) for owner, block in self.made.rotate()]
        return all(arrived)  # a list, so that the rotation is read to its end


def misused(rank: int, world: int, device: torch.device, name: str) -> list[tuple[str, dict[str, int], bool]]:
    """Return for each misuse the error, the collectives called before it, and whether later uses were right."""
    axis, told = make_mesh(device, ring=world, cfg=1).ring, []
    transport = _folder.load(name).Transport()
    for kind, made, call in MISUSES:
        exchange, errors = Used(transport, kind, axis, device), []

        def wrong(exchange: Used = exchange, call: str = call, errors: list[str] = errors) -> None:
            with pytest.raises(TurnError) as caught:
                exchange.call(call)
            errors.append(str(caught.value))

        for earlier in TURNS[kind][1][:made]:
            exchange.call(earlier)
        calls = counted_calls(wrong)
        transport.abandon()
        told.append((errors[0], calls, exchange.right(0) and exchange.right(1)))
    transport.check()
    transport.release()
    return told


@pytest.mark.parametrize(("transport", "world"), covering(TRANSPORTS, turns=(2, 3)))
def test_a_call_out_of_turn_is_the_same_error_on_every_transport(ranks: Pool, transport: str, world: int) -> None:
    """The error comes before any data moves, and after `abandon` the exchange works like a new one."""
    check_told(ranks.run(world, misused, transport))


def check_told(answers: list[list[tuple[str, dict[str, int], bool]]]) -> None:
    """Check that all ranks returned what `misused` must return with every transport."""
    for told in answers:
        for (kind, made, call), (error, calls, right) in zip(MISUSES, told, strict=True):
            what, turns = TURNS[kind]
            expected = turns[made % len(turns)]
            assert error == (
                f"got {call}() of {what}, expected {expected}(); make its calls in the order {', '.join(turns)}, and "
                f"after an error call the transport's abandon() first"
            )
            assert calls == {}, (kind, made, call)
            assert right, (kind, made, call)


def failed(rank: int, world: int, device: torch.device, strategy: str, name: str, failing: tuple[int, ...]) -> int:
    """Return how often attention was wrong after its local attention had failed on some ranks."""
    state, wrong, shard = {"fails": False}, 0, Shard(13, world)

    def core(*tensors: Any) -> tuple[Tensor, Tensor]:
        if state["fails"]:
            raise ArithmeticError
        return reference.attend(*tensors)

    attend: Any = build(strategy, mesh_for(strategy, world, device), shard, core, name)
    for round_ in range(5):
        q, k, v = (random((1, 13, 4, DIM), 3 * round_ + seed, device) for seed in range(3))
        mine = (Given(q[:, shard.slice(rank)], k[:, shard.slice(rank)], v[:, shard.slice(rank)], Prepare()),)
        state["fails"] = round_ == 1 and rank in failing
        if state["fails"]:
            with pytest.raises(ArithmeticError):
                attend(mine)
            continue
        (got,) = attend(mine)
        truth = reference.attend(mine[0].q, k, v)[0]
        # in the round of the error ranks send whatever their outboxes hold, so its results are not checked
        wrong += round_ != 1 and not torch.allclose(got, truth, rtol=0, atol=1e-12)
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world", "strategy", "failing"),
    [
        (3, "ulysses", (0, 1, 2)),
        (2, "ulysses", (1,)),
        (2, "ring", (0, 1)),
        (3, "ring", (1,)),
        (4, "usp", (0,)),
        (2, "kv_gather", (1,)),
        (2, "kv_first", (0, 1)),
    ],
)
def test_an_error_in_attention_leaves_later_calls_right(
    ranks: Pool, world: int, strategy: str, failing: tuple[int, ...], transport: str
) -> None:
    assert ranks.run(world, failed, strategy, transport, failing) == [0] * world


def test_captures_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed capture has sent nothing; an exchange that began outside of a capture cannot be finished in one."""
    made, owner = [], Transport()
    calls = {name: partial(made.append, name) for name in ("outboxes", "deliver")}
    turns, state = Turns(owner, "an exchange", torch.device("cuda"), calls), {"capturing": True}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    turns.take("outboxes")
    owner.abandon()
    turns.take("outboxes")  # in a second capture
    state["capturing"] = False
    owner.abandon()
    assert made == []
    turns.take("outboxes")
    state["capturing"] = True
    with pytest.raises(RuntimeError, match="an exchange is unfinished after an error and a CUDA graph is captured"):
        owner.abandon()
    assert made == []
    state["capturing"] = False
    owner.abandon()
    assert made == ["deliver"]
    turns.take("outboxes")
    turns.take("deliver")
    assert owner.unfinished == []


def interrupted(rank: int, world: int, device: torch.device, name: str) -> list[bool]:
    """Return for each kind of exchange whether it is right after a capture of its first call ended in an error."""
    axis, transport, found = make_mesh(device, ring=world, cfg=1).ring, _folder.load(name).Transport(), []
    for kind in KINDS:
        exchange = Used(transport, kind, axis, device)
        assert exchange.right(0)  # compiles the kernels before the capture
        graph = torch.cuda.CUDAGraph()
        with (
            suppress(ArithmeticError),
            torch.cuda.stream(torch.cuda.Stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device=device)
            exchange.call(TURNS[kind][1][0])
            raise ArithmeticError
        transport.abandon()
        found.append(exchange.right(1) and exchange.right(2))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2])
def test_gpu_a_capture_that_failed_leaves_later_calls_right(ranks: Pool, world: int, transport: str) -> None:
    assert ranks.run(world, interrupted, transport) == [[True] * len(KINDS)] * world


def equal_gathers(rank: int, world: int, device: torch.device, name: str) -> tuple[Tensor, Tensor]:
    """Return the results of two equal gathers: both are written before either delivers, and read after both have."""
    axis, transport = make_mesh(device, cfg=1).sequence, _folder.load(name).Transport()
    both = [transport.gather(axis, (1,) * world, (2,), torch.zeros((), device=device)) for _ in range(2)]
    for number, exchange in enumerate(both):
        exchange.outbox().fill_(10 * number + rank)
    first, second = (exchange.deliver() for exchange in both)
    return first.clone(), second.clone()


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equal_gathers_do_not_share(ranks: Pool, transport: str, world: int) -> None:
    for first, second in ranks.run(world, equal_gathers, transport):
        assert first[:, 0].tolist() == list(range(world))
        assert second[:, 1].tolist() == [10 + rank for rank in range(world)]


class Owner:
    """A stand-in for the memory of an arena, which notes when it is freed."""

    def __init__(self, freed: list[int]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(1)


def dropped(rank: int, world: int, device: torch.device, name: str) -> list[tuple[bool, bool, bool, bool]]:
    """Drop the transport of an exchange of each kind, then the exchange.

    Returns for each kind whether its memory is kept and it is right while the exchange lives, and whether the transport
    is gone and all memory is freed afterwards.
    """
    axis, found, freed = make_mesh(device, ring=world, cfg=1).ring, [], []
    real = arena._on_cpus
    gc.collect()
    gc.freeze()  # older objects need not be scanned by each collection below
    if device.type == "cpu":  # on GPUs freed memory is not mapped any more, so reading it would be an error
        arena._on_cpus = lambda *args: (real(*args)[0], Owner(freed))
    try:
        for kind in KINDS:
            transport = _folder.load(name).Transport()
            exchange, alive = Used(transport, kind, axis, device), weakref.ref(transport)
            del transport
            gc.collect()
            kept = alive() is not None and not freed
            right = exchange.right(0) and exchange.right(1)
            made = len(getattr(alive(), "_made", ())) if device.type == "cpu" else 0
            del exchange
            gc.collect()
            found.append((kept, right, alive() is None, len(freed) == made))
            freed.clear()
    finally:
        arena._on_cpus = real
        gc.unfreeze()
    return found


@pytest.mark.parametrize(("transport", "world"), covering(TRANSPORTS, turns=(2, 3)))
def test_an_exchange_keeps_what_it_needs_and_no_longer(ranks: Pool, transport: str, world: int) -> None:
    assert ranks.run(world, dropped, transport) == [[(True,) * 4] * len(KINDS)] * world


def released(rank: int, world: int, device: torch.device, name: str) -> list[str]:
    """Return the error of an exchange of each kind after its transport was released."""
    axis, transport, told = make_mesh(device, ring=world, cfg=1).ring, _folder.load(name).Transport(), []
    exchanges = [Used(transport, kind, axis, device) for kind in KINDS]
    transport.release()
    for kind, exchange in zip(KINDS, exchanges, strict=True):
        with pytest.raises(TurnError) as caught:
            exchange.call(TURNS[kind][1][0])
        told.append(str(caught.value))
    transport.abandon()  # nothing is unfinished
    assert all(Used(transport, kind, axis, device).right(0) for kind in KINDS)  # the transport can make new exchanges
    return told


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exchange_is_refused_after_its_transport_was_released(ranks: Pool, transport: str) -> None:
    for told in ranks.run(2, released, transport):
        assert all("was called after release(); make a new exchange" in text for text in told)


def run_again(rank: int, world: int, device: torch.device, name: str) -> tuple[int, int]:
    """Return the number of exchanges after one run, and after three runs of the same shape."""
    model = diffusers_dit().to(device, torch.bfloat16 if device.type == "cuda" else torch.float64)
    dit = DistributedDiT(model, mesh_for("ulysses", world, device, cfg=2), "ulysses", local(device), name)
    counts, kept = [], []
    noise = draw_noise((1, 4, 6, 10), torch.Generator().manual_seed(0))
    request = Request(DDIMScheduler(), noise, {"class_labels": torch.tensor([3])}, steps=2, guidance=Guidance(3.0))
    for _ in range(3):
        kept.append(begin(dit, request))
        kept[-1].predict()
        counts.append(len(dit.keeper))
    return counts[0], counts[-1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_runs_of_one_shape_share_the_swap_of_the_guidance_branches(ranks: Pool, transport: str) -> None:
    """With a new exchange for every run, memory would grow with the number of runs."""
    assert ranks.run(2, run_again, transport) == [(2, 2)] * 2  # one attention and one swap


def test_a_dropped_exchange_is_freed_without_the_collector_of_cycles() -> None:
    """Memory of a GPU must not wait until Python looks for cycles."""
    transport, axis, cpu = _folder.load("collective").Transport(), Axis("ulysses"), torch.device("cpu")
    layout = HeadLayout(1, (TOKENS,), HEADS, HEADS, DIM, torch.float32, cpu)
    makers = (
        lambda: transport.heads(axis, layout)[0],
        lambda: transport.key_values(axis, layout),
        lambda: transport.ring(axis, (TOKENS,), (DIM,), torch.zeros(1)),
        lambda: transport.gather(axis, (TOKENS,), (DIM,), torch.zeros(1)),
        lambda: transport.halo(axis, DIM, torch.zeros(1)),
    )
    gc.disable()
    try:
        alive = [weakref.ref(make().made) for make in makers]
    finally:
        gc.enable()
    assert [made() for made in alive] == [None] * len(makers)
