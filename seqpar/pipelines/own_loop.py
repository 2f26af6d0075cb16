"""What all pipelines share once their weights are loaded: mesh, sampler and decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import Tensor

from seqpar.loading.vae import load_vae
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.loop import Sampler
from seqpar.mesh.inputs import from_rank_0
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.files import Files
from seqpar.pipelines.texts import Encode, Texts
from seqpar.planner.plan import Plan, make, named_mesh, wished_images, work_of
from seqpar.planner.predict import Load, predict
from seqpar.planner.search import Wish
from seqpar.planner.settled import settled
from seqpar.types.arguments import check_floats
from seqpar.vae.on_mesh import MeshVAE
from seqpar.vae.pixels import preview
from seqpar.vae.spread import WISHES, Spread


@dataclass(frozen=True)
class Loaded:
    """A loaded pipeline on a mesh. `vae` is diffusers' AutoencoderKL; without one, pictures are previews of latents.

    It keeps the last run's CUDA graph for the next compatible call: use it in a `with` block, or call `release` before
    the process group ends.
    """

    dit: DistributedDiT
    files: Any
    vae: Any

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Free the buffers, the exchanges and the CUDA graphs that are kept between calls."""
        self.sampler.release()
        if "on_mesh" in vars(self):
            self.on_mesh.release()

    @cached_property
    def sampler(self) -> Sampler:
        """Return the reusable sampler of this pipeline."""
        return Sampler(self.dit)

    @cached_property
    def on_mesh(self) -> MeshVAE:
        """Return the VAE on the ranks of the mesh, which keeps exchanges and CUDA graphs between pictures."""
        return MeshVAE.of(self.vae, self.dit.mesh, self.dit.transport.name)

    def set_vae(self, wish: str) -> None:
        """Spread pictures over ranks in this way from now on: "auto", "strips", "pictures" or "tiled".

        It decides which sizes are refused before sampling, and how `decode` works. "tiled" is diffusers' tiling, which
        needs little memory and leaves seams. Every rank must call this with the same wish.
        """
        _check_wish(wish)
        if self.vae is not None:
            self.on_mesh.wish = wish

    def decode(
        self, latents_NCHW: Tensor, on_image: Callable[[int], None] = lambda index: None, wish: str | None = None
    ) -> Tensor:
        """Return pictures (N, 3, H, W) in [0, 1] on every rank, from rank 0's latents.

        on_image: see `MeshVAE.pictures`. wish: how pictures are spread in this call; None takes that of `set_vae`.
        """
        self.dit.mesh.together(lambda: self._check_latents(latents_NCHW, wish))
        if self.vae is None:
            return preview(from_rank_0(self.dit.mesh, {"latents": latents_NCHW})["latents"], self.files.factor)
        return self.on_mesh.pictures(latents_NCHW, on_image, self.on_mesh.wish if wish is None else wish)

    def _check_latents(self, latents_NCHW: object, wish: str | None) -> None:
        """Raise ValueError for what is no latents of this decoder."""
        if wish is not None:
            _check_wish(wish)
        check_floats("latents", latents_NCHW)
        assert isinstance(latents_NCHW, Tensor)
        channels, shape = None if self.vae is None else self.vae.config.latent_channels, tuple(latents_NCHW.shape)
        if len(shape) != 4 or 0 in shape or channels not in (None, shape[1]):
            raise ValueError(f"got latents of shape {shape}, expected (N, {channels or 'C'}, H, W)")

    def check_decodable(self, count: int, latent: tuple[int, int], load: Callable[[], Load]) -> None:
        """Raise ValueError, with what would fit, if `count` latents of a size cannot be decoded as `set_vae` says.

        latent: (height, width). load: returns the sampler's. What the sampler keeps is not there for decoding, also
        where it has not taken it yet. Every rank must call this at the same time, with the same numbers.
        """

        def model() -> int:
            ranking, mesh, run = self.dit.plan.ranking, self.dit.mesh, load()
            run = replace(run, tokens=max(run.tokens, mesh.sequence.size), images=max(run.images, mesh.data.size))
            return predict(ranking.work, run, self.dit.plan.layout, ranking.rates).memory.total

        if self.vae is not None:
            self.on_mesh.check(count, (self.vae.config.latent_channels, *latent), model)

    def way(self, count: int, pixels: tuple[int, int], wish: str = "auto") -> Spread | None:
        """Return how `decode` decodes `count` pictures of a size, or None for previews."""
        factor = self.files.factor
        return None if self.vae is None else self.on_mesh.spread(count, [side // factor for side in pixels], wish)


def _check_wish(wish: str) -> None:
    if wish not in WISHES:
        raise ValueError(f"got wish={wish!r}, expected {', '.join(WISHES)}")


@dataclass(frozen=True)
class FromTexts(Loaded):
    """A loaded pipeline that makes pictures of texts; see `Loaded`. A family adds `latents` and hooks.

    `files` says where the parts (`source`) and the decoder (`decoder`) are.
    """

    texts: Texts

    @classmethod
    def load(
        cls,
        files: Any,
        mesh: Mesh | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        wish: Wish | None = None,
        plan: Plan | None = None,
        prompts: Sequence[str] = (),
        on_prompt: Callable[[int], None] = lambda index: None,
    ) -> Self:
        """Load the weights of transformer and decoder; every rank must call this at the same time.

        wish: the caller's choice of strategy, local attention and transport; the planner chooses the rest for one
        picture with one branch. plan: a plan that was made before. prompts: texts that rank 0 encodes first, so that
        the encoders are gone before other weights load; later calls of `latents` may name others. on_prompt(index):
        called on rank 0 when a prompt is encoded.
        """
        plan, mesh = placed(files, dtype, mesh, wish, plan)
        texts = cls._texts(files, mesh, dtype, frees=True)

        def read() -> Any:
            texts.encode(prompts, on_prompt)
            return None if files.source is None else load_vae(files.decoder, dtype, mesh.device)

        vae = mesh.together(read)
        model = files.blueprint.build(dtype, mesh.device, 0, mesh)  # each rank reads a share of the file
        return cls(DistributedDiT(model, mesh, plan=plan), files, vae, texts)

    @classmethod
    def of(
        cls,
        pipe: Any,
        mesh: Mesh | str | None = None,
        *,
        wish: Wish | None = None,
        plan: Plan | None = None,
        **own: Any,
    ) -> Self:
        """Return a pipeline of the parts of diffusers' pipeline in memory; its text encoders stay with it.

        The transformer's weights are copied, in its dtype. own: arguments of `files_of`; see `load` for the others.
        """
        files, dtype = cls.files_of(pipe, **own)
        plan, mesh = placed(files, dtype, mesh, wish, plan)
        model = files.blueprint.build(dtype, mesh.device)
        texts, vae = cls._texts(files, mesh, dtype, frees=False), pipe.vae.to(mesh.device)
        return cls(DistributedDiT(model, mesh, plan=plan), files, vae, texts)

    @classmethod
    def files_of(cls, pipe: Any, **own: Any) -> tuple[Any, torch.dtype]:
        """Return what `load` takes of diffusers' pipeline in memory, and the dtype of its transformer."""
        raise NotImplementedError

    @staticmethod
    def text_shapes(files: Any) -> Mapping[str, tuple[int, ...]]:
        """Return name -> shape of each tensor of a prompt."""
        raise NotImplementedError

    @staticmethod
    def encoder(files: Any, device: torch.device, dtype: torch.dtype) -> Encode:
        """Return a function that encodes one prompt, and holds the encoders of `files.source` on the device."""
        raise NotImplementedError

    @classmethod
    def _texts(cls, files: Any, mesh: Mesh, dtype: torch.dtype, *, frees: bool) -> Texts:
        """Return the prompts of these files as tensors, without any yet. frees: see `Texts`."""
        ready = None if files.source is None else partial(cls.encoder, files, mesh.device, dtype)
        return Texts(cls.text_shapes(files), ready, mesh, dtype, frees=frees)


def placed(
    files: Files, dtype: torch.dtype, mesh: Mesh | str | None, wish: Wish | None, plan: Plan | None
) -> tuple[Plan, Mesh]:
    """Return the caller's plan, or a new one for one picture with a branch for each rank of the cfg axis; and its mesh.

    Every rank must call this at the same time.
    """
    ranks = mesh if isinstance(mesh, Mesh) else Mesh.joined()
    own, names = ranks.together(lambda: named_mesh(mesh, wish or Wish()))
    if plan is None:
        load = files.smallest(dtype)((own.cfg.size if own is not None else names.axes.get("cfg", 1)) > 1)
        load = replace(load, images=wished_images(names, ranks))
        plan = make(work_of(files.blueprint.config), load, dtype, ranks, names, own)
    return plan, settled(plan, own)


def drawn_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which diffusers' pipelines draw the noise of a model of this dtype."""
    return dtype if dtype.itemsize < torch.float32.itemsize else torch.float32
