"""Tests adapters on fused blocks where the copies of weights into which they are merged do not fit into the memory.

The truth is diffusers' transformer with the same adapters in one process; see `test_blocks.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from weakref import ref

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.transformer import blocks as adopt
from seqpar.transformer.blocks import NO_ROOM, FusedBlocks
from tests.families.test_blocks import act, counted
from tests.support.diffusers_tiny import MODELS, flat
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.support.sharded import TOLERANCE, VISIBLE, error

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns of a second adapter

# what a user does -> whether copies have room, whether functions compute the blocks then, whether the reason is told
SHORT = {
    "nothing": (True, True, False),
    "load": (False, False, True),
    "both": (True, False, True),
    "unload": (True, True, False),
    "load again": (True, True, False),
    "a call's scale": (False, False, False),  # one rank computes this call; all ranks learn the reason at the next one
    "enable": (True, False, True),
}


@contextmanager
def room_for(copies: float) -> Iterator[list[ref[Tensor]]]:
    """Let memory be too small for more copies than some, and note those that are made."""
    made, copy_into = list[ref[Tensor]](), adopt.copied_into

    def copied(like: Tensor, room: Tensor | None) -> Tensor:
        if len(made) >= copies:
            raise torch.OutOfMemoryError("out of memory")
        mine = copy_into(like, room)
        made.append(ref(mine))
        return mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adopt, "copied_into", copied)
        yield made


def short(
    rank: int, world: int, device: torch.device, actions: tuple[str, ...]
) -> tuple[list[tuple[float, int, str, bool]], str]:
    """Return, after each action, the error, the functions' calls, what computes, whether copies exist; what is printed.

    Where copies do not fit, only the last rank lacks room, for the fourth one.
    """
    tiny, answers, copies = MODELS["wan"], [], list[ref[Tensor]]()
    module, whole = tiny.build().to(device), tiny.build().to(device)
    with counted() as calls, redirect_stdout(StringIO()) as printed:
        for action in actions:
            for one in (module, whole) if action != "nothing" else ():
                act(one, action.removesuffix(" again"))
            given = tiny.arguments(device)
            given |= {"attention_kwargs": {"scale": 0.4}} if action == "a call's scale" else {}
            calls.clear()
            lacks = rank == world - 1 and not SHORT[action][0]
            with room_for(3 if lacks else torch.inf) as made, StayDouble(), torch.no_grad():
                if not answers:
                    seqpar.parallelize(module, make_mesh(device, cfg=1))
                    in_double(module)
                got = flat(module(**given, return_dict=False))
                wanted = flat(whole(**copy.deepcopy(given), return_dict=False))
            copies += made
            told, exist = module.forward.sharded.texts(), any(one() is not None for one in copies)
            answers.append((error(got, wanted), len(calls), told["computation"], exist))
    seqpar.release(module)
    return answers, printed.getvalue()


@pytest.mark.parametrize(("world", "actions"), [(1, tuple(SHORT)), (2, tuple(SHORT)[:5]), (2, ("load",))])
def test_adapters_whose_copies_do_not_fit_on_one_rank_are_left_to_diffusers_own(
    ranks: Pool, world: int, actions: tuple[str, ...]
) -> None:
    for rank, (answers, printed) in enumerate(ranks.run(world, short, actions)):
        for action, (wrong, calls, computation, exist) in zip(actions, answers, strict=True):
            _, fused, says = SHORT[action]
            assert wrong < TOLERANCE, action
            assert calls == (2 if fused else 0), action
            assert (NO_ROOM in computation) is says, action
            assert exist is (action == "load again"), action
        assert printed.count(f"2 of 2 blocks are diffusers' own, because {NO_ROOM}") == (rank == 0)


def test_negative_control_adapters_that_are_left_out_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def swallowing(self: FusedBlocks) -> None:
        with suppress(torch.OutOfMemoryError):
            self._merge()

    monkeypatch.setattr(FusedBlocks, "_take_weights", swallowing)
    (_, (wrong, *_)), _ = short(0, 1, torch.device("cpu"), ("nothing", "load"))
    assert wrong > VISIBLE
