"""From class names to pictures: labels -> noise -> sample -> decode. Everything is checked before weights load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from PIL import Image
from torch import Tensor

from seqpar.distributed import DistributedDiT
from seqpar.mesh import Mesh
from seqpar.models._find import Blueprint, locate
from seqpar.pictures import to_pil
from seqpar.sampling import draw_noise, sample
from seqpar.trajectory import Guidance
from seqpar.vae import decode, preview, vae_factor
from seqpar.weights import read_json

BUILTIN = Path(__file__).parent / "assets" / "emoji-dit"
NO_VAE_FACTOR = 8  # of the autoencoder that published DiTs are trained with
# what the original DiT and Large-DiT use; a pipeline folder brings its own
DDIM_DEFAULT = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "clip_sample": False}


@dataclass(frozen=True)
class Files:
    """A pipeline before its weights: transformer blueprint, folder of the other parts (None: none), labels."""

    blueprint: Blueprint
    folder: Path | None
    labels: Mapping[str, int]
    factor: int

    @staticmethod
    def locate(name: str | Path) -> Files:
        """For "builtin", a diffusers pipeline folder, or anything `seqpar.models` opens (then without a decoder)."""
        path = BUILTIN if str(name) == "builtin" else Path(name)
        blueprint = locate(path if str(name) == "builtin" else name)
        index = path / "model_index.json"
        if not index.is_file():
            return Files(blueprint, None, {}, NO_VAE_FACTOR)
        labels = {
            part.strip(): int(number)
            for number, names in read_json(index).get("id2label", {}).items()
            for part in names.split(",")
        }
        return Files(blueprint, path, labels, vae_factor(read_json(path / "vae" / "config.json")))

    def class_ids(self, classes: Sequence[str | int]) -> list[int]:
        """Numbers for names or numbers; `ValueError` with near names for one that is neither."""
        return [self._class_id(str(label)) for label in classes]

    def class_name(self, number: int) -> str:
        """The first name of a class, or its number where there are no names."""
        return next((name for name, other in self.labels.items() if other == number), str(number))

    def latent_size(self, pixels: tuple[int, int] | None) -> tuple[int, int]:
        """(height, width) of the latent for a picture; the size the model was trained for where None."""
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

    def scheduler(self, name: str | None = None) -> Any:
        """The folder's scheduler, or diffusers' class of another name with the same configuration."""
        config = read_json(self.folder / "scheduler" / "scheduler_config.json") if self.folder else DDIM_DEFAULT
        chosen = name or config.get("_class_name", "DDIMScheduler")
        known = [other for other in dir(diffusers) if other.endswith("Scheduler")]
        if chosen not in known:
            raise ValueError(f"got scheduler {chosen!r}, expected one of diffusers': {_near(chosen, known)}")
        return getattr(diffusers, chosen).from_config(config)

    def _class_id(self, label: str) -> int:
        count = self.blueprint.config.num_classes
        numbers = set(self.labels.values()) or range(count)
        if label in self.labels:
            return self.labels[label]
        if label.isdecimal() and int(label) in numbers:
            return int(label)
        wanted = f"one of {_near(label, list(self.labels))}, or" if self.labels else "a number"
        raise ValueError(f"got class {label!r}, expected {wanted} 0 to {max(numbers)}")


@dataclass(frozen=True)
class Pipeline:
    """A loaded pipeline on a mesh. `vae` is diffusers' AutoencoderKL, or None (pictures are previews of latents)."""

    dit: DistributedDiT
    files: Files
    vae: Any

    @staticmethod
    def load(
        files: Files, mesh: Mesh, dtype: torch.dtype = torch.float32, strategy: str = "auto", local: str = "auto"
    ) -> Pipeline:
        """Read the weights; the decoder in the transformer's dtype."""
        dit = DistributedDiT.from_pretrained(files.blueprint, mesh, dtype, strategy, local)
        folder = files.folder
        vae = None if folder is None else mesh.together(lambda: _load_vae(folder / "vae", dtype, mesh.device))
        return Pipeline(dit, files, vae)

    def latents(
        self,
        classes: Sequence[str | int],
        *,
        steps: int,
        guidance: Guidance,
        seed: int = 0,
        size: tuple[int, int] | None = None,
        eta: float = 0.0,
        scheduler: str | None = None,
        on_step: Callable[[int], None] = lambda index: None,
    ) -> Tensor:
        """Sampled latents (N, C, h, w) for N classes, equal on every rank."""
        ids = torch.tensor(self.files.class_ids(classes))
        height, width = self.files.latent_size(size)
        self.dit.check_size(height, width)
        generator = torch.Generator().manual_seed(seed)
        noise = draw_noise((len(ids), self.dit.config.in_channels, height, width), generator)
        return sample(
            self.dit,
            self.files.scheduler(scheduler),
            noise,
            {"class_labels": ids},
            steps=steps,
            guidance=guidance,
            eta=eta,
            generator=generator,
            on_step=on_step,
        )

    def decode(self, latents_NCHW: Tensor) -> Tensor:
        """(N, 3, H, W) in [0, 1] on every rank."""
        if self.vae is None:
            return preview(latents_NCHW, self.files.factor)
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
    """Pictures of the given classes, on every rank: the whole path in one call."""
    wanted = Guidance(guidance)
    mesh = mesh or Mesh.from_env(guidance=wanted.on)
    files = mesh.together(lambda: Files.locate(model))
    mesh.together(lambda: files.class_ids(classes))
    pipeline = Pipeline.load(files, mesh, dtype)
    return to_pil(pipeline.decode(pipeline.latents(classes, steps=steps, guidance=wanted, seed=seed)))


def _load_vae(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        vae: Any = AutoencoderKL.from_pretrained(folder, torch_dtype=dtype, low_cpu_mem_usage=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"got decoder {folder}, which does not load: {error}") from error
    return vae.to(device).eval()


def _near(name: str, known: Sequence[str]) -> str:
    lower = {other.lower(): other for other in known}
    near = [lower[other] for other in get_close_matches(name.lower(), lower, n=5, cutoff=0.4)]
    return ", ".join(near or [*known[:8], f"... ({len(known)} in all)"])
