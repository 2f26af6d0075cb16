"""Tests of the contract of all transports: the order of calls, errors, and how long memory is kept."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from functools import partial

import pytest
import torch

from seqpar.transports._contract import Transport, TurnError, load
from seqpar.transports._turns import Turns
from seqpar.transports.peer import arena
from tests.support.meshes import TRANSPORTS, counted_calls
from tests.support.meshes import mesh as make_mesh
from tests.support.pairs import covering
from tests.support.pool import Pool
from tests.transports.test_moves import KINDS, Exchange

HEADS_TURNS = ("to_heads.outboxes", "to_heads.deliver", "to_tokens.outboxes", "to_tokens.deliver")
TURNS = {
    "heads": ("an exchange of heads", HEADS_TURNS),
    "key_values": ("an exchange of keys and values", ("outboxes", "deliver")),
    "overlap": ("an exchange of keys and values", ("outboxes", "start_keys", "start_values", "deliver")),
    "ring": ("a ring", ("outbox", "rotate", "rotate, read to its end")),
    "gather": ("a gather", ("outbox", "deliver")),
    "halo": ("a halo", ("swap",)),
}
CALLABLE = {
    "heads": (*HEADS_TURNS, "to_heads.start"),
    **dict.fromkeys(("key_values", "overlap"), ("outboxes", "start_keys", "start_values", "start", "deliver")),
    "ring": ("outbox", "rotate"),
    "gather": ("outbox", "deliver"),
}
STARTS = (("heads", 1, "to_heads.start"), ("key_values", 1, "start"))  # which may come, between writing and `deliver`
MISUSES = [  # kind of exchange, number of correct calls before, the call that is out of order
    (kind, count, name)
    for kind, names in CALLABLE.items()
    for count in range(3 if kind == "ring" else len(TURNS[kind][1]) + 1)  # a rotation's end is not called
    for name in names
    if name != TURNS[kind][1][count % len(TURNS[kind][1])] and (kind, count, name) not in STARTS
]


def call(exchange: Exchange, name: str) -> None:
    """Make the call of this name; a rotation's first block is read."""
    half, _, method = name.rpartition(".")
    made = exchange.made if not half else exchange.made[half == "to_tokens"]
    result = getattr(made, method)(*[None] * 4 * (name == "swap"))
    if name == "rotate":
        next(result)


def refusal(exchange: Exchange, name: str) -> str:
    with pytest.raises(TurnError) as caught:
        call(exchange, name)
    return str(caught.value)


def misused(rank: int, world: int, device: torch.device, name: str) -> list[tuple[str, dict[str, int], bool]]:
    """Return for each misuse the error, the collectives called before it, and whether later uses were right."""
    axis, transport, found = make_mesh(device, ring=world, cfg=1).ring, load(name).Transport(), []
    for kind, count, wrong in MISUSES:
        exchange, errors = Exchange(transport, kind, axis, device), list[str]()
        for earlier in TURNS[kind][1][:count]:
            call(exchange, earlier)
        calls = counted_calls(lambda e=exchange, w=wrong, errors=errors: errors.append(refusal(e, w)))
        transport.abandon()
        found.append((*errors, calls, exchange.right(0) and exchange.right(1)))
    transport.check()
    transport.release()
    return found


@pytest.mark.parametrize(("transport", "world"), covering(TRANSPORTS, turns=(2, 3)))
def test_a_call_out_of_turn_is_the_same_error_on_every_transport(ranks: Pool, transport: str, world: int) -> None:
    """The error comes before any data moves, and after `abandon` the exchange works like a new one."""
    for found in ranks.run(world, misused, transport):
        for (kind, count, wrong), result in zip(MISUSES, found, strict=True):
            what, turns = TURNS[kind]
            error = (
                f"got {wrong}() of {what}, expected {turns[count % len(turns)]}(); make its calls in the order "
                f"{', '.join(turns)}, and after an error call the transport's abandon() first"
            )
            assert result == (error, {}, True), (kind, count, wrong)


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
    axis, transport, found = make_mesh(device, ring=world, cfg=1).ring, load(name).Transport(), []
    for kind in KINDS:
        exchange = Exchange(transport, kind, axis, device)
        assert exchange.right(0)  # compiles the kernels before the capture
        graph = torch.cuda.CUDAGraph()
        with (
            suppress(ArithmeticError),
            torch.cuda.stream(torch.cuda.Stream()),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            torch.zeros(1, device=device)
            call(exchange, TURNS[kind][1][0])
            raise ArithmeticError
        transport.abandon()
        found.append(exchange.right(1) and exchange.right(2))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [2])
def test_gpu_a_capture_that_failed_leaves_later_calls_right(ranks: Pool, world: int, transport: str) -> None:
    assert ranks.run(world, interrupted, transport) == [[True] * len(KINDS)] * world


class Owner:
    """A stand-in for the memory of an arena, which notes when it is freed."""

    def __init__(self, freed: list[int]) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(1)


def dropped(rank: int, world: int, device: torch.device, name: str) -> list[tuple[bool, bool, bool, bool]]:
    """Drop the transport of an exchange of each kind, then the exchange, without the collector of cycles.

    Returns for each kind whether its memory is kept and it is right while the exchange lives, and whether the transport
    is gone and all memory is freed afterwards: memory of a GPU must not wait until Python looks for cycles.
    """
    axis, found, freed = make_mesh(device, ring=world, cfg=1).ring, [], []
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":  # on GPUs freed memory is not mapped any more, so reading it would be an error
            real = arena._on_cpus
            patch.setattr(arena, "_on_cpus", lambda *args: (real(*args)[0], Owner(freed)))
        gc.disable()
        try:
            for kind in KINDS:
                transport = load(name).Transport()
                exchange, alive = Exchange(transport, kind, axis, device), weakref.ref(transport)
                del transport
                kept = alive() is not None and not freed
                right = exchange.right(0) and exchange.right(1)
                made = len(getattr(alive(), "_made", ())) if device.type == "cpu" else 0
                del exchange
                found.append((kept, right, alive() is None, len(freed) == made))
                freed.clear()
        finally:
            gc.enable()
    return found


@pytest.mark.parametrize(("transport", "world"), covering(TRANSPORTS, turns=(2, 3)))
def test_an_exchange_keeps_what_it_needs_and_no_longer(ranks: Pool, transport: str, world: int) -> None:
    assert ranks.run(world, dropped, transport) == [[(True,) * 4] * len(KINDS)] * world


def released(rank: int, world: int, device: torch.device, name: str) -> list[str]:
    """Return the error of an exchange of each kind after its transport was released."""
    axis, transport = make_mesh(device, ring=world, cfg=1).ring, load(name).Transport()
    exchanges = [Exchange(transport, kind, axis, device) for kind in KINDS]
    transport.release()
    errors = [refusal(exchange, TURNS[kind][1][0]) for kind, exchange in zip(KINDS, exchanges, strict=True)]
    transport.abandon()  # nothing is unfinished
    assert all(Exchange(transport, kind, axis, device).right(0) for kind in KINDS)  # it can make new exchanges
    return errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exchange_is_refused_after_its_transport_was_released(ranks: Pool, transport: str) -> None:
    for errors in ranks.run(2, released, transport):
        assert all("was called after release(); make a new exchange" in error for error in errors)
