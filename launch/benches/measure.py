"""Measures this machine's rates for the planner and saves them in the user's cache (`seqpar/planner/rates.py`).

    torchrun --nproc_per_node=4 launch/bench.py rates

All processes measure at the same time, because they also compute at the same time; the slowest one counts. It takes a
few seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from itertools import cycle
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F

from launch.benches.timing import graphed, over, timed
from seqpar.kernels.push import push
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.planner import rates
from seqpar.planner.plan import choose_local, load_local
from seqpar.planner.rates import here, ranks_of_a_host
from seqpar.transports import _contract
from seqpar.transports._contract import Transport
from seqpar.transports._exchanges import HeadLayout
from seqpar.types.facts import core

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 72, 128)
CALLS = 20  # calls in one CUDA graph, so that its launch does not count
SECONDS = 0.1  # how long each work is timed
EXCHANGES = 10  # timed exchanges; all ranks must make the same number
PUSHED_DIM = 128


@dataclass(frozen=True)
class Rates:
    """Measure this machine's rates for the planner and save them."""

    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the matrix products and of attention; auto is bf16 on GPUs and fp32 on CPUs."""


@dataclass(frozen=True)
class Sizes:
    """Measured sizes: products (rows, inputs, outputs), attentions (batch, heads, tokens), copied and sent
    bytes."""

    products: tuple[tuple[int, int, int], ...]
    weights: tuple[int, int, int]
    attentions: tuple[tuple[int, int, int], ...]
    copied: int
    sent: tuple[int, ...]


GPU = Sizes(
    products=(*((rows, 4096, 4096) for rows in (128, 512, 2048, 8192)), (8192, 4096, 12288)),
    weights=(128, 4096, 12288),
    attentions=((2, 8, 256), (2, 32, 256), (2, 8, 4096), (2, 8, 16384)),
    copied=1 << 31,
    sent=tuple(kib << 10 for kib in (192, 768, 3 << 10, 12 << 10, 48 << 10, 192 << 10)),
)
CPU = Sizes(
    products=tuple((rows, 256, 256) for rows in (16, 64, 256, 1024)),
    weights=(1, 1024, 4096),
    attentions=((1, 1, 64), (1, 2, 256), (1, 2, 1024)),
    copied=1 << 26,
    sent=(1 << 14, 1 << 18, 1 << 22),
)


def main(args: Rates) -> None:
    mesh = Mesh.from_env()
    dtype = DTYPES.get(args.dtype, default_dtype(mesh.device))
    found = measure(mesh, dtype)
    if mesh.is_main:
        path = rates.save(found, mesh.world.size)
        print(f"{found.device} x {mesh.world.size}, {found.dtype}, kept in {path}")
        print(f"products   {found.gemm[0][1]:.3g} to {found.gemm[-1][1]:.3g} TFLOP/s, weights {found.weights:.3g} TB/s")
        for dim, curve in found.attention.items():
            print(f"attention  {curve[0][1]:.3g} to {curve[-1][1]:.3g} TFLOP/s at head dim {dim}")
        print(f"copies     {found.copy:.3g} TB/s, {found.kernel_us:.3g} us a kernel")
        for name, ((small, least), *_, (big, most)) in found.exchange.items():
            print(f"{name:<10} {least:.0f} us for {small:.3g} bytes, {most:.0f} us for {big:.3g}")


def measure(mesh: Mesh, dtype: torch.dtype) -> rates.Rates:
    device, sizes = mesh.device, GPU if mesh.device.type == "cuda" else CPU
    machine = here(device, mesh.world.size, "auto", ranks_of_a_host(mesh))

    def us(work: Callable[[], object]) -> float:
        return max(mesh.collect(time_us(work, device), float))

    _, inputs, outputs = sizes.weights
    return rates.Rates(
        device=machine.device,
        dtype=str(dtype).removeprefix("torch."),
        source=f"measured here on {date.today()}",
        gemm=tuple((m * n, 2e-6 * m * k * n / us(product(m, k, n, dtype, device))) for m, k, n in sizes.products),
        weights=1e-6 * inputs * outputs * dtype.itemsize / us(product(*sizes.weights, dtype, device)),
        attention={
            dim: tuple(attention(us, *shape, dim, dtype, device) for shape in sizes.attentions) for dim in HEAD_DIMS
        },
        copy=2e-6 * sizes.copied / us(copying(sizes.copied, device)),
        kernel_us=us(copying(16, device)),
        exchange=exchanges(mesh, machine.host, sizes.sent) if mesh.world.size > 1 else {},
        memory=machine.memory,
        host=machine.host,
    )


def product(rows: int, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    count = over(inputs * outputs * dtype.itemsize) if device.type == "cuda" else 1
    x, *weights = (torch.randn(n, inputs, device=device).to(dtype) for n in (rows, *[outputs] * count))
    turns = cycle(weights)
    return lambda: F.linear(x, next(turns))


def attention(
    us: Callable[[Callable[[], object]], float],
    batch: int,
    heads: int,
    tokens: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, float]:
    attend = load_local(choose_local("auto", device, dtype, dim).name)
    q, k, v = (torch.randn(batch, tokens, heads, dim, device=device).to(dtype) for _ in range(3))
    flops = core(batch, tokens, tokens, heads, dim).flops
    return flops, 1e-6 * flops / us(lambda: attend(q, k, v))


def copying(size: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def exchanges(mesh: Mesh, host: int | None, sent: tuple[int, ...]) -> dict[str, rates.Curve]:
    """The curve of each transport that works between all ranks: bytes that leave each rank -> us.

    host: as of `Rates`. On several hosts the one that works is measured between all of them, and within each.
    """
    if host is not None:
        (across,) = exchanges(mesh, None, sent).values()
        inner = Mesh.from_env(data=mesh.world.size // host, cfg=1, device=mesh.device)
        own = replace(mesh, world=inner.sequence)
        return {rates.BETWEEN: across, **(exchanges(own, None, sent) if host > 1 else {})}
    found = {}
    for name in _contract.names():
        module = _contract.load(name)
        reason = module.why_not_tried(mesh.world, mesh.device)
        if reason is None:
            found[module.FACTS.rates[mesh.device.type]] = curve(mesh, module, sent)
        elif mesh.is_main:
            print(f"transport {name} is not measured: {reason}")
    return found


def curve(mesh: Mesh, module: ModuleType, sent: tuple[int, ...]) -> rates.Curve:
    others, points = mesh.world.size - 1, []
    transport: Transport = module.Transport()
    for size in sent:
        if module.FACTS.bare is None:
            tokens = max(1, size // others // (PUSHED_DIM * 2))
            each, work = tokens * PUSHED_DIM * 2, push_back(transport, mesh, tokens)
        else:
            each = -(-size // others)
            work = module.FACTS.bare(mesh.world, each, mesh.device)
        points.append((each * others, max(mesh.collect(time_us(work, mesh.device, EXCHANGES), float))))
    transport.check()
    transport.release()
    return tuple(points)


def push_back(transport: Transport, mesh: Mesh, tokens: int) -> Callable[[], object]:
    """The move of attention's output back to its tokens' ranks: `tokens` bf16 rows of one head to each rank."""
    world = mesh.world.size
    layout = HeadLayout(1, (tokens,) * world, world, world, PUSHED_DIM, torch.bfloat16, mesh.device)
    _, back = transport._heads(mesh.world, layout)  # no turn check: this direction is used alone
    out = torch.ones(1, tokens * world, 1, PUSHED_DIM, dtype=torch.bfloat16, device=mesh.device)
    return lambda: back.deliver(push(out, back.outboxes(), back.flags))


def time_us(work: Callable[[], object], device: torch.device, repeat: int | None = None) -> float:
    """us of one call, in a CUDA graph on a GPU.

    It runs for `SECONDS`, or `repeat` times if all ranks must make the same number of calls.
    """
    if device.type == "cuda":
        replay = graphed(lambda: [work() for _ in range(CALLS)])
        once = timed(replay, 1)
        return 1e3 / CALLS * timed(replay, repeat or max(3, int(1e3 * SECONDS / once)))
    times, start = [], time.perf_counter()
    work()
    while len(times) < (repeat or 3) or (repeat is None and time.perf_counter() - start < SECONDS):
        begin = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)
