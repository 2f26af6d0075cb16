"""Seconds and host memory of loading a checkpoint of 7 B parameters on N ranks, beside diffusers' `from_pretrained`.

    python launch/bench.py load --gpus 4 --out load.jsonl

It writes a checkpoint of random weights in diffusers' DiT format (fp32, 29 GB by default, in `--folder`), and starts N
ranks for each contender, one contender after the other: `seqpar` (one rank of the host reads each tensor), `diffusers`
(`from_pretrained`, then `.to(device)`) and `diffusers direct` (`from_pretrained(device_map=...)`), on every rank. All
load the same file as bfloat16 onto the rank's device. The clock runs from a barrier after imports, device and process
group to a barrier after the last copy. Host memory is the high-water mark of resident memory, summed over all ranks,
less what was resident before; mapped pages of the file count on every rank that touched them.
"""

from __future__ import annotations

import json
import os
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

from launch.benches.timing import append, command, environment

ROOT = Path(__file__).parents[2]
WAYS = ("seqpar", "diffusers", "diffusers direct")
FILE = "diffusion_pytorch_model.safetensors"
LIMIT_S = 600  # of one contender


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
    if odd := [way for way in args.ways if way not in WAYS]:
        raise ValueError(f"got --ways {odd[0]}, expected some of {', '.join(WAYS)}")
    with TemporaryDirectory(dir=args.folder) as name:
        started = time.perf_counter()
        size = write(Path(name), args.width, args.layers)
        print(f"{size / 1e9:.2f} GB written in {time.perf_counter() - started:.1f} s", flush=True)
        lines = [measured(args, way, Path(name), size) for way in args.ways]
    print(table(lines), flush=True)
    append(lines, args.out)


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
    start(way, folder, args.gpus)
    ranks = [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(args.gpus)]
    grown = sum(rank["peak"] - rank["before"] for rank in ranks)
    return {
        "bench": "load",
        "case": {"way": way, "cold": args.cold, "file_bytes": size, "width": args.width, "layers": args.layers},
        "gpus": args.gpus,
        "seconds": max(rank["seconds"] for rank in ranks),
        "host_bytes": grown,
        "host_over_file": grown / size,
        "host_bytes_with_programs": sum(rank["peak"] for rank in ranks),
        "disk_bytes": sum(rank["disk"] for rank in ranks),
        "command": command(),
        "env": environment(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }


def start(way: str, folder: Path, ranks: int) -> None:
    """Run all ranks of a contender until they have left their measurements in the folder."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [*words, "-m", "launch.benches.load", way, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise ValueError(f"got exit code {done.returncode} from {way}, expected 0; it said:\n{done.stderr[-4000:]}")


def table(lines: list[dict[str, Any]]) -> str:
    """A row a contender."""
    rows = [
        f"{line['case']['way']:<18} {line['seconds']:8.2f} s   host memory {line['host_bytes'] / 1e9:7.2f} GB "
        f"({line['host_over_file']:.2f} x the file)   {line['disk_bytes'] / 1e9:7.2f} GB from disk"
        for line in lines
    ]
    return "\n".join([f"{lines[0]['gpus']} rank(s), {lines[0]['case']['file_bytes'] / 1e9:.2f} GB", *rows])


# One rank of one contender ---------------------------------------------------------------------------------------


def loaders() -> dict[str, Callable[[str, Any], nn.Module]]:
    """Contender -> what loads the model of a folder onto the device of a mesh."""
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    from seqpar.weights.find import locate

    def ours(folder: str, mesh: Any) -> nn.Module:
        return mesh.together(lambda: locate(folder)).build(torch.bfloat16, mesh.device, mesh=mesh)

    def theirs(folder: str, mesh: Any) -> nn.Module:
        model: Any = DiTTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        return model.to(mesh.device)

    def direct(folder: str, mesh: Any) -> nn.Module:
        placed = {"": str(mesh.device)}
        model: Any = DiTTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, device_map=placed)
        return model

    return dict(zip(WAYS, (ours, theirs, direct), strict=True))


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def disk() -> int:
    """Bytes that this process had fetched from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


def rank(way: str, folder: str) -> None:
    """Load as one rank of a contender and leave what was measured in the folder."""
    from seqpar import mesh as meshes

    load, mesh = loaders()[way], meshes.Mesh.joined()
    torch.zeros(1 << 20, device=mesh.device).to(torch.bfloat16)
    if mesh.world.size > 1:  # the first call of NCCL connects the ranks
        torch.distributed.broadcast(torch.zeros(1, device=mesh.device), src=0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    mesh.collect(None)
    before, read, started = status("VmRSS"), disk(), time.perf_counter()
    model = load(folder, mesh)
    if mesh.device.type == "cuda":
        torch.cuda.synchronize()
    mesh.collect(None)
    found = {"seconds": time.perf_counter() - started, "before": before, "peak": status("VmHWM"), "disk": disk() - read}
    found["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    Path(folder, f"{way}-{mesh.world.rank}.json").write_text(json.dumps(found))
    meshes.close()


if __name__ == "__main__":
    rank(*sys.argv[1:])
