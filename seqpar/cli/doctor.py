"""`seqpar doctor`: this machine's GPUs, links and versions, what will be used and why, and what is missing.

Exit codes: 0, also without GPUs; 1 if something is missing without which nothing runs. Imports torch only after it is
known to be installed.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from seqpar import __version__

if TYPE_CHECKING:
    import torch

    from seqpar.mesh.mesh import Mesh

MEGABYTES = 64  # from each GPU to each other one
CALLS = 10  # of what is timed
PRODUCT = (8192, 4096, 4096)  # rows, inputs, outputs; a quarter of each on a CPU
HEAD_DIMS = (64, 128)
VERSIONS = ("torch", "triton", "diffusers", "transformers")
OPTIONAL = {"flash-attn-4": "flash-attn", "fa3-fwd": "fa3", "quack-kernels": "quack"}
# extra -> what it is for, and whether only Hopper can use it
EXTRAS = {
    "serve": ("seqpar serve", False),
    "flash": ("the fastest attention and GEMMs on H100 and H200", True),
    "fp8": ("attention in 8 bits on H100 and H200", True),
}
Row = tuple[str, str]


def main() -> int:
    """Print the report, or in a rank of it time the exchange; return the exit code."""
    if "RANK" in os.environ:
        from seqpar.cli.exits import guarded

        guarded(_exchange)
        return 0
    _say([("seqpar", f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")])
    _say(_versions())
    if importlib.util.find_spec("torch") is None:
        _say([("missing", "torch, without which nothing runs: install seqpar again (docs/install.md)")])
        return 1
    required = unmet()
    device, gpus, faults = _gpus()
    _say(gpus)
    _say(_used(device))
    _say([("product", _product(device))])
    ended = _start_exchange()
    missing = [*faults, *([_install(required, "required")] if required else [])]
    for extra, (purpose, hopper) in EXTRAS.items():
        if (needed := unmet(extra)) and (not hopper or _is_hopper(device)):
            missing.append(_install(needed, purpose, extra))
    _say([("missing", text) for text in missing] or [("missing", "nothing")])
    return 1 if required or ended else 0


def unmet(extra: str | None = None) -> list[str]:
    """Return the requirements of seqpar, or of one of its extras, that are not installed in a version that fits."""
    from packaging.requirements import Requirement

    found = []
    for line in (metadata.requires("seqpar") or ()) if _version("seqpar") else ():  # none in a clone on PYTHONPATH
        needed = Requirement(line)
        marker = needed.marker
        base = marker is None or marker.evaluate({"extra": ""})
        if base if extra else not base:
            continue
        if extra is not None and marker is not None and not marker.evaluate({"extra": extra}):
            continue
        installed = _version(needed.name)
        if installed is None or not needed.specifier.contains(installed, prereleases=True):
            found.append(f"{needed.name}{needed.specifier}")
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> list[Row]:
    known = [f"{name} {_version(name) or 'missing'}" for name in VERSIONS]
    return [
        ("versions", ", ".join(known)),
        ("optional", ", ".join(f"{shown} {_version(name) or 'not installed'}" for name, shown in OPTIONAL.items())),
    ]


def _install(needed: Sequence[str], why: str, extra: str = "") -> str:
    """Return the names of what is needed, and the command that installs it or the extra that has it."""
    names = ", ".join(re.split("[^A-Za-z0-9._-]", word)[0] for word in needed)
    words = (f"'{word}'" if re.search(r"[<>;!]", word) else word for word in needed)
    what = f"-e '.[{extra}]' in a clone" if extra else " ".join(words)
    return f"{names} ({why}): pip install {what}"


# Hardware --------------------------------------------------------------------------------------------------------


def _gpus() -> tuple[torch.device, list[Row], list[str]]:
    """Return the device that runs, rows about GPUs, and what keeps torch from GPUs that the driver has."""
    import torch

    smi = _smi()
    driver = re.search(r"Driver Version: *([\d.]+).*?CUDA (?:UMD )?Version: *([\d.]+)", smi, re.DOTALL)
    with warnings.catch_warnings(record=True) as said:  # why CUDA did not start
        warnings.simplefilter("always")
        is_there = torch.cuda.is_available()
    if not is_there:
        rows, faults = [("GPUs", "none: images are computed on the CPU, which only suits tests")], []
        if driver and torch.version.cuda is None:
            faults = [
                f"CUDA in torch {torch.__version__}, for the GPUs of this machine: pip install --force-reinstall torch"
            ]
        elif driver:
            why = str(said[0].message).splitlines()[0] if said else "CUDA_VISIBLE_DEVICES may hide them"
            faults = [f"the GPUs: driver {driver[1]} runs CUDA {driver[2]}, torch has {torch.version.cuda}; {why}"]
        return torch.device("cpu"), rows, faults
    count = torch.cuda.device_count()
    parts = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = [f"{part.name} ({part.major}.{part.minor}, {part.total_memory / 2**30:.0f} GiB)" for part in parts]
    rows = [("GPUs", ", ".join(f"{len(list(run))} x {kind}" for kind, run in groupby(kinds)))]
    versions = f"{driver[1]}, for CUDA {driver[2]}" if driver else "unknown: nvidia-smi is missing"
    rows.append(("driver", f"{versions}; torch has CUDA {torch.version.cuda}"))
    return torch.device("cuda", 0), [*rows, *([("links", _links(count))] if count > 1 else [])], []


def _smi(*words: str) -> str:
    """Return what nvidia-smi prints; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    return subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False).stdout


def _links(count: int) -> str:
    """Return how pairs of GPUs are connected, such as "NV18 with peer access": pairs with the same link together."""
    import torch

    topology = {}
    for line in re.sub(r"\x1b\[[\d;]*m", "", _smi("topo", "-m")).splitlines():
        if row := re.match(r"GPU(\d+)\s+(.*)", line):
            topology[int(row[1])] = row[2].split()
    whole = "CUDA_VISIBLE_DEVICES" not in os.environ  # torch then counts as nvidia-smi does
    found = dict[str, list[str]]()
    for a in range(count):
        for b in range(a + 1, count):
            both = torch.cuda.can_device_access_peer(a, b) and torch.cuda.can_device_access_peer(b, a)
            link = topology.get(a, [])[b : b + 1] if whole else []
            text = " ".join([*link, "with peer access" if both else "without peer access"])
            found.setdefault(text, []).append(f"{a}-{b}")
    if len(found) == 1:
        return f"{next(iter(found))} between all GPUs"
    return "; ".join(f"{text} ({', '.join(pairs)})" for text, pairs in found.items())


def _is_hopper(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


# What will be used -----------------------------------------------------------------------------------------------


def _used(device: torch.device) -> list[Row]:
    import torch

    from seqpar.kernels import _quack
    from seqpar.mesh.mesh import default_dtype
    from seqpar.planner.plan import choose_local

    dtype = default_dtype(device)
    if device.type != "cuda":
        kernels = "plain torch: Triton kernels need a GPU"
    else:
        quack = _quack.why_not()
        kernels = f"Triton; GEMMs with activations by {'quack' if quack is None else f'torch ({quack})'}"
    if device.type == "cuda":
        eight = torch.cuda.get_device_capability(device) >= (8, 9)
        kernels += f"; --precision fp8 {'works' if eight else 'needs compute capability 8.9'}"
    rows = [("dtype", str(dtype).removeprefix("torch.")), ("kernels", kernels)]
    chosen = {choice.name: choice for dim in HEAD_DIMS for choice in [choose_local("auto", device, dtype, dim)]}
    return [*rows, *(("attention", str(choice)) for choice in chosen.values())]


def _product(device: torch.device) -> str:
    import torch

    from seqpar.mesh.mesh import default_dtype

    dtype = default_dtype(device)
    m, k, n = PRODUCT if device.type == "cuda" else (size // 4 for size in PRODUCT)
    x, weight = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    ms = _ms(lambda: torch.nn.functional.linear(x, weight), device)
    return f"{m} x {k} by {k} x {n} in {ms:.3g} ms, {2e-9 * m * k * n / ms:.3g} TFLOP/s"


def _ms(work: Callable[[], Any], device: torch.device) -> float:
    """Return the ms of one call: the mean of `CALLS` after three that warm up."""
    import torch

    def done() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        work()
    done()
    start = time.perf_counter()
    for _ in range(CALLS):
        work()
    done()
    return 1e3 * (time.perf_counter() - start) / CALLS


# The exchange ----------------------------------------------------------------------------------------------------


def _start_exchange() -> int:
    """Time an exchange on all GPUs, in a process of each, which print it; return the exit code."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        _say([("transport", "none: one process runs" if count else "collective by gloo, between processes (--ranks)")])
        return 0
    from seqpar.cli.ranks import start

    try:
        start(["doctor"], count)
    except SystemExit as stop:  # it has printed the reason
        return int(stop.code or 0)
    return 0


def _exchange(rank: int) -> None:
    from seqpar.mesh.mesh import Mesh

    rows = exchanged(Mesh.joined())
    if rank == 0:
        _say(rows)


def exchanged(ranks: Mesh, megabytes: int = MEGABYTES) -> list[Row]:
    """Return the transport between these ranks, and how long an exchange takes by it. Collective."""
    import torch

    from seqpar.planner.plan import transport_between
    from seqpar.transports import _contract

    choice = transport_between(ranks.world, ranks.device)
    transport = _contract.load(choice.name).Transport()
    like = torch.empty(0, device=ranks.device)
    gather = transport.gather(ranks.world, (1,) * ranks.world.size, (megabytes * 250_000,), like)

    def work() -> None:
        gather.outbox()
        gather.deliver()

    ms = max(ranks.collect(_ms(work, ranks.device), float))
    transport.check()
    transport.release()
    received = megabytes * (ranks.world.size - 1)
    text = f"{megabytes} MB from each GPU to {ranks.world.size - 1} other(s) in {ms:.3g} ms, {received / ms:.3g} GB/s"
    return [("transport", str(choice)), ("exchange", text)]


def _say(rows: Sequence[Row]) -> None:
    for title, text in rows:
        print(f"{title:<9} {text}", flush=True)
