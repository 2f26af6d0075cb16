"""The process that `launch/bench.py start` times: it makes one picture and prints the seconds of each part.

    python -m launch.benches.first_picture START '{"model": "large-dit-7b", "steps": 25, "out": "picture.png"}'
    python -m launch.benches.first_picture START '{"numels": [...], "width": 4096}'

START is `time.monotonic()` of the process that starts this one. The first form makes a picture by the calls of
`seqpar sample`. The second form is the floor: the same interpreter, torch, diffusers and device, random weights, one
matrix product and one attention, and no code of seqpar. Each prints one JSON line.
"""

# Imports are timed, so heavy ones stand inside functions.
from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

TORCH = ("torch", "torch.nn.functional")
DIFFUSERS = (  # the modules of diffusers that seqpar imports
    "diffusers",
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.modeling_outputs",
    "diffusers.schedulers.scheduling_ddim",
    "diffusers.utils.torch_utils",
)


class Marks:
    """Seconds of each part, measured from the end of the part before."""

    def __init__(self, start: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = start

    def __call__(self, part: str) -> None:
        """End `part` now, after waiting for the GPU if one is in use."""
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.monotonic()
        self.seconds[part] = now - self._last
        self._last = now


def imports(mark: Marks) -> None:
    """Import torch and diffusers, as any program that uses them does."""
    mark("python")
    for name in TORCH:
        import_module(name)
    mark("import torch")
    for name in DIFFUSERS:
        import_module(name)
    mark("import diffusers")


def picture(mark: Marks, model: str, steps: int, out: str) -> dict[str, str]:
    """Make a picture as `seqpar sample` does, but run the first step before the capture, so that it is timed alone."""
    imports(mark)
    from pathlib import Path

    import torch

    from seqpar.cli.job import DTYPES
    from seqpar.mesh import Mesh
    from seqpar.pipelines._pictures import grid, save, to_pil
    from seqpar.pipelines.class_labels import Files, Pipeline
    from seqpar.sampling.loop import digest

    mark("import seqpar")
    mesh = Mesh.from_env(guidance=True)
    torch.zeros(1, device=mesh.device)
    mark("device")
    files = Files.locate(model)
    dtype = DTYPES["bf16" if mesh.device.type == "cuda" else "fp32"]
    pipeline = Pipeline.load(files, mesh, dtype)
    mark("weights")
    label = min(files.labels, default=0)
    latents = denoised(mark, pipeline, label, steps)
    save(grid(to_pil(pipeline.decode(latents)), [files.class_name(label)]), Path(out), {"model": model})
    mark("picture")
    told = {"dtype": str(dtype).removeprefix("torch."), "device": str(mesh.device), "local": pipeline.dit.local.name}
    return {"digest": digest(latents), **told}


def denoised(mark: Marks, pipeline: Any, label: int, steps: int) -> Any:
    """Latents of one picture with guidance: the body of `seqpar.sampling.loop.sample`, with marks."""
    import torch

    from seqpar.sampling.guidance import Guidance
    from seqpar.sampling.loop import check_finite, draw_noise
    from seqpar.sampling.request import Request
    from seqpar.sampling.run import begin

    files, dit = pipeline.files, pipeline.dit
    scheduler, config = files.schedule(None, steps), dit.config
    noise = draw_noise((1, config.in_channels, *files.latent_size(None)), torch.Generator().manual_seed(0))
    request = Request(scheduler, noise, {"class_labels": torch.tensor([label])}, steps, Guidance(4.0))
    run = begin(dit, request)
    mark("modulation")
    with torch.no_grad():
        for index in range(len(run.timesteps)):
            if index == 1 and run.why_no_graph is None:
                run.capture()
                mark("capture")
            run.step()
            if index == 0:
                mark("first step")
        latents = run.latents()
    run.release()
    check_finite(run.first_bad(), run.timesteps)
    mark("steps")
    return latents


def floor(mark: Marks, numels: list[int], width: int) -> dict[str, str]:
    """Make random tensors of these sizes, and use cuBLAS and an attention kernel for the first time."""
    imports(mark)
    import torch
    import torch.nn.functional as F

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.zeros(1, device=device)
    mark("device")
    weights = [torch.empty(numel, dtype=dtype, device=device).normal_(std=0.02) for numel in numels]
    mark("weights")
    x = torch.randn(2, 256, width, device=device).to(dtype)
    x = F.linear(x, x[0]).unflatten(-1, (-1, 64)).transpose(1, 2)
    F.scaled_dot_product_attention(x, x, x)
    mark("first step")
    return {"tensors": str(len(weights))}


def main() -> None:
    """Parse START and the JSON object, run, and print the JSON line."""
    mark, what = Marks(float(sys.argv[1])), json.loads(sys.argv[2])
    told = floor(mark, **what) if "numels" in what else picture(mark, **what)
    print(json.dumps({"seconds": mark.seconds, **told}), flush=True)


if __name__ == "__main__":
    main()
