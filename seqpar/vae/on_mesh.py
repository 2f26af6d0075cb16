"""`MeshVAE`: a VAE on the ranks of a mesh, which decodes and encodes in strips, small images as CUDA graphs.

It keeps the exchanges of the strips and at most two CUDA graphs between images. Diffusers pipelines reach it through
`vae.decode` (`seqpar.vae.shared`), seqpar's own pipelines through `MeshVAE.pictures`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from seqpar.graphs.graphs import Capture, Captured, CudaCapture, Graphs
from seqpar.graphs.signature import Form, form_of
from seqpar.loading.parking import bytes_on
from seqpar.mesh import exact
from seqpar.mesh.inputs import CALL, agree, broadcast, shapes
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.mesh.shard import Shard
from seqpar.mesh.watch import Calls
from seqpar.planner.plan import load_transport
from seqpar.planner.predict import GIB
from seqpar.transports.collective import gather
from seqpar.types.say import say
from seqpar.vae.known import decoding_bytes, spatial_factor, why_changed, why_unknown
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.shared import original
from seqpar.vae.strips import Cut, Spread, channels_last, spread_of, wins

GRAPHS = 2  # kinds of calls that are kept as graphs, because each keeps the memory of a decoding
# Pixels that one rank decodes in a call that is captured. The host bounds strips: with AutoencoderKL on two H200s
# 1024 x 1024 pixels take 12.8 ms as a graph and 48.8 eagerly, and 2048 x 2048 take 49.2 and 54.4, so that larger
# images hide the launches. A graph of this size keeps 3 to 4 GiB.
PIXELS = 2048 * 1024
# Share of a GPU for weights and decoding. CUDA's context, NCCL, exchanges, and the graphs of transformer and VAE take
# the rest.
SHARE = 0.85
INPUT = "the VAE's input"
FLAGS = ("use_tiling", "use_slicing", "training")  # of a VAE, which change what it computes
TUPLE = {"return_dict": False}
WHOLE = Axis("whole")  # divides nothing


class MeshVAE:
    """A VAE on the ranks of a mesh. All methods but `spread` are collective: call them on all ranks.

    transport: the name of the one that moves the edges of strips. capture: captures calls as CUDA graphs; None runs
    them eagerly. kernels: whether a rank that decodes alone computes norms by seqpar's kernels, as strips do.
    channels_last: compute in channels-last memory; the weights of convolutions have this format until `release`. left:
    returns the bytes that the loaded pipeline leaves on this rank (`bytes_left`); None does not check sizes.
    unknown: why this VAE is not cut into strips, or None; every call checks hooks and attention processors.
    mode: how images of seqpar's own pipelines are spread; see `seqpar.vae.strips`.
    """

    def __init__(
        self,
        vae: Any,
        mesh: Mesh,
        transport: str,
        capture: Capture | None = None,
        kernels: bool = False,
        channels_last: bool = False,
        left: Callable[[], float] | None = None,
    ) -> None:
        self.mesh, self.vae, self.mode = mesh, vae, "auto"
        self.unknown = self._never = why_unknown(vae)
        self._moves = load_transport(transport)
        self._parallel = self._single = None
        if self.unknown is None and mesh.replica.size > 1:
            self._parallel = ParallelVAE(vae, mesh, self._moves, channels_last)
        if self.unknown is None and kernels:  # the VAE on this rank alone, which has nothing to exchange
            self._single = ParallelVAE(vae, Mesh.single(mesh.device), load_transport("collective"), channels_last)
        # all ranks that share an image must agree on a capture; a rank that decodes alone also captures alone
        self._strips = Graphs(replace(mesh, sequence=mesh.replica), capture, self._moves.check, GRAPHS)
        self._alone = Graphs(Mesh.single(mesh.device), capture, lambda: None, GRAPHS, mesh.is_main)
        self._captures = capture is not None and self.unknown is None
        self._state: Hashable = None
        self._on_device = False
        self._bytes_left, self._left = left, None
        self._generation, self._printed, self._calls = 0, set[str](), Calls()

    @staticmethod
    def of(vae: Any, mesh: Mesh, transport: str, modules: Callable[[], Iterable[nn.Module]]) -> MeshVAE:
        """Return a VAE on a mesh; on a GPU with CUDA graphs, kernels, and the memory format that is faster.

        modules: returns the modules of the pipeline, whose weights share the GPU with decoding.
        """
        device = mesh.device
        if device.type != "cuda":
            return MeshVAE(vae, mesh, transport)
        capture = capture_with_line(mesh)
        return MeshVAE(vae, mesh, transport, capture, True, wins(vae, device), lambda: bytes_left(device, modules()))

    def release(self) -> None:
        """Free graphs and exchanges and put the weights' format back. The next call makes new ones."""
        for part in (self._strips, self._alone, self._parallel, self._single):
            if part is not None:
                part.release()

    # Whole, in strips or in tiles --------------------------------------------------------------------------------

    def spread(self, count: int, shape: Sequence[int], mode: str = "auto", together: bool = False) -> Spread:
        """Return how `count` latents (C, ..., h, w) are decoded. together: in one call, unless ranks divide them.

        `spread_of` decides; what does not fit next to the weights is decoded in strips, or else in tiles. The result
        depends on sizes and weights alone, so that every rank and call decodes a size in the same way. The first call
        is collective. Raises ValueError where only tiles fit, in exact mode and for a VAE without tiling.
        """

        def spread(mode: str) -> Spread:
            return spread_of(count, mode, self.mesh.world, self.mesh.data, lambda: self._why_whole(shape))

        choice, refused = spread(mode), ""
        if self._bytes_left is None or choice.tiled or self.unknown is not None:
            return choice
        if self._left is None:
            self._left = min(self.mesh.collect(self._bytes_left(), float))
        choices = [choice, spread("strips")] if mode == "auto" and not exact.is_on() else [choice]
        for choice in choices:
            cut = Cut.of(self.mesh.replica, *shape[-2:]) if choice.name == "strips" else None
            if cut is None and getattr(self.vae, "use_tiling", False):
                return choice
            rows, columns = shape[-2:] if cut is None else (max(cut.sizes), cut.other)
            at_once = count if together and not 1 < choice.axis.size <= count else 1
            need = at_once * decoding_bytes(self.vae, (*shape[:-2], rows, columns))
            if need <= self._left:
                return choice
            height, width = (side * spatial_factor(self.vae) for side in shape[-2:])
            ranks = f"each of {choice.ranks} ranks" if cut is not None else "one rank"
            refused = f"decoding {height}x{width} pixels needs {need / GIB:.1f} GiB on {ranks}"
        reason = f"{refused}, and the weights leave {self._left / GIB:.1f} GiB"
        if exact.is_on():
            raise ValueError(
                f"{reason}. Exact mode decodes whole images: use a smaller size, or --vae tiled (vae='tiled'), which "
                f"leaves seams"
            )
        if not hasattr(self.vae, "enable_tiling"):
            raise ValueError(f"{reason}. Use a smaller size or more ranks: {type(self.vae).__name__} has no tiling")
        return replace(spread("tiled"), why=reason)

    def check(self, count: int, shape: Sequence[int]) -> None:
        """Raise ValueError if `pictures` cannot decode `count` latents (C, h, w); print a choice of tiles."""
        self._say(self.spread(count, shape, self.mode).explained)

    def check_call(self, shape: Sequence[int]) -> None:
        """Raise ValueError if `decode` cannot decode latents (N, C, ..., h, w); print a choice of tiles.

        Raises the same ValueError on every rank if their shapes differ.
        """
        if self._bytes_left is not None:
            agree(self.mesh, {CALL: "prepares latents", "the shape that the VAE decodes": tuple(shape)})
            self._say(self._spread_of_rows(shape).explained)

    def _spread_of_rows(self, shape: Sequence[int], alone: bool = True) -> Spread:
        """Return how rows (N, C, ..., h, w) are decoded; those that ranks cannot divide are decoded together.

        alone: whether the latents are the only tensor of the call; others may have their own rows.
        """
        divisible = alone and self.unknown is None
        together = not getattr(self.vae, "use_slicing", False)
        spread = self.spread(shape[0], shape[1:], "auto" if divisible or exact.is_on() else "strips", together)
        if divisible and shape[0] >= spread.axis.size:
            return spread
        return replace(spread, name="strips" if spread.name == "strips" else "whole", axis=WHOLE)

    def _why_whole(self, shape: Sequence[int], encode: bool = False) -> str | None:
        """Return why latents (or images, with `encode`) of this shape are not cut into strips, or None."""
        if self.unknown is None and self._parallel is not None:
            return self._parallel.why_whole(tuple(shape), encode)
        one = "one rank" if self.mesh.world.size == 1 else "each part of the data axis is one rank"
        return self.unknown or one

    # Images of seqpar's own pipelines ----------------------------------------------------------------------------

    def pictures(self, latents_NCHW: Tensor, on_image: Callable[[int], None] = lambda index: None) -> Tensor:
        """Decode rank 0's latents (N, C, h, w) of a model into images (N, 3, H, W) in [0, 1], fp32, on every rank.

        on_image(index): called when this rank has queued the decoding of one of its images, or its part of one. Raises
        FloatingPointError on every rank if an image is not finite.
        """
        with torch.inference_mode(False), torch.no_grad():
            latents_NCHW = self._from_rank_0({INPUT: latents_NCHW}).tensors[INPUT]
            count = len(latents_NCHW)
            spread = self.spread(count, latents_NCHW.shape[1:], self.mode)
            self._say(spread.explained)
            shard = spread.shard(count)
            local_NCHW = latents_NCHW[shard.slice(spread.axis.rank)].to(self.vae.dtype)
            sides = (side * spatial_factor(self.vae) for side in local_NCHW.shape[2:])
            images, config = torch.empty(len(local_NCHW), 3, *sides, device=local_NCHW.device), self.vae.config
            for index, (image, latent) in enumerate(zip(images, local_NCHW, strict=True)):
                latent_1CHW = latent[None] / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
                decoded = self._run(spread, form_of({INPUT: latent_1CHW, **TUPLE}))[0][0].float()
                # where a value is infinite, the difference is NaN, which no clamp hides
                image.copy_((decoded / 2 + 0.5).clamp(0, 1) + (decoded - decoded))
                on_image(index)
            images = gather(images, spread.axis, shard.sizes) if spread.axis.size > 1 else images
        refuse_infinite(images.isfinite().all(dim=3).all(dim=2).all(dim=1).tolist(), self.vae.dtype)
        return images

    # Calls like diffusers' ---------------------------------------------------------------------------------------

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `vae.decode` returns for rank 0's arguments, whole on every rank."""
        arguments = self._by_name("decode", args, kwargs)
        wrapped = arguments.pop("return_dict", True)
        with torch.inference_mode(False), torch.no_grad():
            form = self._from_rank_0(arguments | TUPLE)
            x = form.tensors[INPUT]
            spread = self._spread_of_rows(x.shape, len(form.tensors) == 1)
            self._say(spread.explained)
            if spread.axis.size == 1:
                sample = self._run(spread, form)
            else:
                shard = Shard(len(x), spread.axis.size)
                local = x[shard.slice(spread.axis.rank)].split(1)
                rows = [form_of(self._run(spread, form.holding({INPUT: row}))) for row in local]
                joined = {path: torch.cat([row.tensors[path] for row in rows]) for path in rows[0].tensors}
                gathered = {path: gather(part, spread.axis, shard.sizes) for path, part in joined.items()}
                sample = rows[0].holding(gathered).whole
        return DecoderOutput(*sample) if wrapped else sample

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `vae.encode` returns for rank 0's arguments, whole on every rank."""
        with torch.inference_mode(False), torch.no_grad():
            form = self._from_rank_0(self._by_name("encode", args, kwargs), "encode")
            shape = form.tensors[INPUT].shape
            reason = self._why_whole(shape, encode=True)
            if self._parallel is None or exact.is_on() or reason is not None:
                many = self.mesh.world.size > 1
                self._say(Spread("whole", self.mesh.world.size, WHOLE, reason if many else None).explained)
                return _called(original(self.vae, "encode"), form)
            with self.mesh.call(self.mesh.replica, "an encoding by strips", self._calls.is_first(("encode", shape))):
                encoded = _called(self._parallel.encode, form)
            self._moves.check()
            return encoded

    # One call ----------------------------------------------------------------------------------------------------

    def _by_name(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        arguments = inspect.signature(original(self.vae, method)).bind(*args, **kwargs).arguments
        first = next(iter(arguments))
        return {INPUT if name == first else name: value for name, value in arguments.items()}

    def _from_rank_0(self, arguments: Mapping[str, Any], what: str = "decode") -> Form:
        """Return rank 0's arguments on this rank's device; graphs of weights that moved are captured again."""
        form, flags = form_of(arguments), {name: getattr(self.vae, name, None) for name in FLAGS}
        shown = {**form.shown, **shapes(form.tensors), **{f"{name} of the VAE": flag for name, flag in flags.items()}}
        unknown = self._never or why_changed(self.vae)
        # graphs need the weights' addresses, on this rank's device
        weights = [*self.vae.parameters()]
        self._on_device = not self._captures or all(weight.device == self.mesh.device for weight in weights)
        graphed = self._captures and self._on_device
        addresses = tuple(weight.data_ptr() for weight in weights) if graphed else None
        state = (self._on_device, addresses, unknown, *flags.values(), exact.is_on(), arithmetic())
        shown |= {"weights on this device": self._on_device, "what keeps the VAE whole": unknown}
        shown |= {CALL: f"calls the VAE's {what}", "exact mode": exact.is_on()}
        shown |= {"channels-last weights of the VAE": channels_last(self.vae)}
        if agree(self.mesh, shown, vote=state != self._state):
            self._generation += 1
        self.unknown, self._state = unknown, state
        return form.holding(broadcast(self.mesh, form.tensors)).each(lambda x: x.to(self.mesh.device))

    def _run(self, spread: Spread, form: Form) -> Any:
        """Decode on this rank, or on all ranks that share an image; a small image is a graph."""
        shape, compute, graphs, axis = form.tensors[INPUT].shape, self._whole, self._alone, WHOLE
        if spread.name == "strips" and self._parallel is not None:
            compute, graphs, axis = self._parallel.decode, self._strips, self.mesh.replica
        compute = partial(_called, compute)
        with tiling(self.vae, spread.tiled):
            if not spread.tiled and self._is_small(shape, axis.size):
                results = graphs.run(compute, form, self._generation).whole
            else:
                with self.mesh.call(axis, "a decoding by strips", self._calls.is_first((axis.name, shape))):
                    results = compute(form)
        if axis is not WHOLE:
            self._moves.check()
        return results

    def _whole(self, z: Tensor, **others: Any) -> Any:
        if self._single is None or self.unknown is not None or getattr(self.vae, "use_tiling", False):
            return original(self.vae, "decode")(z, **others)
        return self._single.decode(z, **others)

    def _is_small(self, shape: Sequence[int], ranks: int) -> bool:
        """Return whether a call is captured: images of few pixels. Videos keep caches of frames and are large."""
        if not self._captures or not self._on_device or self.unknown is not None or (len(shape) == 5 and shape[2] > 1):
            return False
        rows, (height, width), factor = shape[0], shape[-2:], spatial_factor(self.vae)
        return rows * height * width * factor**2 <= PIXELS * ranks

    def _say(self, text: str | None) -> None:
        if text is not None and text not in self._printed and self.mesh.is_main:
            say(text)
        self._printed.add(text or "")


def _called(compute: Callable[..., Any], call: Form) -> Any:
    """Call a method of a VAE. Arguments have names; the first one is named `INPUT`."""
    arguments: Mapping[str, Any] = call.whole
    return compute(arguments[INPUT], **{name: value for name, value in arguments.items() if name != INPUT})


def bytes_left(device: torch.device, modules: Iterable[nn.Module]) -> float:
    """Return the bytes of a GPU that the weights of modules leave for decoding.

    Memory that happens to be free does not count: it must not decide how an image is decoded.
    """
    return SHARE * torch.cuda.get_device_properties(device).total_memory - bytes_on(device, modules)


def arithmetic() -> tuple[object, ...]:
    """Return the settings of this process by which kernels are chosen, which a CUDA graph keeps as they were."""
    # TF32 is read by its newer name, which knows both; the older one raises an error if both were used
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    precision = (cudnn.conv.fp32_precision, cudnn.fp32_precision, matmul.fp32_precision)
    return *precision, cudnn.enabled, cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()


def capture_with_line(mesh: Mesh) -> Capture:
    """Return a capture of CUDA graphs that prints on rank 0 how much memory each graph keeps."""
    capture = CudaCapture()

    def captured(work: Callable[[], Any], warm_up: int) -> Captured:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(mesh.device)
        graph = capture(work, warm_up)
        torch.cuda.empty_cache()  # what the runs before the capture needed
        reserved = (torch.cuda.memory_reserved(mesh.device) - before) / GIB
        if mesh.is_main:
            say(f"captured VAE decode as a CUDA graph ({reserved:.2f} GiB reserved)")
        return graph

    return captured


@contextmanager
def tiling(vae: Any, on: bool) -> Iterator[None]:
    """While it is entered a VAE decodes in tiles, if `on`."""
    on = on and not vae.use_tiling
    if on:
        vae.enable_tiling()
    try:
        yield
    finally:
        if on:
            vae.disable_tiling()


def refuse_infinite(finite: Sequence[bool], dtype: torch.dtype) -> None:
    """Raise FloatingPointError if one of the results is not finite: a file would show NaN as black."""
    bad = [number for number, right in enumerate(finite, 1) if not right]
    if bad:
        raise FloatingPointError(
            f"the decoder made pixels that are not finite in {len(bad)} of {len(finite)} results (the first is number "
            f"{bad[0]}) in {str(dtype).removeprefix('torch.')}; try dtype fp32 or bf16, or check the weights and the "
            f"decoder's scaling_factor"
        )


def preview(latents_NCHW: Tensor, factor: int) -> Tensor:
    """Return images (N, 3, H, W) in [0, 1] of the first three latent channels, for models without a decoder."""
    colours = latents_NCHW[:, :3].float()
    colours = colours if colours.shape[1] == 3 else colours[:, :1].expand(-1, 3, -1, -1)
    low, high = colours.amin(dim=(1, 2, 3), keepdim=True), colours.amax(dim=(1, 2, 3), keepdim=True)
    scaled = (colours - low) / (high - low).clamp_min(1e-6)
    return scaled.repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
