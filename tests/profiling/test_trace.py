"""Tests that what ran is found in traces, with its step and its block."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from seqpar.profiling import trace
from seqpar.profiling.trace import OUTSIDE, read, what_of
from tests.profiling import traces
from tests.profiling.traces import block, kernel, launch, operation, step

A_BLOCK = ("adaln_kernel", "nvjet_hsh_256x128", "prepare_kernel", "flash_fwd_sm90", "push_kernel", "nvjet_hsh_64x8")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nvjet_hsh_192x208_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("kernel_cutlass_kernel_quackgemm_act_sm90GemmActSm90_object_at", "products"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("flags_kernel", "exchange"),
        ("Memcpy PtoP (Device -> Device)", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "elementwise"),
        ("prepare_kernel", "store"),
        ("push_kernel", "store"),
        ("void at::native::vectorized_elementwise_kernel<4, add>", "elementwise"),
        ("aten::linear", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("gloo:all_to_all", "exchange"),
        ("aten::copy_", "elementwise"),
    ],
)
def test_names_tell_what_runs(name: str, what: str) -> None:
    assert what_of(name) == what


def eager(names: list[str], at: float, launched: float, numbers: Any, inside: str | None) -> list[dict[str, Any]]:
    """Return kernels of 2 us, 1 us apart, and their launches, 1 us apart, in a block's forward."""
    found = [] if inside is None else [block(inside, launched - 0.5, launched + len(names))]
    for index, name in enumerate(names):
        number = next(numbers)
        found += [launch(number, launched + index), kernel(number, name, at + 3 * index, at + 3 * index + 2)]
    return found


def replay(names: list[str], at: float, launched: float, numbers: Any) -> list[dict[str, Any]]:
    number = next(numbers)
    ran = [kernel(number, name, at + 3 * index, at + 3 * index + 2) for index, name in enumerate(names)]
    return [launch(number, launched, "cudaGraphLaunch"), *ran]


def recorded(blocks: int, tuning: int = 0) -> dict[str, Any]:
    """Return a step without a graph, and two replays; tuning: kernels of the first block that run but this once."""
    numbers, before, measured = count(1), [step(0, 0, 400)], [step(1, 1000, 1010), step(2, 1010, 1020)]
    before += eager(["embed"], 0, 1, numbers, None)
    for index in range(blocks):
        extra = ["nvjet_hsh_256x128"] * tuning * (index == 0)
        before += eager([*extra, *A_BLOCK], 10 + 60 * index, 10 + 30 * index, numbers, f"Block {index}")
    before += eager(["nvjet_hsh_64x8", "step_kernel"], 300, 300, numbers, None)
    whole = ["nvjet_hsh_64x8", *A_BLOCK * blocks, "nvjet_hsh_64x8", "step_kernel"]
    for launched, at in ((1001, 2000), (1011, 2500)):
        measured += replay(whole, at, launched, numbers)
    stray = kernel(next(numbers), "nvjet_hsh_64x8", 1900, 1990)  # of a step before, whose launch was not recorded
    return traces.trace([*before, *measured, stray])


@pytest.mark.parametrize("tuning", [0, 1, 20])
def test_blocks_of_a_replay_are_known_by_the_order_of_its_kernels(tuning: int) -> None:
    ran = read(recorded(5, tuning), 1)
    expected = [OUTSIDE, *(f"Block {index}" for index in range(5) for _ in A_BLOCK), OUTSIDE, OUTSIDE]
    assert ran.notes == ()
    assert [event.block for event in ran.events] == expected * 2
    assert [event.step for event in ran.events] == [1] * len(expected) + [2] * len(expected)


def test_exchanges_belong_to_the_block_of_the_kernel_before_them() -> None:
    made = recorded(2)
    graph = next(each["args"]["correlation"] for each in made["traceEvents"] if each["name"] == "cudaGraphLaunch")
    at = 2000 + 3 * (1 + len(A_BLOCK)) + 1.5  # during the first kernel of the second block
    made["traceEvents"].append(kernel(graph, "flags_kernel", at, at + 2))
    assert next(event.block for event in read(made, 1).events if event.name == "flags_kernel") == "Block 1"


def test_blocks_that_the_host_launches_itself_need_no_order() -> None:
    numbers = count(1)
    ran = eager([*A_BLOCK], 10, 110, numbers, "Block 0") + eager([*A_BLOCK[:3]], 60, 140, numbers, "Block 1")
    one = read(traces.trace([step(0, 0, 100), step(1, 100, 200), *ran]), 1)
    assert [event.block for event in one.events] == ["Block 0"] * 6 + ["Block 1"] * 3


def test_other_kernels_than_those_seen_before_have_no_block_and_a_note_says_so() -> None:
    made = recorded(5)
    for each in made["traceEvents"]:
        if each["ts"] >= 1000:
            each["name"] = each["name"].replace("nvjet", "other_gemm").replace("adaln", "other")
    assert read(made, 1).notes == ("blocks of replayed graphs are unknown: their kernels match no recorded order",)


def test_a_written_trace_begins_with_the_meetings_of_the_ranks() -> None:
    made = recorded(5)
    made["traceEvents"] += [traces.meeting(980, 985), traces.meeting(986, 990)]
    kept = trace.trimmed(made, 1)["traceEvents"]
    assert min(each["ts"] for each in kept) == 980
    assert len(kept) == sum(each["ts"] >= 980 for each in made["traceEvents"])


def test_a_step_on_a_gpu_lasts_from_its_first_kernel_to_that_of_the_next() -> None:
    one = read(recorded(5), 1)
    kernels = 3 + 5 * len(A_BLOCK)
    assert one.steps == {1: (2000, 2500), 2: (2500, 2500 + 3 * kernels - 1)}
    # a block begins where the kernel before it ends, so that the gap between them is its own
    assert one.marks[1] == (2002, "Block 0")
    assert [block for _, block in one.marks[:8]] == [
        OUTSIDE,
        *(f"Block {index}" for index in range(5)),
        OUTSIDE,
        "Block 0",
    ]


def test_outermost_operations_of_a_cpu_and_its_exchanges_count() -> None:
    made = traces.trace(
        [
            step(0, 0, 100),
            block("Block 0", 10, 60),
            operation("aten::linear", 12, 20),
            operation("aten::addmm", 13, 19),
            operation("aten::copy_", 30, 31, thread=9),  # another thread of this process
            operation("c10d::alltoall_base_", 29, 35),
            operation("gloo:all_to_all", 30, 40, thread=8),
            operation("aten::add", 70, 71),
            operation("aten::add", 200, 201),  # after the steps
        ]
    )
    one = read(made, 0)
    assert [(event.what, event.start, event.block) for event in one.events] == [
        ("products", 12, "Block 0"),
        ("exchange", 30, "Block 0"),
        ("elementwise", 70, OUTSIDE),
    ]
    assert one.steps == {0: (0, 100)}
    assert one.marks == ((10, "Block 0"), (60, OUTSIDE))
