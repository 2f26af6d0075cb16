"""One run of `seqpar sample` by diffusers' own loop: load, parallelize, call the pipeline, write pictures or videos."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from seqpar.cli.args import Args
from seqpar.cli.job import outputs, parse_size, scales
from seqpar.cli.profiling import profiled
from seqpar.cli.stopping import stoppable
from seqpar.cli.summary import Bar, Progress, chosen, layout, listed, measured
from seqpar.loading.encoders import at_first_call, forget_encoders
from seqpar.loading.parts import transformers_of
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Adapted
from seqpar.pipelines.load import placed
from seqpar.pipelines.pictures import save
from seqpar.pipelines.videos import digest, save_video
from seqpar.planner.plan import Plan, settled
from seqpar.transformer.parallelize import call_of, passing
from seqpar.vae.pipeline import VaeMode

VAE: dict[str, VaeMode] = {
    "auto": "auto",
    "strips": True,
    "pictures": False,
    "tiled": "tiled",
}  # --vae for `parallelize`


def run_adapted(args: Args, job: Adapted, plan: Plan, ranks: Mesh) -> None:
    """The path from a checked and planned request to files. Every rank calls it."""
    started = time.perf_counter()
    pipe = _loaded(job, ranks)
    state = _parallelize(args, pipe, plan)
    if args.verify:
        from seqpar.verifying.verify import EVALUATIONS, verify

        arguments = job.few(EVALUATIONS, ranks.device)
        verify(pipe, **arguments, generator=torch.Generator().manual_seed(job.request.seed))
    forget_encoders(pipe)
    loaded = time.perf_counter() - started
    pipe.set_progress_bar_config(disable=job.counts_steps or not ranks.is_main)
    if ranks.is_main:
        print(_summary(args, pipe, job, plan, state), flush=True)
    made, per_step = _made(args, plan, pipe, job, ranks)
    bits = digest(made)
    paths = outputs(args, job)
    if ranks.is_main:
        shown = _parameters(args, pipe, job, plan) | {
            "made": _size(args, made[0]),
            "pixels": bits,
            "ms_per_step": per_step,
        }
        for path, one in zip(paths, made, strict=True):
            (save_video(one, path, job.fps, shown) if job.video else save(one, path, shown))
        what, speed = _what(job), measured(per_step, loaded, time.perf_counter() - started)
        print(f"{listed(paths)}: {job.load.images} {what}, {speed}, pixels {bits}", flush=True)


def _parallelize(args: Args, pipe: Any, plan: Plan) -> str:
    """Let a pipeline compute as planned, with its state in fp32 if it can; return the state's dtype as text."""
    reason = placed(pipe, plan, settled(plan, None), VAE[args.vae])
    return "fp32, unless the pipeline itself rounds it" if reason is None else f"as the pipeline keeps it: {reason}"


def _loaded(job: Adapted, ranks: Mesh) -> Any:
    """Return the pipeline, with its texts encoded; rank 0 shows a bar."""
    encoding = Bar(job.texts, "prompt", ranks, "encoding")

    def encoded() -> None:
        encoding.add(job.texts)
        encoding.close()

    def encode(pipe: Any) -> None:
        encoding.add(0)
        at_first_call(pipe, encoded)
        job.encode(pipe, ranks)

    with encoding:
        return job.pipeline(ranks, encode)


def _made(args: Args, plan: Plan, pipe: Any, job: Adapted, ranks: Mesh) -> tuple[list[Any], float | None]:
    """Return pictures or videos, and ms a step, if the pipeline tells of its steps; rank 0 shows bars."""
    encoding = Bar(len(job.request.images), "picture", ranks, "encoding")
    decoding = Bar(job.load.images, _what(job).removesuffix("s"), ranks, "decoding")

    def decode(count: int) -> None:
        if not count:
            progress.finish()
            progress.close()
        decoding.add(count)

    def step(index: int) -> None:
        encoding.close()
        progress(index)

    with encoding, Progress(job.steps, ranks) as progress, decoding, profiled(args, plan, ranks, step) as on_step:
        with stoppable(args, ranks) as boundary, passing(pipe, boundary):
            made = job.make(pipe, on_step, ranks, decode, encoding.add)
        return made, progress.finish() if job.counts_steps else None


def _size(args: Args, one: Any) -> dict[str, int]:
    """Return the size of a picture or video that was made, after a line if it is not the one that was asked for."""
    *frames, rows, columns, _ = np.asarray(one).shape
    size = {"height": rows, "width": columns} | ({"frames": frames[0]} if frames else {})
    asked = dict(zip(size, parse_size(args.size) or (), strict=False)) | (
        {"frames": args.frames} if args.frames else {}
    )
    if any(size[name] != wanted for name, wanted in asked.items()):
        shown = ", ".join(f"{count} {name}" for name, count in size.items())
        print(f"seqpar: the pipeline made another size than was asked for: {shown}", flush=True)
    return size


def _what(job: Adapted) -> str:
    return "videos" if job.video else "pictures"


def _summary(args: Args, pipe: Any, job: Adapted, plan: Plan, state: str) -> str:
    """Return the lines that say what runs, where, and why."""
    call: Any = call_of(next(iter(transformers_of(pipe).values())))
    tokens = f"{job.load.tokens} tokens, " if job.planned.exact else ""
    dtype, steps = str(job.dtype).removeprefix("torch."), f"{job.steps} steps of {type(pipe.scheduler).__name__}"
    work = f"{job.load.images} {_what(job)}, {tokens}{dtype}, {steps} in {job.kind.__name__}, {scales(job)}"
    graph = "no GPU" if call.mesh.device.type == "cpu" else call.body.why_eager()
    lines = [
        *layout(args, plan, call.mesh, str(plan.transport), str(plan.local)),
        f"work      {work}",
        *(f"lora      {each}" for each in job.request.loras),
        *(f"{title:<9} {text}" for title, text in job.notes),
        f"state     {state}",
        f"graph     {'a call of the transformer is one CUDA graph' if graph is None else f'none: {graph}'}",
    ]
    return "\n".join(lines)


def _parameters(args: Args, pipe: Any, job: Adapted, plan: Plan) -> dict[str, Any]:
    """Return what a picture's metadata holds, without measurements."""
    names = {"strategy": plan.strategy.name, "local": plan.local.name, "transport": plan.transport.name}
    own = {"scheduler": type(pipe.scheduler).__name__, "vae": args.vae, "prompts": job.prompts}
    own |= {"images": [picture.facts for picture in job.request.images]} if job.request.images else {}
    own |= {"fps": job.fps} if job.video else {}
    call: Any = call_of(next(iter(transformers_of(pipe).values())))
    return chosen(args, job, call.mesh, {**names, **own})
