"""The loop of every rank of a server: load the models, then run one request after another.

Rank 0 alone talks to the API server; requests and cancellations are broadcast from there, so that ranks never diverge.
An error that all ranks raise identically is the answer to the request, and the ranks go on. Any other error ends this
process; `seqpar.cli.ranks` then stops the other ranks, and the API server starts new ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from seqpar.loading.checkpoint import Fitted
from seqpar.loading.lora import Lora, remarks
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.mesh import Mesh, default_dtype, end_groups
from seqpar.mesh.watch import Deadlines
from seqpar.pipelines.image_files import Picture
from seqpar.pipelines.pictures import Sound, digest, encoded, shared
from seqpar.pipelines.protocol import Events
from seqpar.serve.messages import (
    LONGEST,
    SOCKET,
    Alive,
    Change,
    Changed,
    Failed,
    Finish,
    ImageRequest,
    ImageResult,
    Partial,
    Ready,
    ServedModel,
    Step,
    ToServer,
    VideoResult,
    size_of,
)
from seqpar.serve.ranks import latents as _latents
from seqpar.serve.ranks.checked import NOTHING, CheckedModel, check_all_fit, controls_in, in_fields, loras_in
from seqpar.serve.ranks.link import ServerLink
from seqpar.serve.ranks.models import LoadError, Models
from seqpar.serve.ranks.preview import Previews, Watch
from seqpar.serve.rules import why_not
from seqpar.transformer.calibration import Precision

MARGIN = 1 << 16  # bytes of a message besides the file of a video
IDLE_S = 60.0  # after which idle ranks exchange a message, so that no wait for a request reaches a deadline
AUTO = "auto"  # as a size: the model's own
WARM_STEPS = 4  # the second call of a shape is captured


@dataclass(frozen=True)
class Output:
    """An image, its latents, or the frames of a video as values in [0, 1].

    parts_s: seconds per part, by the host of this rank. computed: how many steps a step cache has computed, and of how
    many.
    """

    steps: int
    parts_s: dict[str, float]
    computed: tuple[int, int] | None
    image: Image.Image | None = None
    latents: Tensor | None = None
    frames_FHW3: Any = None
    fps: float = 0.0
    sound: Sound | None = None


class LoadedModel:
    """A model on all ranks. facts: the model as the API describes it."""

    def __init__(self, checked: CheckedModel, ranks: Mesh, facts: ServedModel | None = None) -> None:
        """Load the weights. Collective. facts: if they are known."""
        self._checked, self._ranks = checked, ranks
        self._model = checked.example.load_model(ranks, checked.plan, loras=checked.loras.by_name)
        self.facts = facts or ranks.on_rank_0(self._facts, ServedModel)

    def _facts(self) -> ServedModel:
        checked, model = self._checked, self._model
        default = checked.example.default_pixels

        def takes(size: tuple[int, int]) -> bool:
            request = ImageRequest("", checked.name, checked.prompt, size=size)
            return model.takes(checked.job(request, checked.input_images))

        # a pipeline that refuses its own size, which fewer arguments can make it do, says nothing of others
        return checked.facts(default, takes if all(default) and takes(default) else lambda size: True)

    def limit(self, checked: CheckedModel, facts: ServedModel | None) -> None:
        """Take the room that other models leave now. Collective. facts: if they are known."""
        if checked.room != self._checked.room:
            self._checked = checked
            self.facts = facts or self._ranks.on_rank_0(self._facts, ServedModel)

    def close(self) -> None:
        """Free buffers, graphs and process groups; the weights go with the last reference. Collective."""
        self._model.__exit__(None, None, None)
        end_groups(self._model.mesh, self._ranks)

    @property
    def pipe(self) -> Any:
        """The pipeline, with the VAE of the latents. ValueError for models without one."""
        if self.facts.latent_pixels is None:
            raise ValueError(f"model {self.facts.name} has no latents in requests; use images")
        pipes: Any = self._model
        return next(iter(pipes.pipes.values()))

    def make(
        self,
        request: ImageRequest,
        images: Sequence[Picture],
        boundary: Callable[[], None],
        on_step: Callable[[int, int], object] = lambda index, count: None,
        watch: Watch | None = None,
        latents: Tensor | None = None,
    ) -> Output:
        """Run a request. Collective.

        images: its input images. latents: what the VAE makes of the one image. boundary: called between steps and
        parts; raises to stop. on_step(index, count): called after each step. watch: estimates for previews.
        ValueError for a request that does not fit, FloatingPointError for non-finite numbers.
        """
        parts_s, begun = dict[str, float](), time.perf_counter()

        def ends(part: str) -> None:
            """Add the time since the last call to a part."""
            nonlocal begun
            now = time.perf_counter()
            parts_s[part], begun = parts_s.get(part, 0.0) + now - begun, now

        def step(index: int) -> None:
            ends("encode and steps" if index == 0 and job.texts else "steps")
            on_step(index + 1, job.steps)

        def decode(done: int, total: int) -> None:
            if not done:  # decoding begins
                ends("steps")

        if (refusal := why_not(self.facts, request)) is not None:
            raise ValueError(refusal.text)
        if latents is not None:
            if request.steps == 0:
                boundary()
                image = _latents.decoded(latents, self.pipe, self._model.mesh.device)
                ends("decode")
                return Output(0, parts_s, None, image)
            side = self.facts.latent_pixels or 1  # the VAE encodes an image of this size to them
            height, width = (side * count for count in latents.shape[-2:])
            images = (Picture("the latents", Image.new("RGB", (width, height))),)
            request = msgspec.structs.replace(request, size=(height, width))
        job = self._model.mesh.on_all_ranks(lambda: self._checked.job(request, images))
        if self._model.mesh.on_all_ranks(lambda: self._model.switch_loras(request.loras)):  # it may read files
            ends("lora")
        estimates = None if watch is None else watch(job.pixels)
        with ExitStack() as changed:
            taken = None
            if latents is not None:
                changed.enter_context(_latents.encoding_to(latents, self.pipe.vae))
            if request.returns == "latents":
                taken = changed.enter_context(_latents.not_decoded(self.pipe.vae))
            result = self._model.generate(job, Events(step, boundary, decode=decode, estimates=estimates))
        if taken is not None:
            (made,) = taken
            ends("steps")
            return Output(job.steps, parts_s, result.computed, latents=made)
        (image,) = result.images
        ends("decode")
        if job.video:
            shown: Any = {"frames_FHW3": image, "fps": job.fps, "sound": next(iter(result.sounds), None)}
        else:
            shown = {"image": image}
        return Output(job.steps, parts_s, result.computed, **shown)


@dataclass(frozen=True)
class Served:
    """The ranks and their models. link: of rank 0 to the API server, None on other ranks, and before the first load.

    warming: requests with input images that a model runs when it is loaded.
    """

    mesh: Mesh
    models: Models
    link: ServerLink | None
    previews: Previews
    warming: Mapping[str, Sequence[tuple[ImageRequest, Sequence[Picture]]]]
    running: list[str] = field(default_factory=list)  # the id of the running request

    def why_stop(self) -> Reason | None:
        """Why the running request must stop; only rank 0 knows."""
        return None if self.link is None else self.link.why_stop(self.running[0])

    def send(self, message: ToServer | Callable[[], ToServer]) -> None:
        """Send a message from rank 0; a function makes it there."""
        if self.link is not None:
            self.link.send(message() if callable(message) else message)


def run(
    names: Mapping[str, str],
    dtype: torch.dtype | None,
    deadlines: Deadlines,
    loras: Path | None,
    sizes: Sequence[str],
    precision: Precision | None = None,
    min_psnr: float | None = None,
    cache: str | None = None,
    park: bool = False,
    most: int | None = None,
    swaps: bool = False,
    first: Sequence[str] | None = None,
    controlnet: Sequence[str] = (),
) -> None:
    """Load the models and serve until the API server sends `Finish` or disconnects. Collective.

    names: model -> its name in requests. dtype: of weights; None is bf16 on GPUs and fp32 on CPUs. loras: folder of
    LoRAs that requests may name. sizes: run before the ranks are ready. precision: of GEMMs; models that lack a
    calibration get it while they load. min_psnr: as for `seqpar.parallelize`; a model without a result of a search is a
    ValueError. cache, park: as for `seqpar.load`. most, swaps: as for `Models`. first: names of the models to load;
    None leaves the choice to `Models`. controlnet: NAME=FOLDER of each.
    """
    path = os.environ.get(SOCKET)
    if path is None:
        raise ValueError(f"{SOCKET} is not set; start the ranks with `seqpar serve`")
    mesh, started = Mesh.joined(deadlines=deadlines), time.perf_counter()
    dtype = dtype or default_dtype(mesh.device)
    how: Any = {"precision": precision, "min_psnr": min_psnr, "cache": cache, "park": park}
    how["controls"] = mesh.on_all_ranks(lambda: controls_in(controlnet))
    models = checked(names, dtype, mesh, mesh.on_all_ranks(lambda: loras_in(loras)), **how)
    requests = mesh.on_all_ranks(lambda: warm_requests(models, sizes))
    warming = {x.name: [(request, x.input_images) for request in requests[x.name]] for x in models}
    memory = min(mesh.collect(_total_memory(mesh), int))  # all ranks decide alike
    catalog = mesh.on_all_ranks(
        lambda: Models(models, memory, most, swaps, lambda model, facts: LoadedModel(model, mesh, facts))
    )
    starting = Served(mesh, catalog, None, Previews(mesh), warming)
    catalog.start(catalog.first() if first is None else first, lambda name: _warm(starting, name))
    served = replace(starting, link=mesh.on_all_ranks(lambda: ServerLink(path) if mesh.is_main else None))
    loaded_s = time.perf_counter() - started
    served.send(lambda: _ready(served, loaded_s))
    while (order := _next(served, min(IDLE_S, deadlines.host_s / 3))) is not None:
        _answer(served, order, loaded_s)
    if served.link is not None:
        served.link.close()


def _ready(served: Served, loaded_s: float) -> Ready:
    device = served.mesh.device
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return Ready(served.models.facts, served.mesh.world.size, name, loaded_s)


def checked(
    names: Mapping[str, str],
    dtype: torch.dtype,
    mesh: Mesh,
    loras: Mapping[str, Lora],
    precision: Precision | None = None,
    min_psnr: float | None = None,
    cache: str | None = None,
    park: bool = False,
    controls: Mapping[str, Fitted] = NOTHING,
) -> list[CheckedModel]:
    """All models before weights load; ValueError if a LoRA fits none. Collective."""
    how: Any = {"precision": precision, "min_psnr": min_psnr, "cache": cache, "park": park}
    how["controls"] = controls
    models = [replace(CheckedModel.of(x, dtype, mesh, loras, **how), name=name) for x, name in names.items()]
    if unfit := [name for name in controls if not any(name in model.source.controls for model in models)]:
        raise ValueError(f"ControlNet {unfit[0]} fits no served model; leave it out, or serve its model")
    mesh.on_all_ranks(lambda: check_all_fit(loras, [model.loras for model in models]))
    notes = mesh.on_all_ranks(
        lambda: {x.name: remarks(list(x.loras.by_name.values()), x.source.presets, None) for x in models}
    )
    if mesh.is_main:
        for name, lines in notes.items():
            print(*(f"seqpar: {name}: {line}\n" for line in lines), sep="", end="", flush=True)
    return models


# before the first request ---------------------------------------------------------------------------------------------


def warm_requests(models: Sequence[CheckedModel], sizes: Sequence[str]) -> dict[str, list[ImageRequest]]:
    """Model -> requests for the sizes that it takes, before weights load.

    The first run of a size compiles kernels, sets up exchanges and captures graphs, and the first preview of a model
    fits a map. sizes: WIDTHxHEIGHT in pixels or "auto". ValueError for one that no model takes.
    """
    requests: dict[str, list[ImageRequest]] = {model.name: [] for model in models}
    for text in dict.fromkeys(sizes):
        size, reasons = size_of(text), list[str]()
        if size is None and text != AUTO:
            raise ValueError(f"--warm {text} is no size; use WIDTHxHEIGHT in pixels, such as 1024x768, or {AUTO}")
        for model in models:
            previews = 0 if model.video else 1
            request = ImageRequest("", model.name, model.prompt, steps=WARM_STEPS, size=size, partial_images=previews)
            try:
                model.job(request, model.input_images)
                requests[model.name].append(request)
            except ValueError as reason:
                reasons.append(str(reason))
        if len(reasons) == len(models):
            raise ValueError(f"no served model takes --warm {text}: {'; '.join(reasons)}")
    return requests


def _warm(served: Served, name: str) -> None:
    for request, images in served.warming[name]:
        start, boundary = time.perf_counter(), StepBoundary(served.mesh, lambda: None)
        watch = _watch(served, request, images, boundary, lambda message: None)
        served.models.use(name).make(request, images, boundary, watch=watch)
        if served.mesh.is_main:
            size = AUTO if request.size is None else f"{request.size[1]}x{request.size[0]}"
            print(f"seqpar: {name} is warm for {size} after {time.perf_counter() - start:.1f} s", flush=True)


# requests ------------------------------------------------------------------------------------------------------------


def _next(served: Served, idle_s: float) -> ImageRequest | Change | None:
    """The next request or change on every rank; None when the ranks are to finish."""
    while True:
        local = None if served.link is None else served.link.next(idle_s)
        message: ImageRequest | Change | Finish | None = served.mesh.share(local, ImageRequest | Change | Finish | None)
        if isinstance(message, ImageRequest | Change):
            return message
        if isinstance(message, Finish):
            return None
        served.send(Alive(_memory(served.mesh)))


def _answer(served: Served, request: ImageRequest | Change, loaded_s: float) -> None:
    served.running[:] = [request.id]
    try:
        if isinstance(request, Change):
            served.models.change(request.load, request.unload, lambda name: _warm(served, name))
            served.send(lambda: Changed(request.id, _ready(served, loaded_s)))
        else:
            served.send(_result(served, request))
    except CancelledError as error:
        served.send(Failed(request.id, error.reason, "the request was cancelled or its deadline has passed"))
    except (ValueError, FloatingPointError, LoadError) as error:  # raised identically on all ranks
        why = "mistake" if isinstance(error, ValueError) else "failure"
        served.send(Failed(request.id, why, in_fields(served.models.named(str(error)))))
    if served.link is not None:
        served.link.forget(request.id)


def _result(served: Served, request: ImageRequest) -> ImageResult | VideoResult:
    model = served.models.use(request.model)
    boundary = StepBoundary(served.mesh, served.why_stop)
    images, latents = input_images(request, served.mesh), _latents.read(request, served.mesh)
    watch = _watch(served, request, images, boundary, served.send)

    def on_step(index: int, count: int) -> None:
        served.send(Step(request.id, index, count))

    output = model.make(request, images, boundary, on_step, watch, latents)
    if (made := output.latents) is not None:
        side = model.facts.latent_pixels or 1
        size = made.shape[-2] * side, made.shape[-1] * side
        stored = json.dumps(request.parameters(output.steps, size, output.computed))
        file = save({"latents": made}, {"seqpar": stored}) if served.mesh.is_main else b""
        return ImageResult(request.id, *size, b"", output.steps, output.parts_s, _memory(served.mesh), file=file)
    if (image := output.image) is None:
        return _video(served, request, output)
    pixels = np.ascontiguousarray(np.asarray(image.convert("RGB"))).tobytes() if served.mesh.is_main else b""
    how = output.steps, output.parts_s, _memory(served.mesh), output.computed
    return ImageResult(request.id, image.height, image.width, pixels, *how)


def input_images(request: ImageRequest, mesh: Mesh) -> tuple[Picture, ...]:
    """The input images of a request, its mask last, on every rank; rank 0 reads the file with their pixels.

    The same ValueError on all ranks for a file that is too short.
    """

    def read() -> list[Picture]:
        if request.pixels is None:
            raise ValueError("the request has images, but no file with their pixels")
        try:
            with open(request.pixels, "rb") as file:
                read = [(image, file.read(image.nbytes)) for image in request.inputs]
        except OSError as error:  # its text has a path of the server
            raise ValueError("the server cannot read the images of the request; retry later") from error
        modes = {3: "RGB", 1: "L"}
        images = (Image.frombytes(modes[x.channels], (x.width, x.height), pixels) for x, pixels in read)
        return [Picture(f"image {number}", image) for number, image in enumerate(images, 1)]

    return shared(read, mesh) if request.inputs else ()


def _watch(
    served: Served,
    request: ImageRequest,
    images: Sequence[Picture],
    boundary: StepBoundary,
    on_preview: Callable[[Partial], None],
) -> Watch | None:
    model = served.models.use(request.model)

    def make(other: ImageRequest, watch: Watch) -> Image.Image:
        inputs = images if model.facts.needs_picture else ()
        image = model.make(other, inputs, boundary, watch=watch).image
        if image is None:
            raise ValueError(f"partial_images are not supported for videos of {request.model}; leave them out")
        return image

    return served.previews.watch(request, model.facts, make, on_preview)


def _video(served: Served, request: ImageRequest, output: Output) -> VideoResult:
    """A video as a file. Rank 0 encodes it; the GPUs wait meanwhile. Collective."""
    (frames, height, width, _), begun = output.frames_FHW3.shape, time.perf_counter()

    def encode() -> bytes:
        if not served.mesh.is_main:
            return b""
        made = [output.frames_FHW3, *(() if output.sound is None else (output.sound.samples_CT,))]
        more = {"frames": frames, "fps": output.fps, "pixels": digest(made)}
        comment = json.dumps(request.parameters(output.steps, (height, width), output.computed) | more)
        if request.returns == "arrays":
            file = _arrays(output, comment)
        else:
            file = encoded(output.frames_FHW3, output.fps, comment, output.sound).getvalue()
        if len(file) > LONGEST - MARGIN:
            most = LONGEST - MARGIN
            raise ValueError(f"the video has {len(file)} bytes, more than {most}; request a shorter or smaller one")
        return file

    file = served.mesh.on_all_ranks(encode)
    parts_s = {**output.parts_s, "file": time.perf_counter() - begun}
    how = output.steps, parts_s, _memory(served.mesh), output.computed
    return VideoResult(request.id, height, width, frames, output.fps, file, *how)


def _arrays(output: Output, comment: str) -> bytes:
    """The frames (8 bits) and the sound of a video as a safetensors file."""
    frames_FHW3 = np.ascontiguousarray((np.asarray(output.frames_FHW3) * 255).round().astype(np.uint8))
    tensors, facts = {"frames": torch.from_numpy(frames_FHW3)}, {"seqpar": comment, "fps": str(output.fps)}
    if output.sound is not None:
        tensors["sound"] = torch.from_numpy(np.ascontiguousarray(output.sound.samples_CT, np.float32))
        facts["rate"] = str(output.sound.rate)
    return save(tensors, facts)


def _memory(mesh: Mesh) -> tuple[int, ...]:
    """Bytes in use per rank, of its GPU or of the host."""
    if mesh.device.type == "cuda":
        used = torch.cuda.memory_reserved(mesh.device)
    else:
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return tuple(mesh.collect(used, int))


def _total_memory(mesh: Mesh) -> int:
    if mesh.device.type == "cuda":
        return torch.cuda.get_device_properties(mesh.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // mesh.world.size
