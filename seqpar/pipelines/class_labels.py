"""Makes pictures from class names: labels, noise, sampling, decoding. It checks everything before it loads weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import Tensor

from seqpar.distributed import DistributedDiT
from seqpar.inputs import from_rank_0
from seqpar.mesh import Mesh
from seqpar.pipelines.pictures import to_pil
from seqpar.planner.plan import Plan, make, work_of
from seqpar.planner.predict import TABLE_BYTES, Load
from seqpar.planner.search import Wish
from seqpar.sampling.guidance import Guidance
from seqpar.sampling.loop import Sampler, draw_noise
from seqpar.sampling.schedules import FAILURES
from seqpar.sampling.steppers import check_eta, decide, why_not_driven
from seqpar.vae.decoder import check_vae, decode, load_vae, preview, vae_factor
from seqpar.weights.checkpoint import read_json
from seqpar.weights.find import Blueprint, locate, resolve

BUILTIN = Path(__file__).parents[1] / "assets" / "emoji-dit"
NO_VAE_FACTOR = 8  # factor of the autoencoder that published DiTs are trained with
# the scheduler of the original DiT and Large-DiT, for models without a pipeline folder
DDIM_DEFAULT = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}


@dataclass(frozen=True)
class Files:
    """The checked files of a pipeline, before any weights are loaded.

    blueprint: the transformer. folder: the pipeline folder with the other parts, or None. vae: the config of the
    decoder, or None. labels: class number -> its names, of which captions show the first.
    """

    blueprint: Blueprint
    folder: Path | None
    vae: Any
    labels: Mapping[int, tuple[str, ...]]

    @staticmethod
    def locate(name: str | Path) -> Files:
        """Find and check the files of a model.

        name: "builtin", a diffusers pipeline folder or hub id, or any name that `seqpar.weights.find.locate` accepts,
        which then has no decoder. Raises ValueError if a file does not fit; reads only the headers of weight files.
        """
        path = BUILTIN if str(name) == "builtin" else resolve(name)
        blueprint = locate(name if path is None else path)
        if path is None or not (path / "model_index.json").is_file():
            return Files(blueprint, None, None, {})
        index, channels = read_json(path / "model_index.json"), blueprint.config.in_channels
        # as in diffusers, a part that a pipeline lacks is absent or [null, null]
        vae = check_vae(path / "vae") if (index.get("vae") or [None])[0] else None
        if vae is not None and vae.latent_channels != channels:
            raise ValueError(f"got a decoder of {vae.latent_channels} latent channels, expected the model's {channels}")
        return Files(blueprint, path, vae, _labels(index, blueprint.config.num_classes))

    @property
    def factor(self) -> int:
        """Return the number of pixels along each side of a latent pixel."""
        return NO_VAE_FACTOR if self.vae is None else vae_factor(self.vae)

    def class_ids(self, classes: Sequence[str | int]) -> list[int]:
        """Return the class number of each name, whole label ("tench, Tinca tinca") or number.

        Raises ValueError for an unknown class, with similar names, and for a name of several classes, with their
        numbers.
        """
        numbers, names = self.labels.keys() or range(self.blueprint.config.num_classes), dict[str, set[int]]()
        if all(isinstance(label, int) and label in numbers for label in classes):
            return list(map(int, classes))
        for number, own in self.labels.items():
            for name in own:
                names.setdefault(name, set()).add(number)
        return [self._class_id(str(label), names) for label in classes]

    def class_name(self, number: int) -> str:
        """Return the first name of a class, or its number if it has no name."""
        return self.labels.get(number, (str(number),))[0]

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """Return (height, width) of the latent of a picture; None stands for the size that the model was trained on."""
        config = self.blueprint.config
        if pixels is None:
            return config.sample_size, config.sample_size
        unit = config.patch_size * self.factor
        if any(side < unit or side % unit for side in pixels):
            raise ValueError(
                f"got size {pixels[0]}x{pixels[1]}, expected multiples of {unit} (patch {config.patch_size} "
                f"x decoder {self.factor})"
            )
        return pixels[0] // self.factor, pixels[1] // self.factor

    def load_of(
        self,
        classes: Sequence[str | int],
        guidance: Guidance,
        evaluations: int,
        dtype: torch.dtype,
        size: tuple[int, int] | None = None,
    ) -> Load:
        """Return the planner's `Load` for one picture of each class.

        evaluations: number of calls of the model. size: (height, width) in pixels, None for the model's own.
        """
        config, (height, width) = self.blueprint.config, self.latent_size(size)
        return Load(
            images=len(classes),
            tokens=height * width // config.patch_size**2,
            guidance=guidance.on,
            steps=evaluations,
            itemsize=dtype.itemsize,
            parameters=sum(x.numel() for x in self.blueprint.meta().parameters()),
            latent=config.in_channels * config.patch_size**2,
            labels=len(set(classes)) + guidance.on,
            table=TABLE_BYTES,
        )

    def scheduler(self, name: str | None = None) -> Any:
        """Return the folder's scheduler, or the diffusers class `name` with the same configuration.

        Raises ValueError, with the reason, if it cannot be built or the denoising loop cannot use it.
        """
        config = read_json(self.folder / "scheduler" / "scheduler_config.json") if self.folder else DDIM_DEFAULT
        chosen = name or config.get("_class_name", "DDIMScheduler")
        known = [other for other in dir(diffusers) if other.endswith("Scheduler")]
        if chosen not in known:
            raise ValueError(f"got scheduler {chosen!r}, expected one of diffusers': {_near(chosen, known)}")
        kind = getattr(diffusers, chosen)
        try:
            scheduler = kind.from_config(config)
        except (ImportError, TypeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"got scheduler {chosen!r}, which cannot be built: {' '.join(str(error).split())}"
            ) from error
        if (reason := why_not_driven(scheduler)) is not None:
            raise ValueError(f"got scheduler {chosen!r}, which {reason}; expected one like DDIMScheduler")
        return scheduler

    def schedule(self, name: str | None, steps: int, eta: float | None = None) -> Any:
        """Return `scheduler(name)` with its timesteps set; ValueError if steps or eta do not fit it.

        eta: None stands for the scheduler's own default.
        """
        scheduler = self.scheduler(name)
        chosen, most = type(scheduler).__name__, getattr(scheduler.config, "num_train_timesteps", steps)
        if not 1 <= steps <= most:
            raise ValueError(f"got {steps} steps, expected 1 to {most}")
        check_eta(scheduler, eta)
        try:
            scheduler.set_timesteps(steps)
        except FAILURES as error:
            raise ValueError(f"got {steps} steps, which {chosen} cannot do: {error}; try more or fewer") from error
        decide(scheduler, {"eta": eta})  # raises ValueError if a step of the scheduler fails
        return scheduler

    def _class_id(self, label: str, names: Mapping[str, set[int]]) -> int:
        numbers = self.labels.keys() or range(self.blueprint.config.num_classes)
        # a whole label stands for the classes that all of its parts have in common
        found = set.intersection(*(names.get(part, set()) for part in _parts(label)))
        if len(found) == 1:
            return found.pop()
        if found:
            raise ValueError(f"got class {label!r}, which stands for {_and(found)}, expected one of these numbers")
        if label.isdecimal() and int(label) in numbers:
            return int(label)
        wanted = f"one of {_near(label, list(names))}, or" if names else "a number"
        raise ValueError(f"got class {label!r}, expected {wanted} 0 to {max(numbers)}")


@dataclass(frozen=True)
class Pipeline:
    """A loaded pipeline on a mesh. `vae` is diffusers' AutoencoderKL; without one, pictures are previews of latents.

    It keeps the last run's CUDA graph for the next compatible call: use it in a `with` block, or call `release` before
    the process group ends.
    """

    dit: DistributedDiT
    files: Files
    vae: Any

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Free the buffers and the CUDA graph that are kept between calls."""
        self.sampler.release()

    @cached_property
    def sampler(self) -> Sampler:
        """Return the reusable sampler of this pipeline."""
        return Sampler(self.dit)

    @staticmethod
    def load(
        files: Files,
        mesh: Mesh | None = None,
        dtype: torch.dtype = torch.float32,
        strategy: str = "auto",
        local: str = "auto",
        transport: str = "auto",
        *,
        plan: Plan | None = None,
    ) -> Pipeline:
        """Load the weights, those of the decoder in the same dtype; see `DistributedDiT` for the other arguments."""
        dit = DistributedDiT.from_pretrained(files.blueprint, mesh, dtype, strategy, local, transport, plan=plan)
        mesh = dit.mesh
        folder = files.folder
        if folder is None or files.vae is None:
            return Pipeline(dit, files, None)
        vae = mesh.together(lambda: load_vae(folder / "vae", dtype, mesh.device))
        return Pipeline(dit, files, vae)

    def latents(
        self,
        classes: Sequence[str | int],
        *,
        steps: int,
        guidance: Guidance,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        eta: float | None = None,
        scheduler: Any = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Return sampled latents (N, C, h, w) for N classes, equal on every rank, from rank 0's arguments.

        scheduler: the name of a diffusers class, a scheduler (which is not changed), or None for the model's own.
        """
        classes, size, seed = self.dit.mesh.share((list(classes), size, seed))
        if scheduler is None or isinstance(scheduler, str):
            scheduler = self.files.scheduler(self.dit.mesh.share(scheduler))
        prompt = {"class_labels": torch.tensor(self.files.class_ids(classes))}
        height, width = self.files.latent_size(size)
        self.dit.check_size(height, width)
        generator = torch.Generator().manual_seed(seed)
        noise = draw_noise((len(classes), self.dit.config.in_channels, height, width), generator)
        return self.sampler(
            scheduler, noise, prompt, steps=steps, guidance=guidance, eta=eta, generator=generator, on_step=on_step
        )

    def decode(self, latents_NCHW: Tensor) -> Tensor:
        """Return pictures (N, 3, H, W) in [0, 1] on every rank, from rank 0's latents."""
        if self.vae is None:
            return preview(from_rank_0(self.dit.mesh, {"latents": latents_NCHW})["latents"], self.files.factor)
        return decode(self.vae, latents_NCHW, self.dit.mesh)


def generate(
    classes: Sequence[str | int],
    model: str | Path = "builtin",
    *,
    mesh: Mesh | None = None,
    steps: int = 25,
    guidance: float = 4.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> list[Image.Image]:
    """Return a picture of each class on every rank, from rank 0's arguments; this one call does everything."""
    ranks = mesh or Mesh.joined()
    classes, model, steps, guidance, seed, dtype = ranks.share((list(classes), model, steps, guidance, seed, dtype))
    wanted = Guidance(guidance)
    files = ranks.together(lambda: Files.locate(model))
    scheduler, ids = ranks.together(lambda: (files.schedule(None, steps), files.class_ids(classes)))
    load = files.load_of(ids, wanted, len(scheduler.timesteps), dtype)
    plan = make(work_of(files.blueprint.config), load, dtype, ranks, Wish(), mesh)
    with Pipeline.load(files, mesh, dtype, plan=plan) as pipeline:
        made = pipeline.latents(ids, steps=steps, guidance=wanted, seed=seed, scheduler=scheduler)
        return to_pil(pipeline.decode(made))


def _labels(index: Mapping[str, Any], classes: int) -> dict[int, tuple[str, ...]]:
    labels = index.get("id2label") or {}
    odd = [key for key in labels if not key.isdecimal() or int(key) >= classes]
    if odd:
        raise ValueError(f"got a label for class {odd[0]!r} in model_index.json, expected numbers 0 to {classes - 1}")
    return {int(key): _parts(str(names)) for key, names in labels.items()}


def _parts(label: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in label.split(","))


def _and(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _near(name: str, known: Sequence[str]) -> str:
    lower = {other.lower(): other for other in known}
    near = [lower[other] for other in get_close_matches(name.lower(), lower, n=5, cutoff=0.4)]
    return ", ".join(near or [*known[:8], f"... ({len(known)} in all)"])
