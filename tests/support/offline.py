"""Compiles our Triton kernels for an H100 or H200 on a machine without a GPU, and reports facts about the machine code.

A launch runs as in a model, on CPU tensors, up to the point where the kernel would start; kernels are therefore
specialised on the real alignments, strides and missing tensors. `TRITON_INTERPRET` must not be set, so
`tests/kernels/test_compiles.py` starts this module as a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from seqpar.kernels import (
    adaln,
    channel_norm,
    ddim,
    flags,
    gelu,
    group_norm,
    halo,
    multistep,
    post_norm,
    prepare,
    push,
    residual,
    sigmoid_gate,
    softmax_weights,
    swiglu,
    upsample,
)
from seqpar.kernels.adaln import Norm
from seqpar.kernels.push import Destinations
from seqpar.local import sdpa
from seqpar.loop.models import dit, large_dit, uvit
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.shard import JointShard, Shard, Tokens
from seqpar.planner.costs import strategies
from seqpar.planner.plan import load_strategy, load_transport
from seqpar.transports import _folder
from seqpar.types.outboxes import Outbox, Outboxes
from seqpar.types.protocols import Attend, Prepare
from tests.support.kernel_cases import cases

BF16 = torch.bfloat16
HOPPER = GPUTarget("cuda", 90, 32)


class NoDriver:
    """The part of a Triton driver that compiling needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


def kernels_of(launch: Callable[[], object]) -> list[Any]:
    """Return the compiled kernels that `launch` would have started, in order."""
    found, run = [], JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(NoDriver())  # pyright: ignore[reportArgumentType]
    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


def facts(kernel: Any) -> dict[str, Any]:
    """Return facts of a kernel: global accesses in the PTX by width in bytes, registers, spills, shared memory.

    release, acquire, acq_rel: the number of atomics at system scope. clocks: how often the kernel reads the time.
    agreed: after how many of these reads all warps take one time from shared memory before they branch. waited, waits:
    how often the machine code and the PTX wait for matrix products; more in the machine code are waits for each one.
    """
    ptx = kernel.asm["ptx"]
    flags_of = {word: len(re.findall(rf"atom\.global\.sys\.{word}", ptx)) for word in ("release", "acquire", "acq_rel")}
    told = listed(kernel, "-res-usage")
    products = "wgmma" in ptx
    return {
        "name": kernel.metadata.name,
        "program": kernel.hash,
        "loads": widths(ptx, "ld.global"),
        "stores": widths(ptx, "st.global"),
        "registers": int(told.split("REG:")[1].split()[0]),
        "spilled": sum(int(told.split(f"{where}:")[1].split()[0]) for where in ("STACK", "LOCAL")),
        "threads": 32 * kernel.metadata.num_warps,
        "shared": kernel.metadata.shared,
        "waited": listed(kernel, "-sass").count("WARPGROUP.DEPBAR") if products else 0,
        "waits": ptx.count("wgmma.wait_group"),
        "clocks": ptx.count("%globaltimer"),
        "agreed": len(re.findall(r"%globaltimer;(?:(?!\bbra\b).)*?bar\.sync(?:(?!\bbra\b).)*?ld\.shared", ptx, re.S)),
        **flags_of,
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


def launches() -> dict[str, Callable[[], object]]:
    """Return a launch of every kernel in its tile, at the widths of the 7B and DiT-XL/2."""
    made: dict[str, Callable[[], object]] = {}
    for width in (4096, 1152):
        for case in cases(16, width):
            made[f"{case.name}, {width}"] = partial(lambda case: case.module.launch(*case.data()), case)
        made |= {f"tokens, {count}, {width}": all_cases(2 * count, width) for count in (7, 16)}
        made[f"unaligned, {width}"] = unaligned(width)
        made[f"indexed, {width}"] = indexed(width)
    made["branch norm, 3840"] = normed_branch(3840)
    made["sigmoid gate, 6144"] = lambda: sigmoid_gate.launch(rows(2, 8, 6144), rows(2, 8, 6144))
    made |= {f"outboxes, {heads} x {dim}": outboxes(heads, dim) for heads, dim in ((32, 128), (32, 96), (16, 72))}
    made |= {f"push, {heads} x {dim}": pushed(heads, dim) for heads, dim in ((8, 128), (4, 72))}
    made |= {"push, 4 x 72, heads apart": pushed(4, 72, apart=True), "push, many": pushed(8, 128, tokens=2048)}
    made |= {f"outboxes, {part} alone": outboxes(32, 128, parts=part) for part in "qkv"}
    made["outboxes, rows of pictures"] = outboxes(32, 128, own=(2,))
    made["outboxes, rows of heads"] = outboxes(32, 64, own=(1, 32))
    made |= {"outboxes, meets": outboxes(32, 128, meets=True), "push, meets": pushed(8, 128, meets=True)}
    made |= {f"halo, {way} {kind}": edges(way, kind) for way in ("send", "take") for kind in ("rows", "planes")}
    made |= {f"model, {name}": modelled(name) for name in ("large-dit-7b", "large-dit-3b", "dit-xl/2")}
    made["model, unidiffuser-v1"] = joint("unidiffuser-v1")
    made |= {f"group_norm, {width}, {last}": normalised(width, last) for width in (128, 512) for last in (True, False)}
    made |= {
        f"channel_norm, {width}, {last}": of_channels(width, last) for width in (96, 384) for last in (True, False)
    }
    made |= {f"residual, {width}": summed(width) for width in (128, 384)}
    made |= {f"upsample, {width}, {last}": doubled(width, last) for width in (128, 384) for last in (True, False)}
    made |= {f"multistep, {p} and {q}": multistepped(p, q) for p, q in ((1, 1), (1, 2), (2, 2), (3, 3))}
    made |= {"wide, 512": wide(4096, 512), "wide, 512, uneven": wide(4001, 512)}
    return made | {"ddim": update, "ddim, learned": learned, "flags": lambda: flags.launch(four_ranks(), True, True)}


def all_cases(rows: int, width: int) -> Callable[[], object]:
    """Return launches of all elementwise kernels of a block at a number of rows."""
    return lambda: [case.module.launch(*case.data()) for case in cases(rows, width)]


def unaligned(width: int) -> Callable[[], object]:
    """Return a launch on rows that do not start at multiples of 16 bytes."""
    shift, scale = torch.zeros(2, 2, width).unbind(1)
    return lambda: adaln.launch(rows(2, 8, width + 1)[..., :width], None, shift, scale, Norm())


def indexed(width: int) -> Callable[[], object]:
    """Return a launch on tokens whose gate, shift and scale are rows of a table plus a row that all share."""
    gate, shift, scale = (adaln.Summed(rows(3, width), torch.zeros(width)) for _ in range(3))
    gated, index = adaln.Gated(gate, rows(2, 8, width)), torch.zeros(2, 8, dtype=torch.int32)
    return lambda: adaln.launch(rows(2, 8, width), gated, shift, scale, Norm(), index_Bl=index)


def normed_branch(width: int) -> Callable[[], object]:
    """Return a launch on a branch with a norm of its own, as Z-Image's blocks have it."""
    gate, shift, scale = torch.zeros(3, 2, width).unbind()
    gated = adaln.Gated(gate, rows(2, 8, width), adaln.BranchNorm(rows(width), 1e-5))
    return lambda: adaln.launch(rows(2, 8, width), gated, shift, scale, Norm("rms", 1e-5, rows(width)))


def outboxes(
    heads: int, dim: int, meets: bool = False, parts: str = "qkv", own: tuple[int, ...] = ()
) -> Callable[[], object]:
    """Return a launch of QK-norm and rotary into two readers' outboxes; meets: the kernel also waits for them.

    own: how many pictures have rotary rows of their own, or none; then how many heads.
    """
    q, k, v = rows(2, 8, 3, heads, dim).unbind(2)
    halves = slice(0, heads // 2), slice(heads // 2, heads)
    views = [rows(8, 2, 3, heads // 2, dim).unbind(2) for _ in halves]
    boxes = Outboxes(Outbox(q, k, v, half, half) for (q, k, v), half in zip(views, halves, strict=True))
    angles = torch.zeros(*own[:1], 8, *own[1:], dim // 2)
    weight, bias, k_weight, k_bias = (rows(heads * dim) for _ in range(4))
    how = Prepare("layer", False, 1e-5, weight, bias, k_weight, k_bias, angles, angles)
    q, k, v = (x if name in parts else None for name, x in zip("qkv", (q, k, v), strict=True))
    return lambda: prepare.launch_into(q, k, v, how, boxes, four_ranks() if meets else None)


def pushed(heads: int, dim: int, meets: bool = False, apart: bool = False, tokens: int = 16) -> Callable[[], object]:
    """Return a launch that pushes attention's output to four ranks; apart: each head's tokens lie together."""
    into = Destinations([rows(2, tokens // 4, 4 * heads, dim)[:, :, :heads].transpose(0, 1) for _ in range(4)], 1)
    out = rows(2, heads, tokens, dim).transpose(1, 2) if apart else rows(2, tokens, heads, dim)
    return lambda: push.launch(out, into, four_ranks() if meets else None)


def edges(way: str, kind: str) -> Callable[[], object]:
    """Return a launch that moves two edges of an image, as rows of all channels or as a row of each channel's plane."""
    image, dim = (rows(64, 64, 512), 0) if kind == "rows" else (rows(512, 64, 64), 1)
    boxes = torch.empty(2, 2, 1 << 16, dtype=torch.uint8).unbind()
    launch = halo.launch_send if way == "send" else halo.launch_take
    return lambda: launch((image.narrow(dim, 1, 1), image.narrow(dim, 62, 1)), (boxes[0], boxes[1]), four_ranks())


def wide(keys: int, dim: int) -> Callable[[], object]:
    """Return a launch of attention's weights over two parts of the keys at a wide head, and of what combines parts."""
    q, k, product, sums = rows(256, dim), rows(keys, dim), torch.empty(2, 256, dim), torch.empty(3, 2, 256)
    into = softmax_weights.SoftmaxWeights(rows(256, 2, 2048).transpose(0, 1), *sums)

    def launch() -> None:
        softmax_weights.launch(q, k, into, softmax_weights.Tile())
        softmax_weights.launch_combine(product, sums, q, sums[0, 0])

    return launch


def four_ranks() -> flags.Flags:
    """Return the flags by which four ranks signal each other and wait."""
    late = flags.Late.on(torch.device("cpu"), 1.0)
    theirs, mine = torch.zeros(2, 4, dtype=torch.int64)
    return flags.Flags.of(tuple(theirs), mine, late, 0, tuple(range(4)))


def modelled(name: str) -> Callable[[], object]:
    """Return a prediction by one block of a model at its real width, on 64 tokens with the real strides."""

    def launch() -> None:
        model = empty(dit if name in dit.PRESETS else large_dit, name, num_layers=1)
        rows = model.modulate(torch.zeros(2), class_labels=torch.zeros(2, dtype=torch.int64))
        positions = {"image": model.positions(16, 16)}
        model.forward_tokens({"image": torch.zeros(2, 64, 16)}, positions, rows, attention(Shard(64, 1)))

    return lambda: as_on_gpus(launch)


def joint(name: str) -> Callable[[], object]:
    """Return a prediction by three blocks of a U-ViT at its real width, on an image of 64 tokens."""

    def launch() -> None:
        model = empty(uvit, name, num_layers=2, sample_size=16)
        prompt = {"other_timestep": torch.zeros(2), "data_type": torch.zeros(2, dtype=torch.int64)}
        encoded, lengths = model.encode(**{part: prompt[part] for part in model.PROMPT}), model.config.lengths
        streams = {"text": torch.zeros(2, 77, 64), "clip": torch.zeros(2, 1, 512), "image": torch.zeros(2, 64, 16)}
        attend = attention(JointShard(tuple(Shard(length, 1) for length in lengths.values())))
        table = model.modulate(torch.zeros(2), **encoded.pooled)
        model.forward_tokens({**streams, **encoded.streams}, model.stream_positions((16, 16), lengths), table, attend)

    return lambda: as_on_gpus(launch)


def empty(file: Any, preset: str, **sizes: int) -> Any:
    """Return a preset's model with other sizes, in bf16; its weights are never read."""
    with torch.device("meta"):
        model = file.Model(replace(file.PRESETS[preset], **sizes)).to(BF16)
    return model.to_empty(device="cpu")


def attention(tokens: Tokens) -> Attend:
    """Return the attention of one rank, which launches no kernel of ours."""
    build, transport = load_strategy(next(iter(strategies()))).build, load_transport(_folder.names()[0])
    return build(Mesh.single(), tokens, sdpa.attend, transport)


def as_on_gpus(launch: Callable[[], None]) -> None:
    """Run a model on CPU tensors with the choices that it makes on a Hopper GPU."""
    kernels: Any = (adaln, gelu, post_norm, prepare, sigmoid_gate, swiglu)
    kept, capability = [kernel.fused for kernel in kernels], torch.cuda.get_device_capability
    try:
        torch.cuda.get_device_capability = lambda device: (9, 0)
        for kernel in kernels:
            kernel.fused = lambda *given: True
        with torch.inference_mode():
            launch()
    finally:
        torch.cuda.get_device_capability = capability
        for kernel, fused in zip(kernels, kept, strict=True):
            kernel.fused = fused


def normalised(channels: int, last: bool) -> Callable[[], object]:
    """Return a GroupNorm of a picture, in contiguous or channels-last memory, into rows between a halo."""

    def launch() -> None:
        layout = torch.contiguous_format if last else torch.channels_last
        x, wide = (rows(1, channels, high, 64).to(memory_format=layout) for high in (64, 66))
        shift = None if last else rows(channels)
        found = group_norm.launch_moments(x, 32, shift)
        affine = group_norm.Affine(rows(channels), rows(channels), shift_C=shift)
        group_norm.launch_normalise(x, found, affine, True, wide[:, :, 1:-1])

    return launch


def of_channels(channels: int, last: bool) -> Callable[[], object]:
    """Return an RMSNorm over channels of two frames with SiLU, in contiguous or channels-last memory."""
    layout = torch.contiguous_format if last else torch.channels_last_3d
    x = rows(1, channels, 2, 64, 64).to(memory_format=layout)
    return lambda: channel_norm.launch(x, rows(channels), None, True)


def summed(channels: int) -> Callable[[], object]:
    """Return a sum of two pictures and their biases in channels-last memory."""
    x, y = (rows(1, channels, 64, 64).to(memory_format=torch.channels_last) for _ in range(2))
    return lambda: residual.launch((x, rows(channels)), (y, rows(channels)))


def doubled(channels: int, last: bool) -> Callable[[], object]:
    """Return an upsampling of a picture, in contiguous or channels-last memory."""
    x = rows(1, channels, 64, 64).to(memory_format=torch.contiguous_format if last else torch.channels_last)
    return lambda: upsample.launch(x)


def update() -> None:
    """Launch a DDIM step."""
    step, outputs = torch.zeros((), dtype=torch.int64), rows(1, 16, 32)
    how = ddim.Update(torch.zeros(25, 8), torch.zeros(25))
    ddim.launch(torch.zeros(1, 16, 16), outputs, outputs, how, step, step.clone())


def learned() -> None:
    """Launch a DDPM step with the model's variances."""
    step, outputs = torch.zeros((), dtype=torch.int64), rows(1, 16, 32)
    table, noise = torch.zeros(250, 7, dtype=torch.float64), torch.zeros(250, 1, 16, 16)
    how = ddim.Update(table, torch.zeros(250), 12, noise, step.clone(), learned=True)
    ddim.launch(torch.zeros(1, 16, 16), outputs, outputs, how, step, step.clone())


def multistepped(states: int, outputs: int) -> Callable[[], object]:
    """Return a step of a traced scheduler with noise; with one state and one output the state is the model's input."""
    step, predicted = torch.zeros((), dtype=torch.int64), rows(1, 16, 32)
    past = torch.zeros(outputs - 1, 1, 16, 16) if outputs > 1 else None
    seen = torch.zeros(1, 16, 16) if states + outputs > 2 else None
    dtype = torch.float32 if seen is None else torch.float64
    history = multistep.History(torch.zeros(states, 1, 16, 16, dtype=dtype), past, seen)
    noise = torch.zeros(25, 1, 16, 16)
    steps = multistep.Steps(torch.zeros(25, 1 + states + outputs, dtype=torch.float64), torch.zeros(25), None, noise)
    return lambda: multistep.launch(history, predicted, predicted, steps, step, step.clone())


def rows(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)  # its values are never read


def main() -> None:
    """Compile all launches and print one JSON object: name -> facts."""
    print(json.dumps({name: [facts(kernel) for kernel in kernels_of(launch)] for name, launch in launches().items()}))


if __name__ == "__main__":
    main()
