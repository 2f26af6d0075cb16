"""Tests that no pickled file hangs, fills the memory or ends in anything but one ValueError that names it.

A table holds files that once did; hypothesis alters a good file in a thousand ways. What is accepted must be what torch
itself reads.
"""

from __future__ import annotations

import os
import time
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from seqpar.weights import pickles
from seqpar.weights.checkpoint import open_checkpoint
from tests.support.odd_files import THOUSAND, Write, archive, opened_or_refused

SECONDS = 20  # the longest takes about 3 on an idle core; before, these files took minutes or for ever
PROTOCOL = b"\x80\x02"
# a pair of a pair of ...: each line doubles the time to hash it
NESTED = PROTOCOL + b")q\0" + b"h\0h\0\x86q\0" * 60


def saved(value: object, **options: Any) -> Write:
    return lambda path: torch.save(value, path, **options)


def colliding(count: int) -> bytes:
    """Return the pickle of a dict of numbers that all have the hash 0."""
    keys = (b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(1, count + 1))
    return PROTOCOL + b"}(" + b"".join(keys) + b"u."


def one_storage_again_and_again(path: Path) -> None:
    """Write a small file of which the tensors are a hundred times as large."""
    whole = torch.ones(1000)
    torch.save({f"a{i}": whole[: 1000 - i] for i in range(400)}, path)


def beyond(path: Path) -> None:
    """Write an archive whose table says that a record begins behind the end of the file."""
    torch.save({"a": torch.ones(2)}, path)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 42 : entry + 46] = (1 << 30).to_bytes(4, "little")
    path.write_bytes(data)


TORCH: dict[str, tuple[Write, str]] = {
    "nested keys": (archive(NESTED + b"}h\0K\1s."), r"found a int under a tuple"),
    "nested function": (archive(NESTED + b"h\0h\0R."), r"asks for tuple, .*nothing of it was run"),
    "nested storage": (archive(NESTED + b"h\0Q."), r"a storage that torch does not write"),
    "nested keys, old": (lambda p: p.write_bytes(NESTED + b"}h\0K\1s."), r"truncated or holds no weights"),
    "colliding keys": (archive(colliding(50_000)), r"found a NoneType under a int"),
    "many marks": (archive(PROTOCOL + b"(" * (1 << 20) + b"."), r"more than 524288 items"),
    "many lists": (archive(PROTOCOL + b"]" + b"]a" * (1 << 20) + b"."), r"or 1048576 opcodes"),
    "a large index": (archive(PROTOCOL + b"(" * (17 << 20) + b"."), r"has an index of \d+ bytes, expected at most"),
    "a memo that is empty": (archive(PROTOCOL + b"h\7."), r"a value that was never remembered"),
    "a text without end": (archive(PROTOCOL + b"X\xff\xff\xff\xff."), r"more than 16777216 letters"),
    "no tensor at all": (archive(PROTOCOL + b"."), r"a value is missing"),
    "no storage": (
        archive(
            PROTOCOL
            + b"}X\1\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000"
            + b"X\3\0\0\0cpuK\2tQK\0K\2\x85K\1\x85\x89}tRs."
        ),
        r"the numbers of storage '0' are not in the file",
    ),
    "beyond the end": (beyond, r"has the record .* beyond its end"),
    "a text": (lambda p: p.write_text("root:x:0:0:root:/root:/bin/sh\n"), r"it is neither an archive nor a pickle"),
    "no end": (lambda p: (p.touch(), os.truncate(p, 1 << 42)), r"truncated or holds no weights"),
    "one storage": (one_storage_again_and_again, r"bytes with tensors of \d+, expected no more"),
    "two pickles": (
        lambda p: [zipfile.ZipFile(p, "a").writestr(f"{name}/data.pkl", b"N.") for name in "ab"],
        r"has 2 records data\.pkl",
    ),
    "a pipe": (lambda p: os.mkfifo(p), r"expected a file; it is a folder, a pipe or a device"),
    "a device": (lambda p: p.symlink_to("/dev/zero"), r"expected a file; it is a folder, a pipe or a device"),
    "itself": (lambda p: p.symlink_to(p), r"expected a file; there is none"),
    "of the kernel": (lambda p: p.symlink_to("/proc/self/maps"), r"truncated or holds no weights"),
    "quantised": (
        lambda p: torch.save({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}, p),
        r"found a quantised tensor under 'a'",
    ),
    "nested tensor": (
        lambda p: torch.save({"a": torch.nested.nested_tensor([torch.ones(2)])}, p),
        r"found a nested tensor under 'a'",
    ),
    "tuples": (saved({(1, "a"): torch.ones(2)}), r"found a tensor under a tuple"),
    "an empty name": (saved({"a": torch.ones(2), "": torch.ones(2)}), r"a tensor named '', expected names of"),
    "odd letters": (saved({"\x1b[31m": torch.ones(2)}), r"a tensor named '\\x1b\[31m', expected names of"),
}


@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TORCH)
def test_a_pickled_file_ends_soon_in_an_error_that_names_it(tmp_path: Path, case: str) -> None:
    write, message = TORCH[case]
    write(tmp_path / "odd.pt")
    begun = time.monotonic()
    with pytest.raises(ValueError, match=rf"got checkpoint .*odd\.pt.*{message}") as error:
        open_checkpoint(tmp_path / "odd.pt")
    assert time.monotonic() - begun < SECONDS
    assert len(str(error.value)) < 500 + len(str(tmp_path))


def with_attribute(tensor: Tensor) -> Tensor:
    tensor.tag = "kept by torch"  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


MATRIX = torch.arange(48.0).view(6, 8)
STATES: dict[str, dict[str, Tensor]] = {
    "views": {"a": MATRIX[:, ::2], "b": MATRIX.T, "c": MATRIX[2:3], "d": torch.tensor(3.0), "e": torch.empty(0, 4)},
    "types": {
        str(dtype): MATRIX.to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool)
    },
    "new types": {str(dtype): MATRIX.to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16)},
    "parameters": {"p": nn.Parameter(torch.ones(3)), "q": with_attribute(torch.ones(3))},
    "a module": nn.BatchNorm1d(3).state_dict(),
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"_use_new_zipfile_serialization": False},
    {"pickle_protocol": 4},
    {"pickle_protocol": 5},
)


@pytest.mark.parametrize("name", STATES)
def test_every_file_that_torch_writes_is_read_as_torch_reads_it(tmp_path: Path, name: str) -> None:
    """The old format included, in which numbers begin at any byte."""
    state, path = STATES[name], tmp_path / "good.pt"
    args = Namespace(lr=1e-4, betas=[0.9, 0.99], tags={"a"}, size=torch.Size([1]), dtype=torch.float32, big=1 << 40)
    for options in OPTIONS:
        torch.save({"ema": state, "opt": {"state": {0: {"step": torch.ones(())}}}, "args": args}, path, **options)
        got, told = pickles.read_state(path)
        assert told == {"lr": 1e-4, "big": 1 << 40}
        assert [*got] == [*state]
        for key, tensor in state.items():
            assert got[key].dtype == tensor.dtype
            assert torch.equal(got[key].double(), tensor.detach().double())


@settings(THOUSAND, max_examples=300)
@given(data=st.data())
def test_an_altered_pickle_is_refused_or_holds_tensors_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    pickled, numbers = good_pickle(folder)
    altered = bytearray(pickled)
    for _ in range(data.draw(st.integers(1, 4))):
        at, count = data.draw(st.integers(0, len(altered) - 1)), data.draw(st.integers(0, 2))
        altered[at : at + count] = data.draw(st.binary(max_size=4))
    archive(bytes(altered), **{"0": numbers})(folder / "altered.pt")
    opened = opened_or_refused(folder / "altered.pt")
    for key in opened.shapes if opened else ():
        tensor = opened.read(key)  # pyright: ignore[reportOptionalMemberAccess]
        assert tensor.numel() * tensor.element_size() <= len(numbers)
        assert tensor.clone().flatten().view(torch.uint8).sum() >= 0  # every number can be read


def good_pickle(folder: Path) -> tuple[bytes, bytes]:
    """Return the pickle and the numbers of a small training checkpoint."""
    torch.save({"ema": {"a.weight": MATRIX, "a.bias": MATRIX[0]}, "args": Namespace(lr=1.0)}, folder / "good.pt")
    with zipfile.ZipFile(folder / "good.pt") as file:
        return file.read("good/data.pkl"), file.read("good/data/0")


def test_the_pickle_that_is_altered_is_right(tmp_path: Path) -> None:
    pickled, numbers = good_pickle(tmp_path)
    archive(pickled, **{"0": numbers})(tmp_path / "same.pt")
    assert torch.equal(open_checkpoint(tmp_path / "same.pt").read("a.weight"), MATRIX)
