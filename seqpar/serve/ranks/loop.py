"""What every rank of a server does: load the models, then make what one order after the other asks for.

Rank 0 alone speaks with the front; the order, and whether it is given up, come to all ranks from there, so that they
never do different things. An error that all ranks raise alike is the answer to the order, and the ranks go on. Any
other error ends this process: the others are ended by `seqpar.cli.ranks`, and the front starts new ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from seqpar.loading.lora import Lora, remarks
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.mesh import Mesh, default_dtype
from seqpar.mesh.watch import Deadlines
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.videos import digest, encoded
from seqpar.planner.predict import GIB
from seqpar.serve.messages import (
    LONGEST,
    Alive,
    Failed,
    Finish,
    ImageRequest,
    Made,
    MadeVideo,
    Partial,
    Ready,
    Step,
    ToFront,
)
from seqpar.serve.ranks.found import Found
from seqpar.serve.ranks.line import Line
from seqpar.serve.ranks.loras import check_all_fit, loras_in
from seqpar.serve.ranks.models import Clock, OrderResult, OrderRun, Resident, load
from seqpar.serve.ranks.pictures import pictures_of
from seqpar.serve.ranks.preview import Estimates, Previews
from seqpar.serve.ranks.warm import warm, warming

SOCKET = "SEQPAR_SERVE"  # environment of the ranks: the path of the front's socket
MARGIN = 1 << 16  # bytes of a message beside the file of a video
IDLE_S = 60.0  # after which idle ranks exchange something, so that no wait for an order reaches a deadline


@dataclass(frozen=True)
class Served:
    """The ranks and what they hold. line: rank 0's to the front."""

    mesh: Mesh
    models: Mapping[str, Resident]
    line: Line | None
    previews: Previews
    running: list[str] = field(default_factory=list)  # the id of the order that runs

    def wants(self) -> Reason | None:
        """Return why this rank wants the running order to end; only rank 0 hears of it."""
        return None if self.line is None else self.line.why_given_up(self.running[0])

    def tell(self, message: ToFront) -> None:
        """Send a message to the front; other ranks than rank 0 say nothing."""
        if self.line is not None:
            self.line.send(message)


def run(
    names: Sequence[str],
    dtype: torch.dtype | None,
    deadlines: Deadlines,
    loras: Path | None = None,
    sizes: Sequence[str] = (),
) -> None:
    """Load the models and serve orders until the front asks to finish, or has gone. Every rank calls it.

    dtype: of the weights; None takes bf16 on GPUs and fp32 on CPUs. loras: a folder of LoRAs that orders may name.
    sizes: what is made before the ranks are ready (`seqpar.serve.ranks.warm`).
    """
    path = os.environ.get(SOCKET)
    if path is None:
        raise ValueError(f"got no {SOCKET}, expected the path of a front's socket; start the ranks by `seqpar serve`")
    mesh, started = Mesh.joined(deadlines=deadlines), time.perf_counter()
    found = checked(names, dtype or default_dtype(mesh.device), mesh, mesh.on_all_ranks(lambda: loras_in(loras)))
    first = mesh.on_all_ranks(lambda: warming(found, sizes))
    models = {each.name: load(each, mesh) for each in found}
    line = mesh.on_all_ranks(lambda: Line(path) if mesh.is_main else None)
    served = Served(mesh, models, line, Previews(mesh))
    for each in found:
        warm(mesh, first[each.name], partial(_run_unseen, served, each.begun))
    device = "cpu" if mesh.device.type == "cpu" else torch.cuda.get_device_name(mesh.device)
    facts = tuple(model.facts for model in models.values())
    served.tell(Ready(facts, mesh.world.size, device, time.perf_counter() - started))
    while (order := _next(served, min(IDLE_S, deadlines.host_s / 3))) is not None:
        _answer(served, order)
    if line is not None:
        line.close()


def checked(
    names: Sequence[str], dtype: torch.dtype, mesh: Mesh, loras: Mapping[str, Lora] | None = None
) -> list[Found]:
    """Return all models before weights load; ValueError if they do not fit a rank, or a LoRA fits none."""
    found = [Found.of(name, dtype, mesh, loras or {}) for name in dict.fromkeys(names)]
    mesh.on_all_ranks(lambda: check_all_fit(loras or {}, [each.loras for each in found]))
    told = mesh.on_all_ranks(lambda: {each.name: remarks(list(each.loras.every.values())) for each in found})
    if mesh.is_main:
        for name, lines in told.items():
            print(*(f"seqpar: {name}: {line}\n" for line in lines), sep="", end="", flush=True)
    needed, memory = sum(each.memory for each in found), _total(mesh)
    if needed > memory:
        shares = ", ".join(f"{each.name} {each.memory / 2**30:.1f}" for each in found)
        raise ValueError(
            f"got models that need {needed / 2**30:.1f} GiB on each of {mesh.world.size} ranks ({shares}), expected at "
            f"most {memory / 2**30:.1f} GiB; serve fewer of them, or use more GPUs"
        )
    others = [needed - each.memory + each.loras.weights * each.dtype.itemsize for each in found]
    return [replace(each, room=(memory - other) / GIB) for each, other in zip(found, others, strict=True)]


def _run_unseen(served: Served, images: Sequence[Picture], order: ImageRequest) -> None:
    """Make what an order asks for on every rank; nobody is told of it."""
    model, boundary = served.models[order.model], StepBoundary(served.mesh, lambda: None)
    estimates = _estimates(served, order, images, boundary, lambda message: None)
    model.make(order, OrderRun(images, boundary, estimates=estimates))


def _next(served: Served, idle_s: float) -> ImageRequest | None:
    """Return the next order on every rank; None when the ranks are to finish."""
    while True:
        mine = None if served.line is None else served.line.next(idle_s)
        found: ImageRequest | Finish | None = served.mesh.share(mine, ImageRequest | Finish | None)
        if isinstance(found, ImageRequest):
            return found
        if isinstance(found, Finish):
            return None
        served.tell(Alive(_memory(served.mesh)))


def _answer(served: Served, order: ImageRequest) -> None:
    """Make the picture of an order and send it, or the reason why there is none."""
    served.running[:] = [order.id]
    try:
        served.tell(_made(served, order))
    except CancelledError as given_up:
        served.tell(Failed(order.id, given_up.reason, "the request was cancelled or its time is over"))
    except (ValueError, FloatingPointError) as error:  # which all ranks raise alike
        why = "mistake" if isinstance(error, ValueError) else "failure"
        served.tell(Failed(order.id, why, " ".join(str(error).split())))
    if served.line is not None:
        served.line.forget(order.id)


def _made(served: Served, order: ImageRequest) -> Made | MadeVideo:
    """Return the picture or the video of an order, on every rank."""
    model = served.models.get(order.model)
    if model is None:
        raise ValueError(f"got model {order.model}, expected one of {', '.join(served.models)}")
    boundary = StepBoundary(served.mesh, served.wants)
    images = pictures_of(order, served.mesh)
    estimates = _estimates(served, order, images, boundary, served.tell)
    clock = Clock()
    run = OrderRun(images, boundary, lambda index, count: served.tell(Step(order.id, index, count)), clock, estimates)
    result = model.make(order, run)
    if (picture := result.picture) is None:
        return _video(served, order, result, clock)
    pixels = np.ascontiguousarray(np.asarray(picture.convert("RGB"))).tobytes() if served.mesh.is_main else b""
    memory = _memory(served.mesh)
    return Made(order.id, picture.height, picture.width, pixels, result.steps, clock.parts_s, memory)


def _estimates(
    served: Served,
    order: ImageRequest,
    images: Sequence[Picture],
    boundary: StepBoundary,
    tell: Callable[[Partial], None],
) -> Estimates:
    """Return which estimates of its latents an order needs; every rank must call this at the same time."""
    model = served.models[order.model]

    def small(other: ImageRequest, asked: Estimates) -> Image.Image:
        begun = images if model.facts.needs_picture else ()
        picture = model.make(other, OrderRun(begun, boundary, estimates=asked)).picture
        if picture is None:
            raise ValueError(f"got partial pictures with {order.model}, which makes videos, expected none")
        return picture

    return served.previews.estimates(order, model.facts, small, tell)


def _video(served: Served, order: ImageRequest, result: OrderResult, clock: Clock) -> MadeVideo:
    """Return a video as a file, on every rank; only rank 0 writes it.

    Its frames would be too long for one message, and the front need not hold them: GPUs wait for the encoder meanwhile.
    """
    frames, height, width, _ = result.frames_FHW3.shape

    def written() -> bytes:
        if not served.mesh.is_main:
            return b""
        more = {"frames": frames, "fps": result.fps, "pixels": digest([result.frames_FHW3])}
        told = json.dumps(order.about(result.steps, (height, width)) | more)
        file = encoded(result.frames_FHW3, result.fps, told).getvalue()
        if len(file) > LONGEST - MARGIN:
            raise ValueError(f"got a video of {len(file)} bytes, expected at most {LONGEST - MARGIN}; ask for less")
        return file

    file = served.mesh.on_all_ranks(written)
    clock.ends("file")
    memory = _memory(served.mesh)
    return MadeVideo(order.id, height, width, frames, result.fps, file, result.steps, clock.parts_s, memory)


def _memory(mesh: Mesh) -> tuple[int, ...]:
    """Return the bytes that each rank uses: of its GPU, or of the host."""
    if mesh.device.type == "cuda":
        used = torch.cuda.memory_reserved(mesh.device)
    else:
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return tuple(mesh.collect(used, int))


def _total(mesh: Mesh) -> int:
    """Return the bytes of memory that each rank can use at most."""
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.world.size
