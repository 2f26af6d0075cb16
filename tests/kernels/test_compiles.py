"""Tests of what the interpreter cannot show: kernels compile for Hopper, to 16-byte accesses and without spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.offline import launches

ROOT = Path(__file__).parents[2]
NARROW = {
    "channel_norm": {2, 4},  # the weight of a channel
    "group_norm": {2, 4, 8},  # moments, and the weights of a channel
    "eight": {4},  # the scale of a head
    "rows8": {4, 8},  # the scale of a row, and its values
    "weight8": {4},  # the scale of a row
    "narrowing": {4},  # the same
    "extrapolate": {8},  # weights
    "merge": {4},  # log-sum-exps, one for each row of a head
    "tokens": {4},  # those of the merge among them
    "outboxes": {8},  # the table of places
    "ddim": {2, 4, 8},  # latent-sized; its scalars too
    "ddpm": {2, 4, 8},
    "multistep": {2, 4, 8},  # the same
    "residual": {2, 4, 8},  # biases
    "push": {8},  # the table of places
    "indexed": {4},  # the index of a token
    "halo": {8},  # the counter of swaps, and the flags
    "wide": {4, 8},  # shifts and sums of rows; the output of four columns a thread
}
"""The widths in bytes of accesses that may be narrow, by kernel."""
SMALL = {"combine_kernel"}  # three numbers of each part
Facts = dict[str, Any]
pytestmark = pytest.mark.timeout(600)  # of compiling all kernels on a busy machine; 30 s on a quiet one


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[Facts]]:
    """Compile all kernels in a new process, because Triton chooses between compiler and interpreter at import."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["SEQPAR_TEST_DEVICE"] = "cpu:0"  # tests on "cpu" set TRITON_INTERPRET
    env["PYTHONPATH"] = str(ROOT) + os.pathsep + env.get("PYTHONPATH", "")
    command = [sys.executable, "-m", "tests.support.offline"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def access(kernel: Facts) -> set[int]:
    return {int(size) for side in ("loads", "stores") for size in kernel[side]}


def named(*kinds: str) -> list[str]:
    return [name for name in launches() if name.startswith(kinds)]


@pytest.mark.parametrize("name", sorted({*launches()} - {*named("unaligned", "flags", "wide")}))
def test_kernels_for_hopper_read_and_write_16_bytes_at_a_time_and_spill_nothing(
    compiled: dict[str, list[Facts]], name: str
) -> None:
    assert compiled[name]
    for kernel in compiled[name]:
        assert kernel["spilled"] == 0
        assert kernel["name"] in SMALL or access(kernel) - NARROW.get(name.split(",")[0], set()) == {16}


@pytest.mark.parametrize("width", [1152, 4096])
def test_an_image_of_another_size_compiles_nothing(compiled: dict[str, list[Facts]], width: int) -> None:
    """Numbers of tokens that 16 divides, and others, have one program; widths have programs of their own."""
    few, many, wider = (
        compiled[name] for name in (f"tokens, 7, {width}", f"tokens, 16, {width}", f"tokens, 7, {5248 - width}")
    )
    assert [kernel["program"] for kernel in few] == [kernel["program"] for kernel in many]
    own = {kernel["program"] for kernel in few if kernel["name"] != "kernel"}  # Weight8's takes the width as a number
    assert own.isdisjoint(kernel["program"] for kernel in wider)


@pytest.mark.parametrize("name", named("wide"))
def test_products_of_a_tile_are_not_waited_for_one_by_one(compiled: dict[str, list[Facts]], name: str) -> None:
    """The assembler waits for each product where it cannot follow the registers, which costs a third of the speed.

    The copy engine moves the tiles; the kernel's threads store numbers of each row, in 4 bytes.
    """
    (kernel, parts) = compiled[name]
    assert kernel["waited"] == kernel["waits"] > 0
    assert kernel["spilled"] <= 64 * ("uneven" in name)  # bytes; the mask of keys after the last needs registers
    assert parts["spilled"] == 0
    assert access(kernel) == {4}
    assert access(parts) - {4, 8} == {16}


def test_models_launch_few_kernels(compiled: dict[str, list[Facts]]) -> None:
    """A block launches QK-norm and rotary, two gated norms and SwiGLU (GELU is cuBLAS's); one norm precedes all.

    A block of a U-ViT launches two norms around GELU, and one norm more after a skip; two norms precede the outputs.
    """
    uvit = ["post_norm_kernel", "gelu_kernel", "post_norm_kernel"]
    for name, block in {
        "large-dit-7b": ["adaln_kernel", "prepare_kernel", "adaln_kernel", "swiglu_kernel", "adaln_kernel"],
        "dit-xl/2": ["adaln_kernel", "adaln_kernel", "adaln_kernel"],
        "unidiffuser-v1": [*uvit, *uvit, "post_norm_kernel", *uvit, "post_norm_kernel", "post_norm_kernel"],
    }.items():
        assert [kernel["name"] for kernel in compiled[f"model, {name}"]] == block


def test_rows_that_do_not_start_on_16_bytes_are_noticed(compiled: dict[str, list[Facts]]) -> None:
    """This is a negative control: the stream is read in pieces, and the check above would notice it."""
    (kernel,) = compiled["unaligned"]
    assert access(kernel) - {16}


def test_flags_have_system_scope_and_kernels_that_meet_the_peers_hold_them_once(
    compiled: dict[str, list[Facts]],
) -> None:
    (flags,) = compiled["flags"]
    assert (flags["release"], flags["acquire"], flags["acq_rel"]) == (1, 2, 0)  # acquire: before the loop, and in it
    for name, plain in (("outboxes, meets", "outboxes, 32 x 128"), ("push, meets", "push, 8 x 128")):
        (kernel,), (without,) = compiled[name], compiled[plain]
        assert kernel["acq_rel"] == 1  # every program counts itself once
        assert [kernel[word] for word in ("release", "acquire")] == [1, 2]
        assert [without[word] for word in ("release", "acquire", "acq_rel")] == [0, 0, 0]
        assert kernel["registers"] <= without["registers"] + 8  # only one program waits, but all need its registers
    for name in ("outboxes, meets", "push, meets", "halo, send rows"):
        (kernel,) = compiled[name]
        # the loop has barriers, so a warp that left it by its own clock would leave the others waiting
        assert kernel["threads"] > 32
        assert kernel["clocks"] == kernel["agreed"] == 1
