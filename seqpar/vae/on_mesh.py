"""`MeshVAE`: a VAE on the ranks of a mesh, which decodes and encodes by strips, small pictures as CUDA graphs.

It owns what is kept between pictures: the exchanges of the strips and at most two CUDA graphs. Diffusers pipelines
reach it through `vae.decode` (`seqpar.vae.shared`), pipelines of ours through `MeshVAE.pictures`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Protocol

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from seqpar.graphs.graphs import Capture, Captured, CudaCapture, Graphs
from seqpar.graphs.signature import Form, form_of
from seqpar.mesh import exact
from seqpar.mesh.inputs import CALL, agree, broadcast, shapes
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard
from seqpar.mesh.watch import Calls
from seqpar.planner.plan import load_transport
from seqpar.planner.predict import GIB, USABLE
from seqpar.transports.collective.point_to_point import gather
from seqpar.vae.known import spatial_factor, why_changed, why_unknown
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.pixels import check_finite, in_range, scaled
from seqpar.vae.shared import own
from seqpar.vae.strips import Cut, Spread, channels_last, spread_of, wins

GRAPHS = 2  # kinds of calls that are kept as graphs, because each keeps the memory of a decoding
# Pixels that one rank decodes in a call that is captured. The host bounds strips: with AutoencoderKL on two H200s
# 1024 x 1024 pixels take 12.8 ms as a graph and 48.8 eagerly, and 2048 x 2048 take 49.2 and 54.4, so that larger
# pictures hide the launches. A graph of this size keeps 3 to 4 GiB.
PIXELS = 2048 * 1024
INPUT = "the VAE's input"


class Method:
    """What graphs run: a method of a VAE, or its like. Arguments have names, the input `INPUT`."""

    def __init__(self, compute: Callable[..., Any], check: Callable[[], None] = lambda: None) -> None:
        self.compute, self.check_delivered = compute, check

    def __call__(self, arguments: Mapping[str, Any], /) -> Any:
        """Return what the method returns."""
        z, others = input_and_others(arguments)
        return self.compute(z, **others)


def input_and_others(arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the input of a call and its other arguments by their names."""
    return arguments[INPUT], {name: value for name, value in arguments.items() if name != INPUT}


def named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; the first one is named `INPUT`."""
    arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    first = next(iter(arguments))
    return {INPUT if name == first else name: value for name, value in arguments.items()}


def arithmetic() -> tuple[object, ...]:
    """Return the settings of this process by which kernels are chosen, which a CUDA graph keeps as they were.

    TF32 is read by its newer name, which knows both; the older one raises an error if both were used.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    precision = (cudnn.conv.fp32_precision, cudnn.fp32_precision, matmul.fp32_precision)
    return *precision, cudnn.enabled, cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


def telling_capture(mesh: Mesh) -> Capture:
    """Return a capture of CUDA graphs that prints on rank 0 how much memory each graph keeps."""
    capture = CudaCapture()

    def captured(work: Callable[[], Any], warm_up: int) -> Captured:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(mesh.device)
        graph = capture(work, warm_up)
        torch.cuda.empty_cache()  # what the runs before the capture needed
        kept = (torch.cuda.memory_reserved(mesh.device) - before) / 2**30
        if mesh.is_main:
            print(f"seqpar: pictures of this size are decoded by a CUDA graph, which keeps {kept:.2f} GiB", flush=True)
        return graph

    return captured


SIDES, SIDES_OF_VIDEO = (32, 64), (16, 32)  # latent pixels along the sides of the two small strips
AMPLE = 8192  # bytes for a pixel, more than any decoder here needs; where they are free nothing is measured
COMMON_POOL = (0, 0)  # torch's id of the memory that is in no private pool


class Meter(Protocol):
    """Reads the memory of a rank's device, in bytes."""

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes that a call holds at once, beyond what was held before it."""
        ...

    def free(self) -> float:
        """Return the bytes that new tensors may take."""
        ...

    def total(self) -> float:
        """Return the bytes of the device."""
        ...


@dataclass(frozen=True)
class CudaMeter:
    """Reads what torch's allocator and the driver say of a GPU."""

    device: torch.device

    def peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes that a call holds beyond what was held before it; all where it ran out of memory."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        try:
            run()
        except torch.OutOfMemoryError:
            return int(self.total())
        return torch.cuda.max_memory_allocated(self.device) - before

    def free(self) -> float:
        """Return the free bytes of the GPU, and those that torch keeps unused.

        Memory in the private pools of CUDA graphs counts as used: only those graphs can use it.
        """
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == index]
        common = [each for each in segments if tuple(each["segment_pool_id"]) == COMMON_POOL]
        unused = sum(each["total_size"] - each["active_size"] for each in common)
        return USABLE * (torch.cuda.mem_get_info(self.device)[0] + unused)

    def total(self) -> float:
        """Return the bytes of the GPU that a program can use."""
        return USABLE * torch.cuda.get_device_properties(self.device).total_memory


@dataclass(frozen=True)
class Need:
    """The bytes that decoding one picture takes on a rank, beside weights: `fixed`, and `each` for a latent pixel."""

    fixed: float
    each: float

    def of(self, latent_pixels: int) -> float:
        """Return the bytes for a strip of so many latent pixels."""
        return self.fixed + self.each * latent_pixels


def measured(peak: Callable[[int], int], sides: tuple[int, int] = SIDES) -> Need:
    """Return what a decoding needs; peak(side): the bytes for a strip of side x side latent pixels."""
    peak(sides[0])  # the first call also allocates what libraries keep
    small, large = map(peak, sides)
    areas = [side * side for side in sides]
    each = max(0.0, (large - small) / (areas[1] - areas[0]))
    return Need(max(0.0, small - each * areas[0]), each)


class DecodingMemory:
    """The memory that decodings of a VAE take on the ranks of a mesh.

    meter: reads this rank's memory; with None nothing is refused. decode(latents, strips): decodes latents that are
    equal on all ranks, in strips or on this rank alone. say: prints a text once.
    """

    def __init__(
        self,
        vae: Any,
        mesh: Mesh,
        meter: Meter | None,
        decode: Callable[[Tensor, bool], object],
        say: Callable[[str], None],
    ) -> None:
        self._vae, self._mesh, self.meter, self._decode, self._say = vae, mesh, meter, decode, say
        self._needs: dict[tuple[bool, tuple[int, ...]], Need] = {}

    def refuse(
        self, spread: Spread, shape: tuple[int, ...], kept: Callable[[], int] | None = None, also: str = ""
    ) -> None:
        """Raise ValueError on every rank if one of them lacks memory to decode latents (N, C, ..., h, w) at once.

        Tiles are as small as their user wants, and are not checked. kept(): the bytes that a model will keep meanwhile,
        also those that it has not taken yet. also: what else the message says that a user may do.
        """
        strips = spread.name == "strips"
        if self.meter is None or spread.tiled or (not strips and getattr(self._vae, "use_tiling", False)):
            return
        reason = self._why_not()
        if reason is not None:
            self._say(f"sizes are not checked before the first step, because {reason}")
            return
        free = self.meter.free()
        if kept is not None:
            weights = sum(weight.nbytes for weight in self._vae.parameters())
            free = min(free, max(0.0, self.meter.total() - kept() - weights))
        free, pixels = min(self._mesh.collect(free, float)), [side * spatial_factor(self._vae) for side in shape[-2:]]
        if AMPLE * prod(pixels) * prod((shape[0], *shape[2:-2])) <= free:
            return
        cut = Cut.of(self._mesh.replica, *shape[-2:]) if strips else None
        area = shape[-2] * shape[-1] if cut is None else max(cut.sizes) * cut.other
        need = max(self._mesh.collect(shape[0] * self.need(self.meter, strips, shape[1:-2]).of(area), float))
        if need > free:
            raise ValueError("; ".join(filter(None, (refusal(pixels, need, free, spread), also))))

    def _why_not(self) -> str | None:
        """Return why small decodings cannot be made now, or None; the same on all ranks."""
        if self._vae.config.get("timestep_conditioning"):
            return "the VAE takes more than latents"
        here = all(self._mesh.collect(is_on(self._vae, self._mesh.device), bool))
        return None if here else "the VAE's weights are not on all GPUs"

    def need(self, meter: Meter, strips: bool, form: tuple[int, ...]) -> Need:
        """Return what decoding latents of (channels, frames) takes on this rank, from small decodings on all ranks."""

        def peak(side: int) -> int:
            shape = (1, *form, side * (self._mesh.replica.size if strips else 1), side)
            latents = torch.zeros(shape, dtype=self._vae.dtype, device=self._mesh.device)
            return meter.peak(lambda: self._decode(latents, strips))

        if (strips, form) not in self._needs:
            with torch.inference_mode(False), torch.no_grad():
                self._needs[strips, form] = measured(peak, SIDES if prod(form[1:]) == 1 else SIDES_OF_VIDEO)
        return self._needs[strips, form]


def is_on(vae: Any, device: torch.device) -> bool:
    """Return whether all weights of a VAE are on a device."""
    return all(weight.device == device for weight in vae.parameters())


def refusal(pixels: Sequence[int], need: float, free: float, spread: Spread) -> str:
    """Return why (height, width) pixels are refused whose decoding needs more bytes than are free, and what to do."""
    ranks, (height, width) = spread.ranks if spread.name == "strips" else 1, pixels
    more, share = ranks * ceil(need / max(free, 1.0)), max(0.0, free / need)
    advice = f"use more ranks, each of which decodes a strip (some {more})"
    if spread.name == "pictures":
        advice = f"use --vae strips, by which all {spread.ranks} ranks share each picture, or fewer pictures at once"
    smaller = "x".join(str(int(side * share**0.5) // 16 * 16) for side in pixels)
    return (
        f"got {height}x{width} pixels, whose decoding needs {need / GIB:.1f} GiB on "
        f"{f'each of {ranks} ranks' if ranks > 1 else 'one rank'}, expected at most the {free / GIB:.1f} GiB that are "
        f"free; {advice}, or --vae tiled (in Python vae='tiled'), diffusers' tiling, which leaves seams, or at most "
        f"some {smaller} pixels"
    )


FLAGS = ("use_tiling", "use_slicing", "training")  # of a VAE, which change what it computes
TUPLE = {"return_dict": False}
WHOLE = Axis("whole")  # divides nothing


class MeshVAE:
    """A VAE on the ranks of a mesh; every rank makes the same calls.

    transport: the name of the one that moves the edges of strips. capture: captures calls as CUDA graphs; None runs
    them eagerly. kernels: whether a rank that decodes alone computes norms by our kernels, as strips do.
    channels_last: compute in channels-last memory, in which the weights of convolutions are until `release`. meter:
    reads this rank's memory; with None no size is refused.
    unknown: why this VAE is not cut into strips, or None; hooks and attention processors are looked at in each call.
    wish: how pictures of our pipelines are spread where a call does not say it; see `seqpar.vae.strips`.
    """

    def __init__(
        self,
        vae: Any,
        mesh: Mesh,
        transport: str,
        capture: Capture | None = None,
        kernels: bool = False,
        channels_last: bool = False,
        meter: Meter | None = None,
    ) -> None:
        self.mesh, self.vae, self.wish = mesh, vae, "auto"
        self.unknown = self._never = why_unknown(vae)
        self._moves = load_transport(transport)
        cut = mesh.replica.size > 1 and self.unknown is None
        self._parallel = ParallelVAE(vae, mesh, self._moves, channels_last) if cut else None
        self._single = _on_one_rank(vae, mesh, channels_last) if kernels and self.unknown is None else None
        self._alone = Method(self._whole)
        self._strips = self._alone if self._parallel is None else Method(self._parallel.decode, self._moves.check)
        # all ranks that share a picture must agree on a capture; a rank that decodes alone also captures alone
        meshes = {self._strips: replace(mesh, sequence=mesh.replica), self._alone: Mesh.single(mesh.device)}
        self._graphs = {
            method: Graphs(each, capture, GRAPHS, tells=method is not self._alone or mesh.is_main)
            for method, each in meshes.items()
        }
        self._captures = capture is not None and self.unknown is None
        self._state: Hashable = None
        self._here = False
        self.memory = DecodingMemory(vae, mesh, meter, self._decoded, self._say)
        self._generation, self._said, self._calls = 0, set[str](), Calls()

    @staticmethod
    def of(vae: Any, mesh: Mesh, transport: str) -> MeshVAE:
        """Return a VAE on a mesh, with CUDA graphs and in the memory format that wins if it computes on a GPU."""
        cuda = mesh.device.type == "cuda"
        capture, meter = (telling_capture(mesh), CudaMeter(mesh.device)) if cuda else (None, None)
        return MeshVAE(vae, mesh, transport, capture, cuda, wins(vae, mesh.device), meter)

    def spread(self, count: int, shape: Sequence[int], wish: str = "auto") -> Spread:
        """Return how `count` latents of a shape, of which the last two sizes count, are decoded; see `spread_of`."""
        return spread_of(count, wish, self.mesh.world, self.mesh.data, lambda: self._why_whole(shape))

    def release(self) -> None:
        """Free graphs and exchanges and put the weights' format back, on all ranks at the same time.

        The next call makes new graphs and exchanges.
        """
        for graphs in self._graphs.values():
            graphs.release()
        for each in (self._parallel, self._single):
            if each is not None:
                each.release()

    # Pictures of our own pipelines -------------------------------------------------------------------------------

    def pictures(
        self, latents_NCHW: Tensor, on_image: Callable[[int], None] = lambda index: None, wish: str = "auto"
    ) -> Tensor:
        """Decode rank 0's latents (N, C, h, w) of a model into pictures (N, 3, H, W) in [0, 1], fp32, on every rank.

        on_image(index): called when this rank has queued the decoding of one of its images, or its part of one. wish:
        see `seqpar.vae.strips`. Raises FloatingPointError on every rank if a picture is not finite.
        """
        with tiling(self.vae, wish), torch.inference_mode(False), torch.no_grad():
            latents_NCHW = self._rank_0s({INPUT: latents_NCHW}).tensors[INPUT]
            spread = self.spread(len(latents_NCHW), latents_NCHW.shape, wish)
            self._say(spread.explained)
            shard, method = spread.shard(len(latents_NCHW)), self._strips if spread.name == "strips" else self._alone
            mine = latents_NCHW[shard.slice(spread.axis.rank)].to(self.vae.dtype)
            factor = spatial_factor(self.vae)
            sides = (side * factor for side in mine.shape[2:])
            images = torch.empty(len(mine), 3, *sides, device=mine.device)
            for index, (image, latent) in enumerate(zip(images, mine, strict=True)):
                form = form_of({INPUT: scaled(self.vae.config, latent[None]), **TUPLE})
                image.copy_(in_range(self._run(method, form)[0][0]))
                on_image(index)
            images = gather(images, spread.axis, shard.sizes) if spread.axis.size > 1 else images
        check_finite(images, self.vae.dtype)
        return images

    def check(self, count: int, shape: Sequence[int], kept: Callable[[], int]) -> None:
        """Raise ValueError, with what would fit, if `count` latents (C, h, w) cannot be decoded one by one as wished.

        kept(): the bytes that the model will keep while they are decoded, also those that it has not taken yet. Every
        rank must call this at the same time.
        """
        if self.unknown is None:
            self.memory.refuse(self.spread(count, shape, self.wish), (1, *shape), kept)

    # Calls like those of diffusers -------------------------------------------------------------------------------

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `vae.decode` returns for rank 0's arguments, whole on every rank."""
        arguments = named(own(self.vae, "decode"), args, kwargs)
        wrapped = arguments.pop("return_dict", True)
        with torch.inference_mode(False), torch.no_grad():
            form = self._rank_0s(arguments | TUPLE)
            spread = self._spread_of_rows(form.tensors[INPUT].shape, len(form.tensors) == 1)
            self._say(spread.explained)
            method = self._strips if spread.name == "strips" else self._alone
            sample = self._run(method, form) if spread.axis.size == 1 else self._by_rows(method, form, spread.axis)
        return DecoderOutput(*sample) if wrapped else sample

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `vae.encode` returns for rank 0's arguments, whole on every rank."""
        with torch.inference_mode(False), torch.no_grad():
            form = self._rank_0s(named(own(self.vae, "encode"), args, kwargs), "encode")
            reason = self._why_whole(form.tensors[INPUT].shape, encode=True)
            if self._parallel is None or exact.is_on() or reason is not None:
                many = self.mesh.world.size > 1
                self._say(Spread("whole", self.mesh.world.size, WHOLE, reason if many else None).explained)
                return Method(own(self.vae, "encode"))(form.whole)
            is_first = self._calls.is_first(("encode", form.tensors[INPUT].shape))
            with self.mesh.call(self.mesh.replica, "an encoding by strips", is_first):
                encoded = Method(self._parallel.encode)(form.whole)
            self._moves.check()
            return encoded

    def check_call(self, shape: Sequence[int] | None, also: str = "") -> None:
        """Raise ValueError, with what would fit, if `decode` cannot decode latents of a shape (N, C, ..., h, w).

        shape: None if it is not known. also: what else the message says that a user may do. Every rank must call this
        at the same time; raises the same ValueError on every rank if their shapes differ.
        """
        if self.memory.meter is None:
            return
        agree(self.mesh, {CALL: "prepares latents", "the shape that the VAE decodes": shape and tuple(shape)})
        if shape is not None and self.unknown is None:
            spread = self._spread_of_rows(shape)
            together = spread.axis.size == 1 and not getattr(self.vae, "use_slicing", False)
            self.memory.refuse(spread, (shape[0] if together else 1, *shape[1:]), also=also)

    def _spread_of_rows(self, shape: Sequence[int], alone: bool = True) -> Spread:
        """Return how rows are decoded; those that cannot be divided among ranks are decoded together.

        alone: whether the latents are the only tensor of the call; others may have rows of their own.
        """
        divisible = alone and self.unknown is None
        spread = self.spread(shape[0], shape, "auto" if divisible or exact.is_on() else "strips")
        if divisible and shape[0] >= spread.axis.size:
            return spread
        return replace(spread, name="strips" if spread.name == "strips" else "whole", axis=WHOLE)

    def _by_rows(self, method: Method, form: Form, axis: Axis) -> Any:
        """Return the results of all rows, which an axis divides."""
        x = form.tensors[INPUT]
        shard = Shard(len(x), axis.size)
        rows = [form_of(self._run(method, form.holding({INPUT: row}))) for row in x[shard.slice(axis.rank)].split(1)]
        mine = {path: torch.cat([each.tensors[path] for each in rows]) for path in rows[0].tensors}
        return rows[0].holding({path: gather(part, axis, shard.sizes) for path, part in mine.items()}).whole

    # One call ----------------------------------------------------------------------------------------------------

    def _rank_0s(self, arguments: Mapping[str, Any], what: str = "decode") -> Form:
        """Return rank 0's arguments on this rank's device; graphs of weights that moved are captured again."""
        form, flags = form_of(arguments), {name: getattr(self.vae, name, None) for name in FLAGS}
        shown = {**form.shown, **shapes(form.tensors), **{f"{name} of the VAE": flag for name, flag in flags.items()}}
        unknown, addresses = self._never or why_changed(self.vae), self._addresses()
        self._here, state = addresses is not None, (addresses, unknown, *flags.values(), exact.is_on(), arithmetic())
        shown |= {"weights on this device": self._here, "what keeps the VAE whole": unknown}
        shown |= {CALL: f"calls the VAE's {what}", "exact mode": exact.is_on()}
        shown |= {"channels-last weights of the VAE": channels_last(self.vae)}
        if agree(self.mesh, shown, vote=state != self._state):
            self._generation += 1
        self.unknown, self._state = unknown, state
        return form.holding(broadcast(self.mesh, form.tensors)).each(lambda x: x.to(self.mesh.device))

    def _addresses(self) -> tuple[int, ...] | None:
        """Return the weights' addresses, or None if not all are on this rank's device, where graphs would need them."""
        if not self._captures:
            return ()
        here = is_on(self.vae, self.mesh.device)
        return tuple(weight.data_ptr() for weight in self.vae.parameters()) if here else None

    def _why_whole(self, shape: Sequence[int], encode: bool = False) -> str | None:
        """Return why latents (or pictures, with `encode`) of this shape are not cut into strips, or None."""
        if self.unknown is None and self._parallel is not None:
            return self._parallel.why_whole(tuple(shape), encode)
        one = "one rank" if self.mesh.world.size == 1 else "each part of the data axis is one rank"
        return self.unknown or one

    def _run(self, method: Method, form: Form, eagerly: bool = False) -> Any:
        """Return the results of a call on this rank, or on all ranks that share it; a small one is a graph."""
        shape = form.tensors[INPUT].shape
        if not eagerly and self._is_small(shape, 1 if method is self._alone else self.mesh.replica.size):
            results = self._graphs[method].run(method, form, self._generation).whole
        else:
            axis, (z, others) = self.mesh.replica if method is self._strips else WHOLE, input_and_others(form.whole)
            with self.mesh.call(axis, "a decoding by strips", self._calls.is_first((axis.name, shape))):
                results = method.compute(z, **others)
        method.check_delivered()
        return results

    def _decoded(self, latents: Tensor, strips: bool) -> Any:
        """Return what `decode` makes of latents that are equal on all ranks, in strips or by this rank alone."""
        return self._run(self._strips if strips else self._alone, form_of({INPUT: latents, **TUPLE}), eagerly=True)

    def _whole(self, z: Tensor, **others: Any) -> Any:
        """Return what `vae.decode` returns for whole latents, on this rank alone; in tiles if the user wants those."""
        theirs = self.unknown is not None or getattr(self.vae, "use_tiling", False)
        decode = own(self.vae, "decode") if self._single is None or theirs else self._single.decode
        return decode(z, **others)

    def _is_small(self, shape: Sequence[int], ranks: int) -> bool:
        """Return whether a call is captured: pictures of few pixels. Videos keep caches of frames and are large."""
        if not self._captures or not self._here or self.unknown is not None or (len(shape) == 5 and shape[2] > 1):
            return False
        rows, (height, width), factor = shape[0], shape[-2:], spatial_factor(self.vae)
        return rows * height * width * factor**2 <= PIXELS * ranks

    def _say(self, text: str | None) -> None:
        """Print a text on rank 0, if it is one and was not printed before."""
        if text is not None and text not in self._said and self.mesh.is_main:
            print(f"seqpar: {text}", flush=True)
        self._said.add(text or "")


def _on_one_rank(vae: Any, mesh: Mesh, channels_last: bool) -> ParallelVAE:
    """Return the VAE on this rank alone, which has nothing to exchange."""
    return ParallelVAE(vae, Mesh.single(mesh.device), load_transport("collective"), channels_last)


@contextmanager
def tiling(vae: Any, wish: str) -> Iterator[None]:
    """While it is entered a VAE decodes in tiles if that is wished."""
    on = wish == "tiled" and not vae.use_tiling
    if on:
        vae.enable_tiling()
    try:
        yield
    finally:
        if on:
            vae.disable_tiling()
