"""Tests of what ranks send each other: only data of the type that is named, from a rank or from a stranger."""

from __future__ import annotations

import ast
import math
import os
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import seqpar
from seqpar.mesh.errors import HEAD, LONGEST, SMALL, VALUE, decode, decode_all, encode, length, padded
from seqpar.mesh.inputs import streams_of_rank_0
from seqpar.mesh.mesh import Mesh, gathered
from seqpar.mesh.watch import LostRankError
from seqpar.transports.peer.arena import Arena
from seqpar.verifying.compare import Error, Place
from tests.support.pool import Pool


@dataclass(frozen=True)
class Bomb:
    """What makes a file where it is unpickled."""

    canary: Path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return partial(self.canary.write_text, "ran"), ()


KIND = tuple[dict[str, int] | None, float, list[str], str | None]
MESSAGE = encode(({"a": 1, "b": -(2**63)}, 0.1, ["x" * 20, "\u00e9"], None), KIND)


def strange(canary: Path) -> dict[str, bytes]:
    """Return bytes that are no message of `KIND`, by what is wrong with them."""
    return {
        "a pickle": pickle.dumps(Bomb(canary)),
        "a pickle as the value": VALUE + pickle.dumps(Bomb(canary)),
        "nothing": b"",
        "no value": VALUE,
        "another kind": encode(5, int),
        "another kind within": encode(({"a": "1"}, 0.1, ["x"], None), tuple[dict[str, str], float, list[str], None]),
        "too few": encode(({"a": 1}, 0.1), tuple[dict[str, int], float]),
        "cut": MESSAGE[:-9],
        "too much": MESSAGE + b"\0",
        "a list of four thousand million": VALUE + b"\xdd\xff\xff\xff\xff",
        "half a character": VALUE + b"\x94\xc0\xcb" + bytes(8) + b"\x91\xa1\xff\xc0",
    }


def test_a_message_holds_the_value_exactly() -> None:
    place = Place(3, index=1, name="a block")
    for value, kind in (
        ((True, None), tuple[bool, str | None]),
        ({place: Error(0.1 + 0.2, math.inf)}, dict[Place, Error]),
        (torch.bfloat16, torch.dtype),
        ((5e-324, -0.0, 1e308), tuple[float, ...]),
    ):
        assert repr(decode(encode(value, kind), kind, 0, "")) == repr(value)
    assert math.isnan(decode(encode(math.nan, float), float, 0, ""))
    assert decode(encode(torch.tensor([2.5]).numpy()[0], float), float, 0, "") == 2.5


def test_what_is_no_message_is_an_error_that_names_sender_and_type(tmp_path: Path) -> None:
    for name, text in strange(tmp_path / "canary").items():
        with pytest.raises(LostRankError, match=r"malformed message from rank 3 \(classes\): not a tuple") as caught:
            decode(text, KIND, 3, "classes")
        assert "docs/reliability.md" in str(caught.value), name
    with pytest.raises(LostRankError, match="not a dtype"):
        decode(encode("load", str), torch.dtype, 3, "dtype")
    deep = VALUE + b"\x86" + encode(Place(3, index=1, name="a block"), Place)[2:] + b"\xa1x" + b"\x91" * 10**5 + b"\xc0"
    with pytest.raises(LostRankError, match=r"not a Place .*recursion"):
        decode(deep, Place, 3, "places")
    assert not list(tmp_path.iterdir())


def test_mutated_messages_are_read_or_refused() -> None:
    chance, refused = random.Random(0), 0
    for _ in range(5000):
        text = bytearray(MESSAGE)
        for _ in range(chance.randint(1, 4)):
            text[chance.randrange(len(text))] = chance.randrange(256)
        try:
            decode(bytes(text), KIND, 0, "x")
        except (LostRankError, ValueError):
            refused += 1
    assert refused > 2000


def test_a_length_that_no_message_has_makes_no_room() -> None:
    box = padded(MESSAGE, SMALL)
    box[:HEAD] = torch.frombuffer(bytearray((LONGEST + 1).to_bytes(HEAD, "little")), dtype=torch.uint8)
    with pytest.raises(LostRankError, match=f"{LONGEST + 1} bytes, maximum {LONGEST}"):
        length(box, 0, "x")
    box[:HEAD] = 255
    with pytest.raises(LostRankError, match="rank 1"):
        decode_all([padded(MESSAGE, SMALL), box], KIND, "x")


def test_a_value_of_another_kind_is_the_senders_mistake() -> None:
    for value, kind, reason in ((["a", 5], list[str], "Expected `str`"), (Mesh, str, "type is not supported")):
        with pytest.raises(ValueError, match=f"cannot share a value as .*: .*{reason}") as caught:
            decode(encode(value, kind), kind, 0, "x")
        assert not isinstance(caught.value, LostRankError)
    with pytest.raises(ValueError, match="maximum"):
        decode(encode(bytes(LONGEST), bytes), bytes, 0, "x")


def exchanged(rank: int, world: int, device: torch.device, strangers: dict[str, bytes]) -> list[str]:
    """Send messages of a stranger as the last rank; return the errors, the same on all, and that all goes on after."""
    mesh, told = Mesh.from_env(device=device), []

    def attempt(work: Callable[[], object]) -> None:
        with pytest.raises((LostRankError, ValueError)) as caught:
            work()
        told.append(f"{type(caught.value).__name__}: {caught.value}")

    for text in strangers.values():
        if rank == world - 1:
            box = padded(text, SMALL)
            attempt(lambda box=box: decode_all(gathered(mesh.world, device, box, "x"), KIND, "small values of all"))
        else:
            attempt(lambda: mesh.collect(({"a": 1}, 0.1, ["x"], None), KIND))
    mistake: Any = 5 if rank == 0 else "x"
    attempt(lambda: mesh.share(mistake, str))
    attempt(lambda: mesh.collect(mistake, str))
    told += [str(mesh.collect(rank, int)), str(mesh.on_rank_0(lambda: f"of rank {rank}", str))]
    return told


def test_a_stranger_in_the_place_of_a_rank_ends_all_ranks_alike_and_runs_nothing(ranks: Pool, tmp_path: Path) -> None:
    strangers = strange(tmp_path / "canary")
    told = ranks.run(3, exchanged, strangers)
    assert not list(tmp_path.iterdir())
    for *strange_ones, shared, collected, everyone, rank_0s in told:
        assert len(strange_ones) == len(strangers)
        assert all("LostRankError: malformed message from rank 2 (small values of all" in each for each in strange_ones)
        assert shared == collected == "ValueError: cannot share a value as str: Expected `str`, got `int`"
        assert (everyone, rank_0s) == ("[0, 1, 2]", "of rank 0")


def streamed(rank: int, world: int, device: torch.device) -> tuple[dict[str, list[Any]], str]:
    """Return the tensors of rank 0, and the error where it fails to make them."""
    mesh = Mesh.from_env(device=device)
    mine = {"b": torch.arange(3) + rank, "a": torch.full((2, 1), 0.1 + rank, dtype=torch.float64)}
    with pytest.raises(ValueError, match="no picture") as caught:
        streams_of_rank_0(mesh, lambda: (_ for _ in ()).throw(ValueError("no picture")))
    made = streams_of_rank_0(mesh, lambda: mine if rank == 0 else {})
    return {name: x.tolist() for name, x in made.items()}, str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_of_rank_0_come_to_all(ranks: Pool, world: int) -> None:
    for made, error in ranks.run(world, streamed):
        assert made == {"b": [0, 1, 2], "a": [[0.1], [0.1]]}
        assert error == ("rank 0: no picture" if world > 1 else "no picture")


def overwritten(rank: int, world: int, device: torch.device, victim: Path) -> str:
    """Share memory with a rank that names another file of this user as its memory."""
    mesh = Mesh.from_env(device=device)
    if rank == 1:
        with victim.open("r+b") as file:
            name = f"{os.getpid()}/fd/{file.fileno()}/{'0' * 16}"
            box = padded(encode((name, None), tuple[str, str | None]), SMALL)
            gathered(mesh.world, device, box, "strange")
        return ""
    with pytest.raises(LostRankError, match=r"'.*/fd/.*' is not shared memory of a rank") as caught:
        Arena(mesh.world, 64, device)
    return str(caught.value)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name")
def test_memory_that_is_a_file_of_the_user_is_not_written(ranks: Pool, tmp_path: Path) -> None:
    if ranks.device == "cuda":
        pytest.skip("GPUs share memory by torch")
    (tmp_path / "victim").write_text("mine")
    ranks.run(2, overwritten, tmp_path / "victim")
    assert (tmp_path / "victim").read_text() == "mine"


# modules that run data, functions of torch.distributed that pickle objects, files that are read without the switch
UNPICKLES = re.compile(
    r"^\s*(?:import|from) .*\b(?:_?pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)\b"
    r"|_object_list\b|gather_object\b|\btorch\.load\((?!.*weights_only=True)|\bnp\.load\((?!.*allow_pickle=False)",
    re.MULTILINE,
)


def doors(program: str) -> list[str]:
    """Return what in a program makes objects from data that may be a stranger's; each statement is one line here."""
    return UNPICKLES.findall(ast.unparse(ast.parse(program)))


def test_nothing_in_the_package_unpickles() -> None:
    for text in (
        "import pickle as p",
        "from _pickle import loads",
        "from torch.distributed import broadcast_object_list",
        "dist.all_gather_object(x, y)",
        "dist.recv_object_list(x)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "np.load(file, allow_pickle=True)",
    ):
        assert doors(text), text
    assert not doors("torch.load(f, weights_only=True); from seqpar.loading.pickles import load_pickle")
    files = sorted(Path(seqpar.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    found = {str(file): wrong for file in files if (wrong := doors(file.read_text()))}
    assert not found
