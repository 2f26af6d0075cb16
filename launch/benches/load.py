"""Seconds and host memory of loading a checkpoint of 7 B parameters on N ranks, beside diffusers' `from_pretrained`.

    python launch/bench.py load --gpus 4 --out load.jsonl

It writes a checkpoint of random weights in diffusers' DiT format (fp32, 29 GB by default, in `--folder`), and starts N
ranks for each contender, one contender after the other: `seqpar` (one rank of the host reads each tensor), `diffusers`
(`from_pretrained`, then `.to(device)`) and `diffusers direct` (`from_pretrained(device_map=...)`), on every rank. All
load the same file as bfloat16 onto the rank's device. The clock runs from a barrier after imports, device and process
group to a barrier after the last copy. Host memory is the high-water mark of resident memory, summed over all ranks,
less what was resident before; mapped pages of the file count on every rank that touched them.

Each rank prints when a phase ends, and every few seconds what it has fetched from the disk. A contender that exceeds
`--limit-s` is stopped, prints where each of its threads stood, and has a line with the reason instead of seconds.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launch.benches.progress import Clock, disk, status
from launch.benches.timing import append, command, environment

ROOT = Path(__file__).parents[2]
WAYS = ("seqpar", "diffusers direct", "diffusers")
FILE = "diffusion_pytorch_model.safetensors"
GRACE_S = 15  # beyond the limit, for the interpreter's start and for printing where the threads stand
SAMPLES = 256  # of the file's pages, asked whether they are in the page cache


@dataclass(frozen=True)
class Load:
    """Time loading a checkpoint on N ranks, and measure the host memory that it takes."""

    gpus: int = 1
    """Ranks; on a machine without GPUs they load onto the CPU."""
    width: int = 4096
    """Width of the model, of heads of 128."""
    layers: int = 22
    """Number of blocks: 22 of width 4096 are 7.2 B parameters."""
    ways: tuple[str, ...] = WAYS
    """Contenders, in this order."""
    limit_s: float = 60
    """Seconds after which a contender is stopped, imports included."""
    cold: bool = False
    """Drop the file from the page cache before each contender; otherwise it was just written."""
    folder: Path | None = None
    """Where the checkpoint is written; the temporary folder by default."""
    out: Path | None = None
    """Append JSON lines here."""


def main(args: Load) -> None:
    """Write the checkpoint, run all contenders, print the table, append the lines."""
    if args.gpus < 1 or args.layers < 1 or args.width < 128 or args.width % 128:
        raise ValueError(f"got {args.gpus} ranks, {args.layers} layers, width {args.width}, expected 1, 1, 128 or more")
    if args.limit_s <= 0:
        raise ValueError(f"got --limit-s {args.limit_s:g}, expected more than 0")
    if odd := [way for way in args.ways if way not in WAYS]:
        raise ValueError(f"got --ways {odd[0]}, expected some of {', '.join(WAYS)}")
    with TemporaryDirectory(dir=args.folder) as name:
        started = time.perf_counter()
        size = write(Path(name), args.width, args.layers)
        print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - started:.1f} s", flush=True)
        lines = []
        for way in args.ways:
            lines.append(measured(args, way, Path(name), size))
            append(lines[-1:], args.out)  # at once: what follows may be stopped from outside
    print(table(lines), flush=True)


def config(width: int, layers: int) -> dict[str, Any]:
    """The config.json of a DiT of diffusers."""
    heads = {"num_attention_heads": width // 128, "attention_head_dim": 128, "num_layers": layers}
    rest = {"in_channels": 4, "out_channels": 8, "sample_size": 32, "patch_size": 2, "num_embeds_ada_norm": 1000}
    return {"_class_name": "DiTTransformer2DModel", **heads, **rest}


def write(folder: Path, width: int, layers: int) -> int:
    """Write config.json and a safetensors file in fp32, tensor by tensor; return its bytes.

    Tensors of one shape have the same random numbers, so that the copies of the embedders are equal, as they must be.
    """
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    told = config(width, layers)
    (folder / "config.json").write_text(json.dumps(told))
    with torch.device("meta"):
        model: Any = DiTTransformer2DModel.from_config(told)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    header, end = {}, 0
    for key, shape in shapes.items():
        header[key] = {"dtype": "F32", "shape": [*shape], "data_offsets": [end, end + 4 * shape.numel()]}
        end += 4 * shape.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / FILE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for numbers in blocks(shapes.values()):
            numbers.tofile(file)
    return end


def blocks(shapes: Iterable[torch.Size]) -> Iterator[np.ndarray]:
    """Random numbers of these shapes; equal shapes have equal numbers."""
    made: dict[torch.Size, Tensor] = {}
    for shape in shapes:
        if shape not in made:
            made[shape] = torch.randn(shape, generator=torch.Generator().manual_seed(len(made))) * 0.02
        yield made[shape].numpy()


def measured(args: Load, way: str, folder: Path, size: int) -> dict[str, Any]:
    """The JSON line of a contender: seconds of the slowest rank, host memory of all ranks."""
    if args.cold:
        with open(folder / FILE, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    print(f"{way}: {cached(folder / FILE):.0%} of the file is in the page cache", flush=True)
    case = {"way": way, "cold": args.cold, "file_bytes": size, "width": args.width, "layers": args.layers}
    told = {"command": command(), "env": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))}
    line = {"bench": "load", "case": case, "gpus": args.gpus, **told}
    if reason := start(way, folder, args.gpus, args.limit_s):
        print(f"{way}: {reason}", flush=True)
        return line | {"failed": reason.splitlines()[0]}
    ranks = [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(args.gpus)]
    grown = sum(rank["peak"] - rank["before"] for rank in ranks)
    return line | {
        "seconds": max(rank["seconds"] for rank in ranks),
        "phases": [rank["phases"] for rank in ranks],
        "host_bytes": grown,
        "host_over_file": grown / size,
        "host_bytes_with_programs": sum(rank["peak"] for rank in ranks),
        "disk_bytes": sum(rank["disk"] for rank in ranks),
    }


def cached(file: Path) -> float:
    """The share of a file, by samples, that a read gets without waiting for a disk."""
    page, size, held = bytearray(1), file.stat().st_size, 0
    with open(file, "rb", buffering=0) as opened:
        for i in range(SAMPLES):
            try:
                held += os.preadv(opened.fileno(), [page], i * size // SAMPLES, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
    return held / SAMPLES


def start(way: str, folder: Path, ranks: int, limit_s: float) -> str | None:
    """Run all ranks of a contender until they have left their measurements in the folder, or return why they have not.

    They are a process group of their own, because ranks outlive a killed launcher.
    """
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    words += ["-m", "launch.benches.load", way, str(folder), str(time.time() + limit_s)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    said = folder / f"{way}.err"
    with said.open("w") as file:
        run = subprocess.Popen(words, stderr=file, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
        try:
            code = run.wait(limit_s + GRACE_S)
        except subprocess.TimeoutExpired:
            code = f"none after {limit_s + GRACE_S:g} s"
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
    if code == 0:
        return None
    return f"got exit code {code}, expected 0 within {limit_s:g} s; it said:\n{said.read_text()[-8000:]}"


def table(lines: list[dict[str, Any]]) -> str:
    """A row a contender."""
    return "\n".join([f"{lines[0]['gpus']} rank(s), {lines[0]['case']['file_bytes'] / 1e9:.2f} GB", *map(row, lines)])


def row(line: dict[str, Any]) -> str:
    """The measurements of a contender, or why there are none."""
    if "failed" in line:
        return f"{line['case']['way']:<18} {line['failed']}"
    return (
        f"{line['case']['way']:<18} {line['seconds']:8.2f} s   host memory {line['host_bytes'] / 1e9:7.2f} GB "
        f"({line['host_over_file']:.2f} x the file)   {line['disk_bytes'] / 1e9:7.2f} GB from disk"
    )


# One rank of one contender ---------------------------------------------------------------------------------------


def loaders() -> dict[str, Callable[[str, Any, Clock], nn.Module]]:
    """Contender -> what loads the model of a folder onto the device of a mesh."""
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    from seqpar.weights.find import locate
    from seqpar.weights.loading import load

    locate("dit-s/8")  # imports the modules of all models, as diffusers' is imported here

    def ours(folder: str, mesh: Any, clock: Clock) -> nn.Module:
        blueprint = mesh.together(lambda: locate(folder))
        model = blueprint.meta()
        clock.mark("open")
        load(model, blueprint.checkpoint, blueprint.keys, torch.bfloat16, mesh.device, mesh, clock.mark)
        return model

    def theirs(folder: str, mesh: Any, clock: Clock) -> nn.Module:
        model: Any = DiTTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        clock.mark("from_pretrained")
        return model.to(mesh.device)

    def direct(folder: str, mesh: Any, clock: Clock) -> nn.Module:
        placed = {"": str(mesh.device)}
        model: Any = DiTTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, device_map=placed)
        return model

    return dict(zip(WAYS, (ours, direct, theirs), strict=True))


def rank(way: str, folder: str, end: str) -> None:
    """Load as one rank of a contender and leave what was measured in the folder."""
    faulthandler.dump_traceback_later(max(float(end) - time.time(), 1), exit=True)
    from seqpar import mesh as meshes

    began = time.perf_counter()
    load, mesh = loaders()[way], meshes.Mesh.joined()
    connect(mesh)
    who = f"{way}, rank {mesh.world.rank}"
    print(f"{who}: imports, device and process group took {time.perf_counter() - began:.2f} s", flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    mesh.collect(None, None)
    before, read, clock = status("VmRSS"), disk(), Clock(who)
    model = load(folder, mesh, clock)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    clock.mark("last copies")
    mesh.collect(None, None)
    found: dict[str, Any] = {"seconds": clock.stop(), "phases": clock.phases, "before": before}
    found |= {"peak": status("VmHWM"), "disk": disk() - read}
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    Path(folder, f"{way}-{mesh.world.rank}.json").write_text(json.dumps(found))
    meshes.close()


def connect(mesh: Any) -> None:
    """Start the device and the library that connects the ranks, which their first calls do."""
    torch.zeros(1 << 20, device=mesh.device).to(torch.bfloat16)
    if mesh.world.size > 1:
        torch.distributed.broadcast(torch.zeros(1, device=mesh.device), src=0)


if __name__ == "__main__":
    rank(*sys.argv[1:])
