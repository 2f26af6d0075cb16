"""`Decoding`: a VAE on the ranks of a mesh, which decodes and encodes by strips, small pictures as CUDA graphs.

It owns what is kept between pictures: the exchanges of the strips and at most two CUDA graphs. Diffusers pipelines
reach it through `vae.decode` (`seqpar.vae.shared`), pipelines of ours through `seqpar.vae.decoder.decode`.
When it wins: on several GPUs, because all of them decode a picture, and on one GPU for sizes whose kernels run faster
than the host launches them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from seqpar import exact
from seqpar.deadlines import Calls
from seqpar.engine.graphs import Capture, Captured, CudaCapture, Graphs
from seqpar.engine.promises import plain
from seqpar.engine.signature import Form, form_of
from seqpar.inputs import CALL, agree, broadcast, shapes
from seqpar.mesh import Axis, Mesh
from seqpar.planner.plan import load_transport
from seqpar.shard import Shard
from seqpar.transports.collective.point_to_point import gather
from seqpar.vae.decodable import Fit, check_decodable, fit_of, free_gib, kind_of, left_gib, total_gib
from seqpar.vae.decoder import Way, way_of
from seqpar.vae.dry import counted
from seqpar.vae.known import check_modules, spatial_factor, why_changed
from seqpar.vae.layout import channels_last, wins
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.shared import METHODS, own
from seqpar.vae.turns import STRIP_BYTES

GRAPHS = 2  # kinds of calls that are kept as graphs, because each keeps the memory of a decoding
# Pixels that one rank decodes in a call that is captured. The host bounds strips: with AutoencoderKL on two H200s
# 1024 x 1024 pixels take 12.8 ms as a graph and 48.8 eagerly, and 2048 x 2048 take 49.2 and 54.4, so that larger
# pictures hide the launches. A graph of this size keeps 3 to 4 GiB.
PIXELS = 2048 * 1024
ALWAYS_FITS = 0.05  # share of a device's memory; a decoding that needs less is not compared with what is free
FLAGS = ("use_tiling", "use_slicing", "training")  # of a VAE, which change what it computes
INPUT = "the VAE's input"
TUPLE = {"return_dict": False}
WHOLE = Axis("whole")  # divides nothing


class Work:
    """What graphs run: a method of a VAE, or its like. Arguments have names, the input `INPUT`."""

    def __init__(self, compute: Callable[..., Any], check: Callable[[], None] = lambda: None) -> None:
        self._compute, self.check_delivered = compute, check

    def __call__(self, arguments: Mapping[str, Any], /) -> Any:
        """Return what the method returns."""
        others = {name: value for name, value in arguments.items() if name != INPUT}
        return self._compute(arguments[INPUT], **others)


class Decoding:
    """A VAE on the ranks of a mesh; every rank makes the same calls. It is a `seqpar.vae.decoder.Decoder`.

    transport: the name of the one that moves the edges of strips. capture: captures calls as CUDA graphs; None runs
    them eagerly. kernels: whether a rank that decodes alone computes norms by our kernels, as strips do.
    channels_last: compute in channels-last memory, in which the weights of convolutions are until `release`.
    unknown: why this VAE is not cut into strips, or None; hooks and attention processors are looked at in each call.
    """

    def __init__(
        self,
        vae: Any,
        mesh: Mesh,
        transport: str,
        capture: Capture | None = None,
        kernels: bool = False,
        channels_last: bool = False,
    ) -> None:
        self.mesh, self.vae, self._never = mesh, vae, why_unknown(vae)
        self.unknown = self._never
        self._moves = load_transport(transport)
        cut = mesh.replica.size > 1 and self.unknown is None
        self._parallel = ParallelVAE(vae, mesh, self._moves, channels_last) if cut else None
        self._single = _on_one_rank(vae, mesh, channels_last) if kernels and self.unknown is None else None
        self._alone = Work(self._whole)
        self._on_strips = [each for each in (self._parallel, self._single) if each is not None]
        self._strips = self._alone if self._parallel is None else Work(self._parallel.decode, self._moves.check)
        # all ranks that share a picture must agree on a capture; a rank that decodes alone also captures alone
        places = {self._strips: replace(mesh, sequence=mesh.replica), self._alone: Mesh.single(mesh.device)}
        self._graphs = {
            work: Graphs(place, capture, GRAPHS, tells=work is not self._alone or mesh.is_main)
            for work, place in places.items()
        }
        self._captures = capture is not None and self.unknown is None
        self._state: Hashable = None
        self._here = self._turns = False
        self._total: float | None = None
        self._generation, self._told, self._calls = 0, set[str](), Calls()

    def way(self, count: int, shape: Sequence[int], wish: str = "auto") -> Way:
        """See `seqpar.vae.decoder.Decoder`."""
        return way_of(count, wish, self.mesh.world, self.mesh.data, lambda: self._why_whole(shape))

    def say(self, text: str | None) -> None:
        """Print a text on rank 0, if it is one and was not printed before."""
        if text is not None and text not in self._told and self.mesh.is_main:
            print(f"seqpar: {text}", flush=True)
        self._told.add(text or "")

    def check(self, count: int, shape: Sequence[int], model: Callable[[], int] | None = None) -> None:
        """Raise ValueError, with what would fit, if `count` latents (C, h, w) of a shape cannot be decoded one by one.

        model(): the bytes that the model will keep while they are decoded, also those that it has not taken yet.
        Every rank must call this at the same time.
        """
        self._fit(self.way(count, shape), (1, *shape), check_decodable, model)

    def check_call(self, shape: Sequence[int] | None, decodes: bool = True) -> None:
        """Raise ValueError, with what would fit, if `decode` cannot decode latents of a shape (N, C, ..., h, w).

        shape: None if it is not known. decodes: whether `decode` will be called; without it nothing is refused. Every
        rank must call this at the same time; raises the same ValueError on every rank if their arguments differ.
        """
        if total_gib(self.mesh.device) is None:
            return
        form = {"the shape that the VAE decodes": shape and tuple(shape)}
        agree(self.mesh, {CALL: f"prepares latents to {'decode' if decodes else 'return'}", **form})
        if shape is not None and decodes:
            way = self._way_of_rows(shape)
            rows = 1 if getattr(self.vae, "use_slicing", False) else shape[0]
            self._fit(way, _at_once(way, (rows, *shape[1:])), check_decodable)

    def prepare(self, way: Way, shape: Sequence[int]) -> None:
        """See `seqpar.vae.decoder.Decoder`."""
        fit = self._fit(way, tuple(shape), fit_of)
        self.say(None if fit is None else fit.told)
        self._turns = fit is not None and fit.turns
        for each in self._on_strips:
            each.strip_bytes = STRIP_BYTES if self._turns else None
            each.held_bytes = 0 if fit is None else fit.held_bytes

    def _fit(
        self, way: Way, shape: tuple[int, ...], fit: Callable[..., Fit], model: Callable[[], int] | None = None
    ) -> Fit | None:
        """Return how latents of a shape fit; None where that is not known, for tiles and for sizes that always fit."""
        tiled = way.name != "strips" and getattr(self.vae, "use_tiling", False)
        if self.unknown is not None or tiled or (total := self._smallest()) is None:
            return None
        ranks, kind = way.ranks if way.name == "strips" else 1, kind_of(self.vae)
        if counted(kind, shape, ranks).gib < ALWAYS_FITS * total:
            return None
        free = free_gib(self.mesh.device) or 0.0
        if model is not None:
            free = min(free, left_gib(total_gib(self.mesh.device) or total, model(), kind))
        return fit(kind, shape, ranks, min(self.mesh.collect(free, float)))

    def _smallest(self) -> float | None:
        """Return the GiB of the smallest of all ranks' devices, by which all decide alike; None on a CPU."""
        total = total_gib(self.mesh.device)
        if total is None:
            return None
        if self._total is None:
            self._total = min(self.mesh.collect(total, float))
        return self._total

    def release(self) -> None:
        """Free graphs and exchanges and put the weights' format back, on all ranks at the same time.

        The next call makes new graphs and exchanges.
        """
        for graphs in self._graphs.values():
            graphs.release()
        for each in self._on_strips:
            each.release()

    # Pictures of our own pipelines -------------------------------------------------------------------------------

    def rank_0s(self, latents_NCHW: Tensor) -> Tensor:
        """See `seqpar.vae.decoder.Decoder`."""
        return self._rank_0s({INPUT: latents_NCHW}).tensors[INPUT]

    def alone(self, latent_1Chw: Tensor) -> Tensor:
        """See `seqpar.vae.decoder.Decoder`."""
        return self._run(self._alone, form_of({INPUT: latent_1Chw, **TUPLE}))[0]

    def strips(self, latent_1Chw: Tensor) -> Tensor:
        """See `seqpar.vae.decoder.Decoder`."""
        return self._run(self._strips, form_of({INPUT: latent_1Chw, **TUPLE}))[0]

    # Calls like those of diffusers -------------------------------------------------------------------------------

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `vae.decode` returns for rank 0's arguments, whole on every rank."""
        arguments = _named(own(self.vae, "decode"), args, kwargs)
        wrapped = arguments.pop("return_dict", True)
        with torch.inference_mode(False), torch.no_grad():
            form = self._rank_0s(arguments | TUPLE)
            way = self._way_of_call(form)
            self.say(way.told)
            self.prepare(way, _at_once(way, form.tensors[INPUT].shape))
            made = self._by_rows(self._strips if way.name == "strips" else self._alone, form, way.axis)
        return DecoderOutput(*made) if wrapped else made

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `vae.encode` returns for rank 0's arguments, whole on every rank."""
        with torch.inference_mode(False), torch.no_grad():
            form = self._rank_0s(_named(own(self.vae, "encode"), args, kwargs), "encode")
            reason = self._why_whole(form.tensors[INPUT].shape, encode=True)
            if self._parallel is None or exact.is_on() or reason is not None:
                self.say(Way("whole", self.mesh.world.size, WHOLE, reason if self.mesh.world.size > 1 else None).told)
                return Work(own(self.vae, "encode"))(form.whole)
            self._parallel.strip_bytes = None  # that of the last decoding
            is_first = self._calls.is_first(("encode", form.tensors[INPUT].shape))
            with self.mesh.call(self.mesh.replica, "an encoding by strips", is_first):
                made = Work(self._parallel.encode)(form.whole)
            self._moves.check()
            return made

    def _way_of_call(self, form: Form) -> Way:
        """Return how the rows of a call are decoded; further tensors may have rows of their own."""
        return self._way_of_rows(form.tensors[INPUT].shape, len(form.tensors) == 1)

    def _way_of_rows(self, shape: Sequence[int], alone: bool = True) -> Way:
        """Return how rows are decoded; those that cannot be divided among ranks are decoded together."""
        divisible = alone and self.unknown is None
        way = self.way(shape[0], shape, "auto" if divisible or exact.is_on() else "strips")
        if divisible and shape[0] >= way.axis.size:
            return way
        return replace(way, name="strips" if way.name == "strips" else "whole", axis=WHOLE)

    def _by_rows(self, work: Work, form: Form, axis: Axis) -> Any:
        """Return the results of all rows, which an axis divides."""
        if axis.size == 1:
            return self._run(work, form)
        x = form.tensors[INPUT]
        shard = Shard(len(x), axis.size)
        made = [form_of(self._run(work, form.holding({INPUT: row}))) for row in x[shard.slice(axis.rank)].split(1)]
        mine = {path: torch.cat([each.tensors[path] for each in made]) for path in made[0].tensors}
        return made[0].holding({path: gather(part, axis, shard.sizes) for path, part in mine.items()}).whole

    # One call ----------------------------------------------------------------------------------------------------

    def _rank_0s(self, arguments: Mapping[str, Any], what: str = "decode") -> Form:
        """Return rank 0's arguments on this rank's device; graphs of weights that moved are captured again."""
        form, flags = form_of(arguments).each(plain), {name: getattr(self.vae, name, None) for name in FLAGS}
        shown = {**form.shown, **shapes(form.tensors), **{f"{name} of the VAE": flag for name, flag in flags.items()}}
        unknown, addresses = self._never or why_changed(self.vae), self._addresses()
        self._here, state = addresses is not None, (addresses, unknown, *flags.values(), exact.is_on(), _arithmetic())
        shown |= {"weights on this device": self._here, "what keeps the VAE whole": unknown}
        shown |= {CALL: f"calls the VAE's {what}", "exact mode": exact.is_on()}
        shown |= {"channels-last weights of the VAE": channels_last(self.vae)}
        if agree(self.mesh, shown, vote=state != self._state):
            self._generation += 1
        self.unknown, self._state = unknown, state
        return form.holding(broadcast(self.mesh, form.tensors)).each(lambda x: x.to(self.mesh.device))

    def _addresses(self) -> tuple[int, ...] | None:
        """Return the weights' addresses, or None if not all are on this rank's device, where graphs would need them."""
        weights = list(self.vae.parameters()) if self._captures else ()
        here = all(weight.device == self.mesh.device for weight in weights)
        return tuple(weight.data_ptr() for weight in weights) if here else None

    def _why_whole(self, shape: Sequence[int], encode: bool = False) -> str | None:
        """Return why latents (or pictures, with `encode`) of this shape are not cut into strips, or None."""
        if self.unknown is None and self._parallel is not None:
            return self._parallel.why_whole(tuple(shape), encode)
        one = "one rank" if self.mesh.world.size == 1 else "each part of the data axis is one rank"
        return self.unknown or one

    def _run(self, work: Work, form: Form) -> Any:
        """Return the results of a call on this rank, or on all ranks that share it; a small one is a graph."""
        if not self._turns and self._is_small(
            form.tensors[INPUT], 1 if work is self._alone else self.mesh.replica.size
        ):
            results = self._graphs[work].run(work, form, self._generation).whole
        else:
            axis = self.mesh.replica if work is self._strips else WHOLE
            is_first = self._calls.is_first((axis.name, form.tensors[INPUT].shape))
            with self.mesh.call(axis, "a decoding by strips", is_first):
                results = work(form.whole)
        work.check_delivered()
        return results

    def _whole(self, z: Tensor, **others: Any) -> Any:
        """Return what `vae.decode` returns for whole latents, on this rank alone; in tiles if the user wants those."""
        theirs = self.unknown is not None or getattr(self.vae, "use_tiling", False)
        decode = own(self.vae, "decode") if self._single is None or theirs else self._single.decode
        return decode(z, **others)

    def _is_small(self, x: Tensor, ranks: int) -> bool:
        """Return whether a call is captured: pictures of few pixels. Videos keep caches of frames and are large."""
        if not self._captures or not self._here or self.unknown is not None or (x.dim() == 5 and x.shape[2] > 1):
            return False
        rows, (height, width), factor = len(x), x.shape[-2:], spatial_factor(self.vae)
        return rows * height * width * factor**2 <= PIXELS * ranks


def of(vae: Any, mesh: Mesh, transport: str) -> Decoding:
    """Return the decoding of a VAE, with CUDA graphs and in the memory that wins there if it computes on a GPU."""
    cuda = mesh.device.type == "cuda"
    capture = _telling(CudaCapture(), mesh) if cuda else None
    return Decoding(vae, mesh, transport, capture, kernels=cuda, channels_last=wins(vae, mesh.device))


def why_unknown(vae: Any) -> str | None:
    """Return why a VAE is never cut into strips, or None: a type of module, or a decode that is not diffusers' own."""
    for name in filter(partial(hasattr, vae), METHODS):
        if getattr(own(vae, name), "__func__", None) is not getattr(type(vae), name):
            return f"its {name} was replaced by another function"
    try:
        check_modules(vae)
    except ValueError as error:
        return str(error)
    return None


def _arithmetic() -> tuple[object, ...]:
    """Return the settings of this process by which kernels are chosen, which a CUDA graph keeps as they were.

    TF32 is read by its newer name, which knows both; the older one raises an error if both were used.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    precision = (cudnn.conv.fp32_precision, cudnn.fp32_precision, matmul.fp32_precision)
    return *precision, cudnn.enabled, cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


def _at_once(way: Way, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape (N, C, ..., h, w) of what is decoded at once of the rows of a call."""
    return (1 if way.axis.size > 1 else shape[0], *shape[1:])


def _on_one_rank(vae: Any, mesh: Mesh, channels_last: bool) -> ParallelVAE:
    """Return the VAE on this rank alone, which has nothing to exchange."""
    return ParallelVAE(vae, Mesh.single(mesh.device), load_transport("collective"), channels_last)


def _named(method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names; the first one is named `INPUT`."""
    arguments = inspect.signature(method).bind(*args, **kwargs).arguments
    first = next(iter(arguments))
    return {INPUT if name == first else name: value for name, value in arguments.items()}


def _telling(capture: Capture, mesh: Mesh) -> Capture:
    """Return a capture of CUDA graphs that prints on rank 0 how much memory each graph keeps."""

    def told(work: Callable[[], Any]) -> Captured:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(mesh.device)
        made = capture(work)
        torch.cuda.empty_cache()  # what the runs before the capture needed
        kept = (torch.cuda.memory_reserved(mesh.device) - before) / 2**30
        if mesh.is_main:
            print(f"seqpar: pictures of this size are decoded by a CUDA graph, which keeps {kept:.2f} GiB", flush=True)
        return made

    return told
