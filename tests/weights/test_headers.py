"""Tests that no safetensors file hangs, fills the memory or ends in anything but one ValueError that names it.

A table holds files that once did; hypothesis alters a good file in a thousand ways. What is accepted must be what the
library itself reads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from seqpar.weights.checkpoint import open_checkpoint
from tests.support.odd_files import THOUSAND, Write, opened_or_refused, write_safetensors

HEADER: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [32, 40]},
}
BYTES = bytes(range(40))


def safetensors(header: object, data: bytes = BYTES) -> Write:
    return write_safetensors(header, data)


def entry(kind: str, shape: object, offsets: object) -> dict[str, Any]:
    return {"x": {"dtype": kind, "shape": shape, "data_offsets": offsets}}


SAFE: dict[str, tuple[Write, str]] = {
    "too many": (
        safetensors({f"k{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300_000)}, b""),
        r"a header of \d+, expected one of at most 16777216",
    ),
    "no end": (lambda p: (p.touch(), os.truncate(p, 1 << 42)), r"its header is no JSON"),
    "deep": (safetensors(b"[" * 10**5), r"its header is no JSON"),
    "a list": (safetensors([1]), r"its header is a list"),
    "empty but huge": (safetensors(entry("F32", [0, 2**63], [0, 0]), b""), r"x is an array whose shape"),
    "huge": (safetensors(entry("F32", [2**40, 2**40], [0, 40])), r"x is an array of shape .* larger than any file"),
    "many dims": (safetensors(entry("U8", [1] * 1000, [0, 1]), b"1"), r"x is an array whose shape"),
    "half bytes": (safetensors(entry("F4", [8], [0, 4]), b"1234"), r"x is of type 'F4', expected one of F64"),
    "a hole": (safetensors(entry("F32", [2], [8, 16])), r"x begins at byte \d+, expected \d+, where the one before"),
    "an end": (safetensors(entry("F32", [2], [0, 8])), r"its tensors end at byte \d+, expected \d+, the end of the"),
    "short": (safetensors(entry("F32", [2], [0, 40])), r"x has another number of bytes than its shape \(2,\)"),
    "twice": (safetensors(json.dumps(entry("F32", [10], [0, 40]))[:-1].encode() + b',"x":{}}'), r"a key comes twice"),
    "escapes": (safetensors({"\x1b\n" * 300: entry("F32", [10], [0, 40])["x"]}), r"a tensor named '\\x1b"),
    "no tensor": (safetensors({}, b""), r"without a tensor, expected the weights of a model"),
}


@pytest.mark.parametrize("case", SAFE)
def test_a_safetensors_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    write, message = SAFE[case]
    write(tmp_path / "odd.safetensors")
    with pytest.raises(ValueError, match=rf"got checkpoint .*odd\.safetensors.*{message}") as error:
        open_checkpoint(tmp_path / "odd.safetensors")
    assert len(str(error.value)) < 600 + len(str(tmp_path))


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.integers(0, 48),
    st.floats(),
    st.sampled_from(["F32", "F16", "F64", "BOOL", "F4", "", "\x1b", "a" * 10**4]),
    st.lists(st.integers(-2, 50), max_size=70),
    st.dictionaries(st.sampled_from(["dtype", "shape", "x"]), st.integers(0, 5)),
)


@st.composite
def headers(draw: st.DrawFn) -> bytes:
    """Draw a header with values replaced, dropped, added or moved, and at times with bytes altered."""
    header = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*HEADER, "d", "", "\ud800"]))
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "other", None]))
        if field is None or not isinstance(header.get(key), dict):
            header[key] = draw(st.one_of(ODD, st.sampled_from([*HEADER]).map(lambda name: dict(HEADER[name]))))
        elif draw(st.booleans()):
            header[key][field] = draw(ODD)
        else:
            header[key].pop(field, None)
    text = bytearray(json.dumps(header).encode())
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text) - 1))
        text[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(text)


@THOUSAND
@given(header=headers(), cut=st.integers(0, 8))
def test_an_altered_header_is_refused_or_read_as_the_library_reads_it(
    tmp_path_factory: pytest.TempPathFactory, header: bytes, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "altered.safetensors"
    safetensors(header, BYTES[: len(BYTES) - (cut if cut > 6 else 0)])(path)
    opened = opened_or_refused(path)
    if opened is None:
        return
    with safe_open(path, framework="pt") as file:
        assert opened.shapes.keys() == set(file.keys())
        for key, place in opened.places.items():
            tensor = file.get_tensor(key)
            assert (opened.shapes[key], opened.dtypes[key]) == (tuple(tensor.shape), tensor.dtype)
            there = path.read_bytes()[place.offset : place.offset + tensor.nbytes]
            assert there == bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def test_the_header_that_is_altered_is_right(tmp_path: Path) -> None:
    safetensors(HEADER)(tmp_path / "good.safetensors")
    assert open_checkpoint(tmp_path / "good.safetensors").shapes == {"a": (2, 3), "b": (4,), "c": ()}
