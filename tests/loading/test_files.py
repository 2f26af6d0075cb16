"""Tests that no crafted file of weights runs anything, fills the memory or ends in anything but one ValueError of ours.

The table holds files that a stranger could send; hypothesis alters good files. What is accepted must be what torch and
safetensors themselves read.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import time
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from seqpar.convert.originals import open_file
from seqpar.loading.checkpoint import Checkpoint, open_checkpoint

Write = Callable[[Path], object]
ALTERED = settings(
    max_examples=300, database=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SECONDS = 10  # the longest takes about 2 on an idle core
PROTOCOL = b"\x80\x02"
MATRIX = torch.arange(48.0).view(6, 8)
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}
BYTES = bytes(range(40))
KIBIBYTE = b"X\0\4\0\0" + b"a" * 1024  # a pickled text


class Calls:
    """Pickled as a call of a function; that of `os.system` would leave a file beside the tests' own."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def touch(path: Path) -> Calls:
    return Calls(os.system, f"touch {path.parent}/proof")


def saved(value: object, **options: Any) -> Write:  # value: what is saved, or a function of the path
    return lambda path: torch.save(value(path) if isinstance(value, FunctionType) else value, path, **options)


def pickled(value: Any) -> Write:
    return lambda path: path.write_bytes(pickle.dumps(value(path), 2))


def archive(pickled: bytes, **records: bytes) -> Write:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", pickled)
            file.writestr("archive/version", b"3\n")
            for name, data in records.items():
                file.writestr(f"archive/data/{name}", data)

    return write


def write_safetensors(header: object, data: bytes) -> Write:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def opened_or_refused(path: Path) -> Checkpoint | None:
    try:
        return open_checkpoint(path)
    except ValueError as error:
        message = str(error)
    assert path.name in message
    assert len(message) < 700 + len(str(path))
    return None


def crafted(data: bytes) -> Write:
    return lambda path: path.write_bytes(data)


def tensor(key: bytes, count: int, size: bytes) -> bytes:
    """Return the pickle of {"a": a tensor of a storage of `count` numbers}; size: the pickled shape."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + key + b"X\3\0\0\0cpuJ" + count.to_bytes(4, "little")
    return (
        PROTOCOL + b"}X\1\0\0\0actorch._utils\n_rebuild_tensor_v2\n(" + storage + b"tQK\0" + size + b"K\1\x85\x89}tRs."
    )


def compressed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", PROTOCOL + b"N" * (1 << 26) + b".")


def changed(path: Path, value: object, change: Any, **options: Any) -> None:
    torch.save(value, path, **options)
    path.write_bytes(change(path.read_bytes()))


def beyond(data: bytes) -> bytes:
    entry = data.rindex(b"PK\x01\x02")
    return data[: entry + 42] + (1 << 30).to_bytes(4, "little") + data[entry + 46 :]


def table_of_records(path: Path) -> None:
    # 2 GB, which take no room on the disk, of which half is said to be the table of records
    path.write_bytes(b"PK\x03\x04")
    os.truncate(path, 1 << 31)
    with path.open("ab") as file:
        file.write(b"PK\x05\x06" + bytes(8) + (1 << 30).to_bytes(4, "little") * 2 + bytes(2))


def entry(kind: str, shape: object, offsets: object) -> dict[str, Any]:
    return {"x": {"dtype": kind, "shape": shape, "data_offsets": offsets}}


STATE = {"a": torch.ones(20, 30), "b": torch.ones(2)}
SHARED = torch.ones(1000)
LOST = "is truncated or not a file of torch weights"
OLD: dict[str, Any] = {"_use_new_zipfile_serialization": False}
ODD_SAFE: dict[str, Write] = {  # safetensors
    "os.system": saved(lambda p: {"a": touch(p)}),
    "a huge header": crafted((10**12).to_bytes(8, "little") + b"{}"),
    "without end": lambda p: (p.touch(), os.truncate(p, 1 << 42)),
    "deep": write_safetensors(b"[" * 10**5, BYTES),
    "a list": write_safetensors([1], BYTES),
    "huge": write_safetensors(entry("F32", [2**40, 2**40], [0, 40]), BYTES),
    "huge and empty": write_safetensors(entry("F32", [0, 2**63], [0, 0]), b""),
    "half bytes": write_safetensors(entry("F4", [8], [0, 4]), b"1234"),
    "a hole": write_safetensors(entry("F32", [2], [8, 16]), BYTES),
    "an end": write_safetensors(entry("F32", [2], [0, 8]), BYTES),
    "short": write_safetensors(entry("F32", [2], [0, 40]), BYTES),
    "overlapping": write_safetensors({**entry("F32", [10], [0, 40]), "y": entry("U8", [4], [0, 4])["x"]}, BYTES),
}
ODD: dict[str, tuple[Write, str]] = {  # of torch: how the file is written, and what the message says
    "os.system": (saved(lambda p: {"a": torch.ones(2), "b": touch(p)}), r"requires posix\.system, but only tensors"),
    "eval": (saved({"b": Calls(eval, "1")}), r"requires eval, but only tensors .* are loaded; nothing was executed"),
    "in arguments": (saved(lambda p: {"ema": STATE, "args": Namespace(x=touch(p))}), r"requires argparse\.Namespace"),
    "an old file": (saved(lambda p: {"a": touch(p)}, **OLD), r"requires posix\.system"),
    "a plain pickle": (pickled(lambda p: {"a": touch(p)}), r"requires posix\.system"),
    "a module": (saved(nn.Linear(2, 2)), r"requires torch\.nn\.modules\.linear\.Linear"),
    "another persistent id": (archive(PROTOCOL + b"X\1\0\0\0xQ."), LOST),
    "a lost storage": (archive(tensor(b"0", 2, b"K\2\x85")), LOST),
    "a path as storage": (archive(tensor(b"/", 2, b"K\2\x85")), LOST),
    "a short storage": (archive(tensor(b"0", 1 << 30, b"J\0\0\0\x40\x85"), **{"0": b"12345678"}), LOST),
    "a huge shape": (archive(tensor(b"0", 2, b"J\0\0\0\x40J\0\0\0\x40\x86"), **{"0": b"12345678"}), LOST),
    "a compressed archive": (compressed, r"has the compressed record 'archive/data\.pkl'"),
    "a large index": (archive(PROTOCOL + b"(" * (17 << 20) + b"."), r"has an index of \d+ bytes, expected at"),
    "a large index, old": (crafted(PROTOCOL + KIBIBYTE * (17 << 10) + b"."), r"has an index of more than \d+ bytes"),
    "a large table": (table_of_records, LOST + r"|has an index"),
    "an old huge storage": (
        lambda p: changed(p, STATE, lambda d: d.replace(b"M\x58\x02", b"J\0\0\0\x7f"), **OLD),
        LOST,
    ),
    "beyond the end": (lambda p: changed(p, STATE, beyond), LOST),
    "truncated": (lambda p: changed(p, STATE, lambda data: data[: len(data) // 2]), LOST),
    "truncated, old": (lambda p: changed(p, STATE, lambda data: data[:-9], **OLD), LOST),
    "a flipped bit": (lambda p: changed(p, STATE, lambda d: d.replace(b"_v2", b"_v0", 1)), r"requires torch\._ut"),
    "empty": (crafted(b""), r"is neither an archive nor a pickle"),
    "a text": (crafted(b"root:x:0:0:root:/root:/bin/sh\n" * 9), r"is neither an archive nor a pickle"),
    "without end": (lambda p: (p.touch(), os.truncate(p, 1 << 42)), r"is neither an archive nor a pickle"),
    "a list": (saved(["not", "weights"]), r"holds a list, expected named tensors"),
    "nothing": (saved({}), r"holds a dict, expected named tensors"),
    "numbers as names": (saved({1: torch.ones(2)}), r"holds a Tensor under 1"),
    "tuples as names": (saved({(1, "a"): torch.ones(2)}), r"holds a Tensor under \(1, 'a'\)"),
    "no tensor": (saved(STATE | {"step": 7}), r"holds a int under 'step'"),
    "sparse": (saved({"a": torch.eye(2).to_sparse()}), r"a sparse, quantized, nested or meta tensor under 'a'"),
    "meta": (saved({"a": torch.ones(2, device="meta")}), r"nested or meta tensor under 'a'"),
    "quantised": (saved(lambda _: {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}), "quantized"),
    "nested": (saved(lambda _: {"a": torch.nested.nested_tensor([torch.ones(2)])}), "nested"),
    "a huge view": (saved({"a": torch.ones(1).expand(10**7, 10**7)}), r"bytes describes tensors of \d+ bytes"),
    "one storage": (saved({f"a{i}": SHARED[: 1000 - i] for i in range(400)}), r"bytes describes tensors of \d+"),
    **{f"safe: {name}": (write, "is truncated or not a safetensors file: ") for name, write in ODD_SAFE.items()},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ODD)
def test_a_crafted_file_ends_soon_in_one_sentence_and_runs_nothing(tmp_path: Path, case: str) -> None:
    (write, message), suffix = ODD[case], "safetensors" if case.startswith("safe") else "bin"
    path = tmp_path / f"odd.{suffix}"
    write(path)
    begun, held = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"odd\.{suffix}.*{message}") as error:
        open_checkpoint(path)
    assert time.process_time() - begun < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 400_000  # KiB
    assert len(str(error.value)) < 600 + len(str(tmp_path))
    assert "weights_only" not in str(error.value)
    assert [other.name for other in tmp_path.iterdir()] == [path.name]


def with_attribute(value: Tensor) -> Tensor:
    value.tag = "kept by torch"  # pyright: ignore[reportAttributeAccessIssue]
    return value


DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool)
STATES: dict[str, dict[str, Tensor]] = {
    "views": {"a": MATRIX[:, ::2], "b": MATRIX.T, "c": MATRIX[2:3], "d": torch.tensor(3.0), "e": torch.empty(0, 4)},
    "types": {str(dtype): MATRIX.to(dtype) for dtype in DTYPES},
    "new types": {str(dtype): MATRIX.to(dtype) for dtype in (torch.float8_e4m3fn, torch.uint16)},
    "parameters": {"p": nn.Parameter(torch.ones(3)), "q": with_attribute(torch.ones(3))},
    "a module": nn.BatchNorm1d(3).state_dict(),
}


@pytest.mark.parametrize(
    ("name", "old"), [*((n, False) for n in STATES), *((n, True) for n in STATES if n[:3] != "new")]
)
def test_a_file_that_torch_writes_is_read_with_its_arguments(tmp_path: Path, name: str, old: bool) -> None:
    """Archives are mapped: opening one neither copies its numbers nor keeps them in memory."""
    state, path = STATES[name], tmp_path / "good.pt"
    args = Namespace(lr=1e-4, betas=[0.9, 0.99], tags={"a"}, size=torch.Size([1]), out=Path("x"), big=1 << 40)
    content = {"ema": state, "opt": {"state": {0: {"step": torch.ones(())}}}, "args": args}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    got, arguments = open_file(path)
    assert arguments == {"lr": 1e-4, "big": 1 << 40}
    assert [*got.shapes] == [*state]
    for key, value in state.items():
        assert got.dtypes[key] == value.dtype
        assert torch.equal(got.tensor(key).double(), value.detach().double())
    mapped = str(path) in Path("/proc/self/maps").read_text()
    assert mapped == (not old)


@ALTERED
@given(data=st.data())
def test_an_altered_pickle_is_refused_or_holds_tensors_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp()
    torch.save({"ema": {"a.weight": MATRIX, "a.bias": MATRIX[0]}, "args": Namespace(lr=1.0)}, folder / "good.bin")
    with zipfile.ZipFile(folder / "good.bin") as file:
        altered, numbers = bytearray(file.read("good/data.pkl")), file.read("good/data/0")
    for _ in range(data.draw(st.integers(0, 4))):
        at, count = data.draw(st.integers(0, len(altered) - 1)), data.draw(st.integers(0, 2))
        altered[at : at + count] = data.draw(st.binary(max_size=4))
    archive(bytes(altered), **{"0": numbers})(folder / "altered.bin")
    opened = opened_or_refused(folder / "altered.bin")
    for key in opened.shapes if opened else ():
        value = opened.read(key)  # pyright: ignore[reportOptionalMemberAccess]
        assert value.clone().flatten().view(torch.uint8).sum() >= 0  # every number can be read


VALUES = st.one_of(
    st.none(),
    st.integers(-(2**65), 2**65),
    st.integers(0, 48),
    st.sampled_from(["F32", "F16", "F64", "BOOL", "F4", "", "\x1b", "a" * 10**4]),
    st.lists(st.integers(-2, 50), max_size=70),
    st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), st.integers(0, 5)),
)


@ALTERED
@given(data=st.data())
def test_an_altered_header_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path, header = tmp_path_factory.getbasetemp() / "altered.safetensors", json.loads(json.dumps(HEADER))
    for _ in range(data.draw(st.integers(0, 3))):
        key = data.draw(st.sampled_from([*HEADER, "d", "", "\ud800"]))
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "other", None]))
        if field is None or not isinstance(header.get(key), dict):
            header[key] = data.draw(st.one_of(VALUES, st.sampled_from([*HEADER]).map(lambda name: dict(HEADER[name]))))
        else:
            header[key][field] = data.draw(VALUES)
    write_safetensors(header, BYTES[: 40 - data.draw(st.sampled_from([0, 0, 0, 1]))])(path)
    opened = opened_or_refused(path)
    if opened is None:
        return
    with safe_open(path, framework="pt") as file:
        assert opened.shapes.keys() == set(file.keys())
        for key, position in opened.positions.items():
            value = file.get_tensor(key)
            assert (opened.shapes[key], opened.dtypes[key]) == (tuple(value.shape), value.dtype)
            there = path.read_bytes()[position.offset : position.offset + value.nbytes]
            assert there == bytes(value.contiguous().flatten().view(torch.uint8).tolist())


def test_negative_control_the_files_that_are_altered_are_right(tmp_path: Path) -> None:
    write_safetensors(HEADER, BYTES)(tmp_path / "good.safetensors")
    assert open_checkpoint(tmp_path / "good.safetensors").shapes == {"a": (2, 3), "b": (4,), "c": ()}
    archive(tensor(b"0", 2, b"K\2\x85"), **{"0": b"12345678"})(tmp_path / "good.bin")
    assert open_checkpoint(tmp_path / "good.bin").shapes == {"a": (2,)}
