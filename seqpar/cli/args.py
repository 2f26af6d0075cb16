"""The flags of `seqpar sample` and `seqpar plan`. Nothing is checked here: see `seqpar/cli/job.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

import seqpar.attention
from seqpar.types.plugins import plugins

HOW, NAMED = "How attention sees the whole sequence", "A named one gets all ranks."


@dataclass(frozen=True)
class Options:
    """What to make and how: `sample` and `plan` share these flags, so a command can be planned before it is run."""

    model: str = "builtin"
    """"builtin" (pictures of classes; with --prompt "builtin-text", pictures of texts), a diffusers or ppdiffusers
    folder, original files (docs/formats) such as flux1-dev.safetensors in its pipeline's folder, a hub id, or a preset
    with random weights (dit-xl/2, random:FLUX.1-dev)."""
    classes: tuple[str, ...] = ()
    """Names or numbers of classes, for models that take those; the first 12 classes if none are given."""
    prompt: tuple[str, ...] = ()
    """What to show, for models that take a text; several prompts make several pictures."""
    lora: tuple[str, ...] = ()
    """LoRA files (.safetensors) for a diffusers pipeline, each FILE[:SCALE][@TRANSFORMER], as style.safetensors:0.8. Of
    the two transformers of Wan 2.2 name the one that a file changes (high.safetensors@transformer
    low.safetensors@transformer_2), unless its name says high or low noise. "outline" comes with builtin-text."""
    negative_prompt: str | None = None
    """What not to show; classifier-free guidance leads away from it (with FLUX also name --true-guidance)."""
    image: tuple[str, ...] = ()
    """Input images (PNG, JPEG, WebP) for edit and image-to-video models; some take several. Text-to-image models run
    image-to-image with --strength."""
    strength: float | None = None
    """Image-to-image strength, 0 to 1; earlier steps are skipped. Default: the pipeline's."""
    repeat: int = 1
    """Images per class or prompt."""
    steps: int = 25
    """Number of denoising steps."""
    guidance: float | None = None
    """Scale of guidance: an input of the model where it takes one (FLUX.1-dev: 3.5 by default), else classifier-free,
    which is off at 1 and below (classes: 4 by default; other pipelines: their own value)."""
    true_guidance: float | None = None
    """Scale of classifier-free guidance for models with distilled guidance, such as FLUX: 2 predictions a step."""
    guidance_channels: int | None = None
    """Guide only the first channels (original DiT: 3); all channels by default, as diffusers does."""
    eta: float | None = None
    """Noise of DDIM and of schedulers like it: 0 is deterministic, 1 is DDPM; the scheduler's own value by default
    (DDIM: 0, TCD: 0.3)."""
    respacing: str | None = None
    """Timesteps of DDIM and DDPM as in the original DiT's code, in place of --steps: 250, ddim25, or a number for each
    of several equal sections, as 10,20,30."""
    scheduler: str | None = None
    """Class name of any diffusers scheduler; the model's own scheduler by default. DDPMScheduler takes the variances
    that a DiT predicts."""
    seed: int = 0
    """Seed of the noise: one seed gives the same pictures on any number of ranks."""
    frames: int | None = None
    """Number of frames, for models that make videos."""
    fps: int | None = None
    """Frames a second of a video; the pipeline's own by default, or 16, which the summary says."""
    size: str | None = None
    """Size in pixels, as 256 or 256x384 (height x width); the size that the model was trained for by default."""
    mesh: str = "auto"
    """"auto" (the first picture soonest), "throughput" (most pictures a second: also chooses the data axis), or axes
    such as cfg=2,ulysses=2 (data, cfg, ring, ulysses); axes that are not named are chosen."""
    strategy: Annotated[str, tyro.conf.arg(help=f"{HOW}: {', '.join(plugins(seqpar.attention))}. {NAMED}")] = "auto"
    local: Annotated[str, tyro.conf.arg(name="local-attention", aliases=["--local"])] = "auto"
    """Attention on one device: flash, sdpa, wide (head dims over 256), reference. (torchrun on Python 3.11 takes
    --local for its own flag.)"""
    transport: str = "auto"
    """How blocks travel between ranks: peer (written into the other GPUs' memory, on one machine) or collective (NCCL,
    gloo); auto takes peer if all GPUs reach each other's memory."""
    vae: Literal["auto", "strips", "pictures", "tiled"] = "auto"
    """How the decoder uses several ranks: each picture cut into strips, or whole pictures, some on each rank; auto
    takes strips for fewer pictures than ranks. tiled: whole pictures by diffusers' tiling, which needs the least memory
    and leaves seams."""
    exact: bool = False
    """The same latents, bit by bit, on any number of GPUs, at any size; a little slower (seqpar/mesh/exact.py)."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Data type of weights and activations; auto is bf16 on GPUs and fp32 on CPUs."""
    first_deadline_s: float = 120.0
    """Exchange timeout in seconds until all ranks finish the first call of a shape (compile, capture)."""
    deadline_s: float = 30.0
    """Timeout in seconds for later exchanges; the error identifies the late rank."""
    out: Path = Path("seqpar.png")
    """File of the picture (.png, its metadata holds every parameter) or of the video (.mp4). Several pictures of
    prompts get numbers: seqpar-1.png, seqpar-2.png."""
    heads: int | None = None
    """Attention heads; only for original checkpoints of unreleased sizes, which do not store them."""


@dataclass(frozen=True)
class Args(Options):
    """Generate images or videos on one or more GPUs."""

    gpus: int | None = None
    """Number of GPUs of this machine to use, one process each; without --gpus and --ranks one process runs."""
    ranks: int | None = None
    """Number of processes: as --gpus if this machine has GPUs, otherwise processes on the CPU."""
    verify: bool = False
    """First compare a few steps with a single-rank run, block by block; stop at the first wrong block
    (docs/fidelity.md)."""
    dry_run: tuple[int, ...] | None = None
    """Print what `seqpar plan` prints and load no weights: for the processes that run, or for each number of GPUs that
    is given, as --dry-run 1 2 4 8."""


@dataclass(frozen=True)
class ProfileArgs(Args):
    """Generate images or videos as `sample` does, and measure where step time goes, per rank (docs/profiling.md)."""

    profile_out: Path = Path("profile")
    """Folder of the traces (for ui.perfetto.dev), the table and its numbers."""
    profile_steps: int = 4
    """Number of steps to measure, after those in which graphs are captured."""


@dataclass(frozen=True)
class PlanArgs(Options):
    """Predict time and memory per layout, best first; loads no weights and writes no file."""

    gpus: tuple[int, ...] = ()
    """Numbers of GPUs to plan for, as 1 2 4 8: GPUs like this machine's, or H200s if it has none; by default this
    machine with all its GPUs."""
    hosts: int = 1
    """Number of machines that the GPUs of each plan are on, equally many on each."""
    explain: bool = False
    """Also print what a step costs, what each way to split it sends, and why the chosen layout wins
    (docs/analysis.md)."""


@dataclass(frozen=True)
class VerifyArgs(Options):
    """Compare all strategies, transports and data types with one rank in full precision; fail if one is less precise
    than it should be."""

    steps: int = 3
    """Number of denoising steps; each takes ten to twenty evaluations of the model by one rank alone."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Data type to compare; auto compares fp32 and bf16, on GPUs fp16, too (in exact mode bf16 and fp16)."""
    out: Path = Path("verify.json")
    """File of the verdicts, with flags and versions."""
    gpus: int | None = None
    """Number of GPUs of this machine to use, one process each; without --gpus and --ranks one process runs."""
    ranks: int | None = None
    """Number of processes: as --gpus if this machine has GPUs, otherwise processes on the CPU."""
    counts: tuple[int, ...] = ()
    """Numbers of ranks to compare, as 2 4; all from 1 to the number of processes if none are given."""


@dataclass(frozen=True)
class ReplicaArgs:
    """The ranks of a server, which make pictures for its front; `seqpar serve` starts them."""

    models: tyro.conf.Positional[tuple[str, ...]]
    """Models to hold, each as --model of `seqpar sample`."""
    gpus: int | None = None
    """Number of GPUs of this machine to use, one process each."""
    ranks: int | None = None
    """Number of processes: as --gpus if this machine has GPUs, otherwise processes on the CPU."""
    loras: Path | None = None
    """Folder of LoRAs that orders may name, NAME.safetensors each."""
    warm: tuple[str, ...] = ()
    """Sizes, WIDTHxHEIGHT or auto, that each model makes before the ranks are ready, if it takes them."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Data type of weights and activations; auto is bf16 on GPUs and fp32 on CPUs."""
    first_deadline_s: float = 120.0
    """As for `seqpar sample`."""
    deadline_s: float = 30.0
    """As for `seqpar sample`."""
    host_deadline_s: float = 1800.0
    """Seconds that a rank waits for another that lives and works on its host."""


@dataclass(frozen=True)
class ConvertArgs:
    """Convert a published checkpoint to diffusers format (safetensors)."""

    source: tyro.conf.Positional[str]
    """Original files, a diffusers or ppdiffusers folder, or a hub id (docs/formats)."""
    target: tyro.conf.Positional[Path]
    """Folder to write; it must not exist."""
    heads: int | None = None
    """Attention heads; only for original checkpoints of unreleased sizes, which do not store them."""
    dtype: Annotated[Literal["same", "fp32", "bf16", "fp16"], tyro.conf.arg(help="Data type to write")] = "same"
