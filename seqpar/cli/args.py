"""The flags of commands, whose strings are their help. Nothing is checked here: see `seqpar/cli/job.py`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import seqpar.attention
from seqpar.types.flags import Flag
from seqpar.types.plugins import plugins

Dtype = Literal["auto", "fp64", "fp32", "bf16", "fp16"]
HOW, NAMED = "How attention is sharded", "A named strategy gets all ranks."


@dataclass(frozen=True)
class Options:
    """Flags of `sample` and `plan`: a command can be planned before it runs."""

    model: Annotated[str, Flag("NAME")] = "builtin"
    """Hub id, diffusers folder, a file such as flux1-dev.safetensors in its pipeline's folder (docs/formats), builtin
    (with --prompt builtin-text), or random weights (dit-xl/2, random:FLUX.1-dev). `plan` also knows short names
    (flux.1-dev), and needs no files of known models."""
    classes: Annotated[tuple[str, ...], Flag("CLASS")] = ()
    """Class names or numbers [the first 12]."""
    prompt: tuple[str, ...] = ()
    """Prompts; one image or video per prompt."""
    lora: Annotated[tuple[str, ...], Flag("FILE")] = ()
    """LoRA files (.safetensors), each FILE[:SCALE][@TRANSFORMER], such as style.safetensors:0.8. With the two
    transformers of Wan 2.2, name one for each file (high.safetensors@transformer low.safetensors@transformer_2) unless
    the file's name has high or low noise. "outline" comes with builtin-text."""
    negative_prompt: str | None = None
    """Negative prompt; requires classifier-free guidance (FLUX: --true-guidance)."""
    image: Annotated[tuple[str, ...], Flag("FILE")] = ()
    """Input images (PNG, JPEG, WebP) for edit and image-to-video models; some take several. Text-to-image models run
    image-to-image with --strength."""
    mask: Annotated[str | None, Flag("FILE")] = None
    """Mask of the --image, of its size: what is transparent, or white in a file without transparency, is repainted."""
    controlnet: Annotated[str | None, Flag("NAME")] = None
    """ControlNet of the model: a folder of diffusers' format, or a Hub id."""
    control_image: Annotated[str | None, Flag("FILE")] = None
    """Image that the ControlNet follows, such as edges or a pose."""
    control_scale: float | None = None
    """Weight of the ControlNet, 0 to 10 [1]."""
    strength: float | None = None
    """Image-to-image strength, 0 to 1; earlier steps are skipped [the pipeline's]."""
    repeat: int = 1
    """Images per class or prompt."""
    steps: int | None = None
    """Number of denoising steps [25]."""
    preset: Annotated[str | None, Flag("NAME")] = None
    """How a distilled model or LoRA is sampled, in place of --steps and --scheduler, such as lightning-4 (docs/models).
    A wrong name lists those of the model."""
    guidance: float | None = None
    """Guidance scale: an input of the model where it takes one (FLUX.1-dev: 3.5), otherwise classifier-free, off at 1
    and below [the pipeline's; classes: 4]."""
    true_guidance: float | None = None
    """Classifier-free guidance scale for models with distilled guidance, such as FLUX: 2 predictions per step."""
    guidance_channels: int | None = None
    """Guide only the first channels (original DiT: 3) [all, as in diffusers]."""
    eta: float | None = None
    """Noise of DDIM and similar schedulers: 0 is deterministic, 1 is DDPM [the scheduler's; DDIM: 0, TCD: 0.3]."""
    respacing: Annotated[str | None, Flag("SPEC")] = None
    """Timesteps of DDIM and DDPM as in the original DiT's code, in place of --steps: 250, ddim25, or one number per
    equal section, such as 10,20,30."""
    scheduler: Annotated[str | None, Flag("NAME")] = None
    """Class name of a diffusers scheduler; DDPMScheduler uses the variances that a DiT predicts [the model's]."""
    seed: int = 0
    """Noise seed, independent of the number of ranks."""
    frames: int | None = None
    """Number of frames, for video models [the pipeline's]."""
    fps: int | None = None
    """Frames per second of videos [the pipeline's, or 16]."""
    size: Annotated[str | None, Flag("HxW")] = None
    """Size in pixels, height x width, such as 256x384, or 256 for a square [the model's training size]."""
    mesh: Annotated[str, Flag("SPEC")] = "auto"
    """auto (lowest latency), throughput (most images per second: may use the data axis), or axes such as
    cfg=2,ulysses=2 (data, cfg, ring, ulysses); the planner chooses the others."""
    strategy: Annotated[str, Flag("NAME", text=f"{HOW}: {', '.join(plugins(seqpar.attention))}. {NAMED}")] = "auto"
    local: Annotated[str, Flag("NAME", name="local-attention", alias="--local")] = "auto"
    """Attention on one device: flash, sdpa, wide (head dims over 256), reference, fp8 (8 bits on Hopper, which changes
    the results: docs/precision.md). (torchrun on Python 3.11 reads --local as its own flag.)"""
    attention_steps: Annotated[str | None, Flag("START:STOP")] = None
    """With --local-attention fp8: the steps in 8 bits, such as 2:-2, all but the first two and the last two [all]."""
    transport: Annotated[str, Flag("NAME")] = "auto"
    """Data transfer between ranks: peer (writes into other GPUs' memory, one machine) or collective (NCCL, gloo); auto
    is peer where all GPUs can access each other's memory."""
    vae: Literal["auto", "strips", "pictures", "tiled"] = "auto"
    """Decoding on several ranks: strips of each image, or whole pictures distributed over ranks; auto is strips for
    fewer images than ranks. tiled: diffusers' tiling, which needs the least memory and leaves seams."""
    exact: bool = False
    """Bit-identical latents on any number of GPUs; slightly slower."""
    dtype: Dtype = "auto"
    """Dtype of weights and activations; auto is bf16 on GPUs, fp32 on CPUs."""
    precision: Literal["fp8"] | None = None
    """fp8: most GEMMs of fused blocks compute in 8 bits, which is faster and changes the results (docs/precision.md).
    Weights in bf16, GPUs of compute capability 8.9 or newer. A model's first run takes seconds more."""
    first_deadline_s: float = 120.0
    """Exchange timeout in seconds until all ranks finish the first call of a shape (compile, capture)."""
    deadline_s: float = 30.0
    """Timeout in seconds for later exchanges; the error identifies the late rank."""
    out: Path = Path("seqpar.png")
    """Output file, .png or .mp4, with all parameters in its metadata; several are numbered, such as seqpar-1.png."""


@dataclass(frozen=True)
class StartFlags:
    """Flags of commands that start ranks."""

    gpus: int | None = None
    """GPUs to use, one process each [1]."""
    ranks: int | None = None
    """Processes to start: on GPUs if this machine has any, otherwise on the CPU."""


@dataclass(frozen=True)
class Args(StartFlags, Options):
    """Generate images or videos on one or more GPUs."""

    verify: bool = False
    """First compare a few steps with a single-rank run, block by block; stop at the first wrong block
    (docs/verifying.md)."""
    min_psnr: float | None = None
    """With --precision or --cache: keep the GEMMs in the weights' dtype, and take the threshold, that `seqpar verify`
    found for this PSNR (in dB) and these --steps and --scheduler (docs/precision.md, docs/caching.md)."""
    cache: Annotated[str | None, Flag("NAME")] = None
    """Leave most blocks of similar steps out, which is faster and changes the results (docs/caching.md): dbcache or
    taylorseer, maybe with options, such as dbcache:threshold=0.2,head=2."""
    park: bool = False
    """Keep weights that are not in use, such as the second transformer of Wan 2.2, in page-locked memory of the host:
    the same bits (docs/models/wan.md)."""
    dry_run: tuple[int, ...] | None = None
    """Print the plan of `seqpar plan` and load no weights: for these processes, or for numbers of GPUs, such as
    --dry-run 1 2 4 8."""


@dataclass(frozen=True)
class DryRun(Args):
    """The dry run of a plan; it is not a command. card: as in `PlanArgs`."""

    card: str | None = None


@dataclass(frozen=True)
class ProfileArgs(Args):
    """Generate images or videos as `sample` does, and measure where step time goes, per rank (docs/profiling.md)."""

    profile_out: Path = Path("profile")
    """Folder of the traces (for ui.perfetto.dev), the table and its numbers."""
    profile_steps: int = 4
    """Measured steps, after the steps that capture graphs."""


@dataclass(frozen=True)
class PlanArgs(Options):
    """Predict time and memory per layout, best first; loads no weights. Takes the flags of `seqpar sample`, of which
    --out has no effect."""

    gpus: tuple[int, ...] = ()
    """Numbers of GPUs to plan for, such as 1 2 4 8: GPUs like this machine's, or H200s [all GPUs of this machine]."""
    card: Annotated[str | None, Flag("CARD")] = None
    """GPUs of another kind: h100, h200, a100, 4090 or b200, by their datasheets (docs/planner.md); one, unless --gpus
    names another number."""
    hosts: int = 1
    """Machines over which the GPUs of each plan are distributed evenly."""
    explain: bool = False
    """Also print the cost of a step, the bytes that each layout sends, and why the best one wins (docs/analysis.md)."""
    park: bool = False
    """As for `seqpar sample`."""


@dataclass(frozen=True)
class VerifyArgs(StartFlags, Options):
    """Compare all strategies, transports and dtypes with one full-precision rank; fail if one is too imprecise. With
    --precision fp8 or --cache: measure what they change in the images of a diffusers pipeline (docs/precision.md)."""

    steps: int = 0
    """Denoising steps; each runs 10 to 20 single-rank evaluations [3; with --precision or --cache 25]."""
    cache: Annotated[str | None, Flag("NAME")] = None
    """As for `seqpar sample`; the error is measured."""
    min_psnr: float | None = None
    """With --precision or --cache: search the GEMMs that have to keep the weights' dtype and the threshold of the
    cache, so that no image has a lower PSNR, in dB, for --min-psnr of `sample` and `serve`; fail if there are none."""
    dtype: Dtype = "auto"
    """Dtype to compare; auto is fp32 and bf16, on GPUs also fp16 (exact mode: bf16 and fp16)."""
    out: Path = Path("verify.json")
    """JSON file with verdicts, flags and versions."""
    counts: tuple[int, ...] = ()
    """Numbers of ranks to compare, such as 2 4 [1 to the number of processes]."""


@dataclass(frozen=True)
class ReplicaArgs(StartFlags):
    """The ranks of a server; `seqpar serve` starts them."""

    models: Annotated[tuple[str, ...], Flag("MODEL", positional=True)] = ()
    """Models to serve, each as --model of `seqpar sample`."""
    names: Annotated[tuple[str, ...], Flag("NAME")] = ()
    """Names of the models in requests, in their order; by default those of the command."""
    loras: Path | None = None
    """Folder of LoRAs that requests may name, NAME.safetensors each."""
    controlnet: Annotated[tuple[str, ...], Flag("NAME=FOLDER")] = ()
    """ControlNets that requests may name."""
    warm: Annotated[tuple[str, ...], Flag("SIZE")] = ()
    """Sizes, WIDTHxHEIGHT or auto, that models run before the ranks are ready."""
    dtype: Dtype = "auto"
    """Dtype of weights and activations; auto is bf16 on GPUs, fp32 on CPUs."""
    precision: Literal["fp8"] | None = None
    """As for `seqpar sample`."""
    min_psnr: float | None = None
    """As for `seqpar sample`."""
    cache: Annotated[str | None, Flag("NAME")] = None
    """As for `seqpar sample`."""
    park: bool = False
    """As for `seqpar sample`."""
    most: int | None = None
    """As --loaded of `seqpar serve`."""
    swaps: bool = False
    """As --swap of `seqpar serve`."""
    first: Annotated[tuple[str, ...] | None, Flag("MODEL")] = None
    """The models to load at the start, in place of those that --most and --swaps choose."""
    first_deadline_s: float = 120.0
    """As for `seqpar sample`."""
    deadline_s: float = 30.0
    """As for `seqpar sample`."""
    host_deadline_s: float = 1800.0
    """Timeout in seconds for a rank that is alive and busy on the host."""


@dataclass(frozen=True)
class ConvertArgs:
    """Convert a published checkpoint to diffusers format (safetensors)."""

    source: Annotated[Path, Flag("SOURCE", positional=True)]
    """File or folder as its authors publish it (docs/formats)."""
    target: Annotated[Path, Flag("FOLDER", positional=True)]
    """Folder to write; it must not exist."""
    heads: int | None = None
    """Attention heads; only for original checkpoints of unreleased sizes, which do not store them."""
    dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"
    """Dtype to write."""
    precision: Literal["fp8"] | None = None
    """fp8: copy the folder of a diffusers pipeline with the weights of its transformer's blocks in 8 bits."""


@dataclass(frozen=True)
class DoctorArgs:
    """Show this machine's GPUs, links and versions, which kernels, transport and attention will be used and why, the
    time of one matrix product and of one exchange, and what is missing."""


COMMANDS: dict[str, type] = {
    "sample": Args,
    "plan": PlanArgs,
    "profile": ProfileArgs,
    "verify": VerifyArgs,
    "convert": ConvertArgs,
    "doctor": DoctorArgs,
    "replica": ReplicaArgs,
}
# title of a part of the help -> its flags; the help of a command begins with flags that are in none
GROUPS = {
    "What to make": ("prompt", "negative_prompt", "size", "frames", "fps", "seed", "repeat"),
    "Input images": ("image", "strength", "mask", "controlnet", "control_image", "control_scale"),
    "Model": ("model", "lora", "steps", "preset", "guidance", "true_guidance", "scheduler", "eta"),
    "Models of classes (DiT, Large-DiT)": ("classes", "guidance_channels", "respacing"),
    "How to split": ("gpus", "ranks", "card", "hosts", "mesh", "strategy", "transport", "local", "vae"),
    "Precision": ("dtype", "precision", "attention_steps", "min_psnr", "cache", "exact", "verify"),
    "Output": ("out", "profile_out", "profile_steps"),
    "Advanced": ("park", "first_deadline_s", "deadline_s", "dry_run"),
}
