"""Compiles our Triton kernels for an H100 or H200 on a machine without a GPU, and reports facts about the machine code.

A launch runs as in a model, on CPU tensors, up to the point where the kernel would start; kernels are therefore
specialised on the real alignments, strides and missing tensors, as the tests of kernels make them. `TRITON_INTERPRET`
must not be set, so `tests/kernels/test_compiles.py` starts this module as a process, where the device is not "cpu".
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from seqpar.kernels import (
    activations,
    adaln,
    ddim,
    flags,
    group_norm,
    halo,
    linear,
    merge,
    multistep,
    post_norm,
    prepare,
    prepare8,
    push,
    rows8,
    softmax_weights,
    step_cache,
    weight8,
)
from seqpar.kernels import images as image_kernels
from seqpar.kernels.adaln import Gated, Norm, Summed
from seqpar.kernels.push import Destinations
from seqpar.kernels.rows8 import Rounding
from seqpar.local import sdpa
from seqpar.loop.models import dit, large_dit, uvit
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import JointShard, Shard, Tokens
from seqpar.planner.costs import strategies
from seqpar.planner.plan import load_strategy, load_transport
from seqpar.transports import _contract
from seqpar.types.protocols import Attend
from tests.kernels import test_merge, test_prepare, test_prepare8, test_push, test_steps
from tests.kernels.test_kernels import KERNELS

BF16, FP32 = torch.bfloat16, torch.float32
EIGHT = ((24, 128, "pairs"), (30, 128, "halves"), (56, 128, "some halves"))
WIDTHS = (4096, 1152)  # of Large-DiT-7B and DiT-XL
OF_IMAGES = [name for name, kernel in KERNELS.items() if kernel.of_images and name != "group_norm"]
Launch = Callable[[], object]


class NoDriver:
    """The part of a Triton driver that compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def kernels_of(launch: Launch) -> list[Any]:
    """Return the compiled kernels that `launch` would have started, in order."""
    kernels, run = [], JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(NoDriver())  # pyright: ignore[reportArgumentType]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", compile_only)
        launch()
    return kernels


def facts(kernel: Any) -> dict[str, Any]:
    """Return facts of a kernel: global accesses in the PTX by width in bytes, registers, spills, shared memory.

    release, acquire, acq_rel: the number of atomics at system scope. clocks: how often the kernel reads the time.
    agreed: after how many of these reads all warps take one time from shared memory before they branch. waited, waits:
    how often the machine code and the PTX wait for matrix products; more in the machine code are waits for each one.
    """
    ptx = kernel.asm["ptx"]
    usage = listed(kernel, "-res-usage")
    return {
        "name": kernel.metadata.name,
        "program": kernel.hash,
        "loads": widths(ptx, "ld.global"),
        "stores": widths(ptx, "st.global"),
        "registers": int(usage.split("REG:")[1].split()[0]),
        "spilled": sum(int(usage.split(f"{where}:")[1].split()[0]) for where in ("STACK", "LOCAL")),
        "threads": 32 * kernel.metadata.num_warps,
        "waited": listed(kernel, "-sass").count("WARPGROUP.DEPBAR") if "wgmma" in ptx else 0,
        "waits": ptx.count("wgmma.wait_group"),
        "clocks": ptx.count("%globaltimer"),
        "agreed": len(re.findall(r"%globaltimer;(?:(?!\bbra\b).)*?bar\.sync(?:(?!\bbra\b).)*?ld\.shared", ptx, re.S)),
        **{word: len(re.findall(rf"atom\.global\.sys\.{word}", ptx)) for word in ("release", "acquire", "acq_rel")},
    }


def listed(kernel: Any, what: str) -> str:
    """Return what cuobjdump, which comes with Triton, prints about a kernel: its resources or its instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def widths(ptx: str, operation: str) -> dict[int, int]:
    """Return the number of accesses for each width in bytes."""
    counts: dict[int, int] = {}
    for vector, bits in re.findall(rf"\b{re.escape(operation)}[^\s]*?(?:\.v(\d))?\.[a-z](\d+)\s", ptx):
        size = int(vector or 1) * int(bits) // 8
        counts[size] = counts.get(size, 0) + 1
    return counts


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)  # its values are never read


@cache
def launches() -> dict[str, Launch]:
    """Return launches of every kernel in its tile: every row of the table of tests, and what single kernels do."""
    images = [{"shape": (1, width, 64, 64), "last": last} for width, last in ((96, True), (384, False))]
    norm, index = Norm(), torch.zeros(2, 8, dtype=torch.int32)
    summed = Summed(rows(3, 4096), rows(4096, dtype=FP32))
    return {
        **{f"{name}, {width}": launch for width in WIDTHS for name, launch in of_rows(8, width).items()},
        **{f"{name}, {case['shape'][1]}, {case['last']}": row(name, case) for name in OF_IMAGES for case in images},
        **{f"group_norm, {width}, {last}": group_normed(width, last) for width, last in ((128, True), (512, False))},
        **{f"upsample, {width}, {last}": doubled(width, last) for width, last in ((128, True), (384, False))},
        **{
            f"tokens, {count}, {width}": partial(lambda kernels: [launch() for launch in kernels], kernels)
            for width, count in product(WIDTHS, (7, 16))
            for kernels in [of_rows(count, width).values()]
        },
        "unaligned": partial(
            lambda x, vector: adaln.launch(x, None, vector, vector, norm),
            *(rows(2, 8, 1153)[..., :1152], rows(2, 1152, dtype=FP32)),
        ),
        **{
            f"narrowing, {dtype}": partial(weight8.launch_narrowing, rows(8, 3072, dtype=dtype), *narrow)
            for narrow in [(rows(8, 3072, dtype=rows8.E4M3), rows(8, dtype=FP32))]
            for dtype in (BF16, FP32)
        },
        "indexed": lambda: adaln.launch(
            *(rows(2, 8, 4096), Gated(summed, rows(2, 8, 4096)), summed, summed, norm), index_Bl=index
        ),
        **{f"outboxes, {heads} x {dim}": outboxes(heads, dim) for heads, dim in ((32, 128), (16, 72))},
        **{f"outboxes, {part} alone": outboxes(32, 128, parts=part) for part in "qkv"},
        "outboxes, 96 of 128": outboxes(56, 128, pairs=48),
        "outboxes, rows of images": outboxes(32, 128, rotary=(2,)),
        "outboxes, rows of heads": outboxes(32, 64, rotary=(1, 32)),
        "outboxes, meets": outboxes(32, 128, meets=True),
        **{f"eight, {heads} x {dim}, {rotary}": eight(heads, dim, rotary) for heads, dim, rotary in EIGHT},
        **{f"push, {heads} x {dim}": pushed(heads, dim) for heads, dim in ((8, 128), (4, 72))},
        "push, 4 x 72, heads apart": pushed(4, 72, "heads apart"),
        "push, many": pushed(8, 128, tokens=2048),
        "push, meets": pushed(8, 128, meets=True),
        **{f"halo, {way} {kind}": partial(edges, way, kind) for way in ("send", "take") for kind in ("rows", "planes")},
        **{f"model, {name}": as_on_gpus(name) for name in ("large-dit-7b", "dit-xl/2")},
        "model, unidiffuser-v1": as_on_gpus("unidiffuser-v1"),
        **{kind: partial(step_of, kind) for kind in test_steps.KINDS},
        **{f"multistep, {p} and {q}": partial(multistepped, p, q) for p, q in ((1, 1), (1, 2), (3, 3))},
        **{
            f"change, {dtype}": partial(step_cache.launch_change, *[rows(1, 8, 3072, dtype=dtype)] * 3, sums)
            for sums in [torch.zeros(2, dtype=torch.int64)]
            for dtype in (BF16, FP32)
        },
        **{
            f"extrapolate, {count}": partial(step_cache.launch_extrapolate, x, [x] * count, weights[:count], x)
            for x, weights in [(rows(1, 8, 3072), torch.ones(3, dtype=torch.float64))]
            for count in (1, 2, 3)
        },
        "wide, 512": partial(wide, 4096, 512),
        "wide, 512, uneven": partial(wide, 4001, 512),
        "flags": lambda: flags.launch(four_ranks(), True, True),
    }


def row(name: str, case: dict[str, Any]) -> Launch:
    """Return the launch of a row of the table of tests, with the dtypes and strides that it has there."""
    kernel = KERNELS[name]
    return lambda: kernel.launch(*kernel.inputs(case, BF16))


def of_rows(tokens: int, width: int) -> dict[str, Launch]:
    """Return launches of the kernels of a block on 2 x `tokens` rows; their variants at one width."""
    heads = 16 if width < 2048 else 32
    case = {"batch": 2, "tokens": tokens, "heads": heads, "kv_heads": heads, "dim": width // heads}
    q, k, _ = test_prepare.project(case, BF16)
    how, parts = test_prepare.preparation(case, "layer", "pairs", BF16), {**case}
    del parts["kv_heads"]
    merged = [x.contiguous() for dtype in (FP32, BF16) for x in test_merge.parts(parts, dtype, 1)[0]]
    sizes = {"batch": 2, "tokens": tokens, "width": width, "pad": 0}
    centred, vector = Rounding(rows(width, dtype=FP32)), rows(2, width, dtype=FP32)
    plain, packed = rows(2, tokens, width), rows(2, tokens, 2 * width)
    every = {
        **{name: row(name, sizes) for name, kernel in KERNELS.items() if not kernel.of_images},
        "rows8": lambda: rows8.launch(plain, centred),
        "rows8, gelu": lambda: rows8.launch(plain, centred, "gelu"),
        "rows8, swiglu": lambda: rows8.launch(packed, centred, "swiglu"),
        "rows8, gate last": lambda: rows8.launch(packed, centred, "swiglu, gate last"),
        "rows8, adaln": lambda: adaln.launch(plain, Gated(vector, plain), vector, vector, Norm(), rounding=centred),
        "weight8": lambda: weight8.launch(rows(tokens, width, dtype=rows8.E4M3), rows(tokens, dtype=FP32), BF16),
        "QK-norm + rotary": lambda: prepare.launch(q, k, how),
        "merge": lambda: merge.launch(*merged),
    }
    return {name: launch for name, launch in every.items() if width == max(WIDTHS) or "," not in name}


def outboxes(
    heads: int,
    dim: int,
    meets: bool = False,
    parts: str = "qkv",
    rotary: tuple[int, ...] = (),
    pairs: int | None = None,
) -> Launch:
    """Return QK-norm and rotary into readers' outboxes; meets: the kernel also waits for them.

    rotary: for how many images and then heads there are separate rotary rows. pairs: how many are rotated; None: all.
    """
    case = {"batch": 2, "tokens": 8, "heads": heads, "kv_heads": heads, "dim": dim}
    angles = torch.zeros(*rotary[:1], 8, *rotary[1:], pairs or dim // 2)
    how = replace(test_prepare.preparation(case, "layer", "halves", BF16), cos_lD2=angles, sin_lD2=angles)
    inputs = zip("qkv", test_prepare.project(case, BF16), strict=True)
    q, k, v = (x if name in parts else None for name, x in inputs)
    boxes = test_prepare.boxes(case, BF16)
    return lambda: prepare.launch_into(q, k, v, how, boxes, four_ranks() if meets else None)


def eight(heads: int, dim: int, rotary: str) -> Launch:
    """Return q, k and v in e4m3, of FLUX.1, Z-Image and MiniMax-H3."""
    case = {"batch": 1, "tokens": 16, "heads": heads, "kv_heads": heads, "dim": dim}
    how = test_prepare.preparation(case, "rms per head" if rotary == "pairs" else "rms", rotary, BF16)
    q, k, v = test_prepare.project(case, BF16)
    how = replace(how, eight=test_prepare8.eight(heads, dim, BF16, "cpu"))
    return lambda: prepare8.launch(q, k, v, how)


def pushed(heads: int, dim: int, strides: str = "contiguous", meets: bool = False, tokens: int = 16) -> Launch:
    """Return a push of attention's output to four ranks."""
    case = {"batch": 2, "tokens": tokens, "heads": heads, "dim": dim}
    into, out = Destinations(test_push.views(case, 4, BF16, 3)[0], 1), test_push.output(case, strides, BF16)
    return lambda: push.launch(out, into, four_ranks() if meets else None)


def step_of(kind: str) -> None:
    case = {"images": 1, "tokens": 16, "columns": 16, "outputs": 32}
    ddim.launch(*test_steps.data(case, kind, BF16), *test_steps.counters(1, 3))


def multistepped(states: int, outputs: int) -> None:
    """A step of a traced scheduler; with one state and one output the state is the model's input."""
    case = {"images": 1, "tokens": 16, "columns": 16, "outputs": 32, "P": states, "Q": outputs}
    history, predictions, steps = test_steps.run_of({**case, "seen": int(states + outputs > 2)}, BF16)
    cond, uncond = predictions[0]
    multistep.launch(history, cond, uncond, steps, *test_steps.counters(0, 5))


def edges(way: str, kind: str) -> None:
    """Two edges of an image, as rows of all channels or as a row of each channel's plane."""
    image, dim = (rows(64, 64, 512), 0) if kind == "rows" else (rows(512, 64, 64), 1)
    first, last = torch.empty(2, 2, 1 << 16, dtype=torch.uint8).unbind()
    launch = halo.launch_send if way == "send" else halo.launch_take
    launch((image.narrow(dim, 1, 1), image.narrow(dim, 62, 1)), (first, last), four_ranks())


def wide(keys: int, dim: int) -> None:
    """Attention's weights over two parts of the keys at a wide head, and the combination of the parts."""
    q, k, product, sums = rows(256, dim), rows(keys, dim), torch.empty(2, 256, dim), torch.empty(3, 2, 256)
    into = softmax_weights.SoftmaxWeights(rows(256, 2, 2048).transpose(0, 1), *sums)
    softmax_weights.launch(q, k, into, softmax_weights.Tile())
    softmax_weights.launch_combine(product, sums, q, sums[0, 0])


def four_ranks() -> flags.Flags:
    late = flags.Late.on(torch.device("cpu"), 1.0)
    theirs, mine = torch.zeros(2, 4, dtype=torch.int64)
    return flags.Flags.of(tuple(theirs), mine, late, 0, tuple(range(4)))


def memory(x: Tensor, last: bool) -> Tensor:
    return x if last else x.to(memory_format=torch.channels_last)


def group_normed(channels: int, last: bool) -> Launch:
    x = memory(rows(1, channels, 64, 64), last)
    affine = group_norm.Affine(rows(channels), rows(channels), shift_C=None if last else rows(channels))
    return lambda: group_norm.launch_normalise(x, group_norm.launch_moments(x, 32, affine.shift_C), affine, True)


def doubled(channels: int, last: bool) -> Launch:
    return lambda: image_kernels.launch_double(memory(rows(1, channels, 64, 64), last))


def as_on_gpus(name: str) -> Launch:
    """Return a prediction by some blocks of a model at its real width, on 64 tokens, as on a Hopper GPU."""

    def launch() -> None:
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            for kernel in (activations, adaln, linear, post_norm, prepare):
                patch.setattr(kernel, "fused", lambda *tensors: True)
            (predict_joint if name in uvit.SIZES else predict)(name)

    return launch


def predict(name: str) -> None:
    model = model_of(dit if name in dit.SIZES else large_dit, name, num_layers=1)
    vectors = model.modulate(torch.zeros(2), class_labels=torch.zeros(2, dtype=torch.int64))
    positions = {"image": model.positions(16, 16)}
    model.forward_tokens({"image": torch.zeros(2, 64, 16)}, positions, vectors, attention(Shard(64, 1)))


def predict_joint(name: str) -> None:
    model = model_of(uvit, name, num_layers=2, sample_size=16)
    prompt = {"other_timestep": torch.zeros(2), "data_type": torch.zeros(2, dtype=torch.int64)}
    encoded, lengths = model.encode(**{part: prompt[part] for part in model.PROMPT}), model.config.lengths
    streams = {"text": torch.zeros(2, 77, 64), "clip": torch.zeros(2, 1, 512), "image": torch.zeros(2, 64, 16)}
    attend = attention(JointShard(tuple(Shard(length, 1) for length in lengths.values())))
    table = model.modulate(torch.zeros(2), **encoded.pooled)
    model.forward_tokens({**streams, **encoded.streams}, model.stream_positions((16, 16), lengths), table, attend)


def model_of(file: Any, size: str, **sizes: int) -> Any:
    """Return the model of a published size with others, in bf16; its weights are never read."""
    with torch.device("meta"):
        model = file.Model(replace(file.SIZES[size], **sizes)).to(BF16)
    return model.to_empty(device="cpu")


def attention(tokens: Tokens) -> Attend:
    """Return the attention of one rank, which launches no kernel of ours."""
    build, transport = load_strategy(next(iter(strategies()))).build, load_transport(_contract.names()[0])
    return build(Mesh.single(), tokens, sdpa.attend, transport)


def main() -> None:
    """Compile all launches and print one JSON object: name -> facts."""
    kernels = {name: kernels_of(launch) for name, launch in launches().items()}
    by_hash = {kernel.hash: kernel for each in kernels.values() for kernel in each}  # many launches start one program
    found = {key: facts(kernel) for key, kernel in by_hash.items()}
    print(json.dumps({name: [found[kernel.hash] for kernel in each] for name, each in kernels.items()}))


if __name__ == "__main__":
    main()
