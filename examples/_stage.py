# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
"""The settings of a training of `train_prompts.py`, and what all its stages draw from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from _emoji import GlyphBank, load_bank
from _flux import Parts, packed
from _judge import Judge
from _networks import PIXELS, encode
from _prompts import SHORT, Facts, build_grammar, build_tokenizers, draw_facts, draw_pictures
from _training import Pool
from diffusers import AutoencoderKL
from safetensors.torch import load_model
from torch import Tensor

LINES = 0.2  # the share of pictures that are drawn with lines, for the VAE and the judge
EMPTY = 0.1  # the share of prompts that become empty
STAGES = ("vae", "judge", "base", "guide", "lora", "report")


@dataclass(frozen=True)
class Train:
    """Train the built-in text-to-image model in stages, named at the top of this file."""

    data: Path = Path(".data/emoji.npz")
    work: Path = Path("prompts")
    stages: tuple[Literal["vae", "judge", "base", "guide", "lora", "report"], ...] = STAGES
    vae_minutes: float = 2.0
    judge_minutes: float = 0.75
    base_minutes: float = 6.0
    guide_minutes: float = 2.5
    lora_minutes: float = 2.0
    resume: bool = False
    """Go on with the base that an earlier run has saved in --work."""
    batch: int = 1024
    pool: int = 128
    """Number of batches of encoded pictures to draw from; the oldest is replaced every few steps."""
    lr: float = 1e-3
    prompts: int = 500
    """Number of prompts of the report."""
    device: str = "auto"
    compile: bool = True
    """Use torch.compile on CUDA."""
    seed: int = 0


class Bench:
    """What all stages need: settings, data, tokens, and the random numbers of one stage."""

    def __init__(self, config: Train, stage: str) -> None:
        fallback = "cuda" if torch.cuda.is_available() else "cpu"
        self.config, self.device = config, torch.device(fallback if config.device == "auto" else config.device)
        self.seed = config.seed * len(STAGES) + STAGES.index(stage)
        torch.manual_seed(self.seed)
        self.rng = torch.Generator(self.device).manual_seed(self.seed)
        self.bank: GlyphBank = load_bank(config.data, self.device)
        self.tokenizers = build_tokenizers(self.bank.names)
        self.grammar = build_grammar(self.bank.names, *self.tokenizers, self.device)
        self.compiles = config.compile and self.device.type == "cuda"

    def pictures(self, count: int, *, held_out: bool, outlined: bool) -> tuple[Tensor, Facts]:
        facts = draw_facts(self.grammar, count, self.rng, held_out=held_out)
        images = draw_pictures(self.bank, facts, pixels=PIXELS, rng=self.rng, outlined=outlined)
        return images.to(memory_format=torch.channels_last), facts

    def both(self, count: int) -> tuple[Tensor, Facts, Facts]:
        """Return plain pictures and, after them, some that are drawn with lines, with the facts of both."""
        lines = max(1, int(LINES * count))
        plain, facts = self.pictures(count - lines, held_out=True, outlined=False)
        drawn, others = self.pictures(lines, held_out=True, outlined=True)
        return torch.cat([plain, drawn]), facts, others

    def vae(self) -> AutoencoderKL:
        vae = AutoencoderKL.from_pretrained(self.config.work / "vae").to(self.device, memory_format=torch.channels_last)
        return vae.eval().requires_grad_(False)

    def judge(self) -> Judge:
        judge = Judge(len(self.bank.names)).to(self.device)
        load_model(judge, self.config.work / "judge.safetensors")
        return judge.eval().requires_grad_(False)

    def parts(self, stage: str | None) -> Parts:
        """Return the networks as a stage has saved them, or new ones, in full precision."""
        parts = Parts(*self.tokenizers).to(self.device)
        if stage is not None:
            load_model(parts, self.config.work / f"{stage}.safetensors")
        return parts.requires_grad_(False)

    def fast(self, parts: Parts) -> Parts:
        """Take a GPU's half precision, and compile the transformer's blocks, each kind once."""
        if self.device.type == "cuda":
            parts.to(torch.bfloat16)
        if self.compiles:
            parts.transformer.compile_repeated_blocks(dynamic=False)
        return parts

    def latents(self, vae: AutoencoderKL, *, outlined: bool) -> Pool:
        """Return a pool of packed latents and what they show; no pair is among them that is held out."""

        @torch.no_grad()
        def encoded() -> tuple[Tensor, ...]:
            images, facts = self.pictures(self.config.batch, held_out=False, outlined=outlined)
            mean, _ = encode(vae, images)
            latents_BSC = packed((mean * vae.config.scaling_factor).contiguous())
            return latents_BSC, facts.name_B, facts.colour_B, facts.background_B

        return Pool(encoded, self.config.pool)

    def batch(self, pool: Pool, length: int, scales: tuple[float, float]) -> tuple[Tensor, ...]:
        """Return latents, noise, shares of noise, scales and tokens of prompts for one step."""
        count, device = max(1, self.config.batch * SHORT * 2 // (length + SHORT)), self.device
        latents, *facts = pool.draw(count, self.rng)
        article, empty, scale, sigma = torch.rand(4, count, device=device, generator=self.rng)
        rows = self.grammar.index(Facts(*facts), article < 0.9).where(empty >= EMPTY, len(self.grammar.clip_PL) - 1)
        noise = torch.randn(latents.shape, device=device, generator=self.rng)
        sigma = torch.sigmoid(torch.special.ndtri(sigma.clamp(1e-4, 1 - 1e-4)))  # most at medium noise
        sigma = sigma.bfloat16().float()  # as the model gets it
        t5_BL = F.pad(self.grammar.t5_PL[rows], (0, length - SHORT))  # T5's padding is token 0
        return (
            latents,
            noise,
            sigma,
            torch.lerp(*(scale.new_tensor(x) for x in scales), scale),
            self.grammar.clip_PL[rows],
            t5_BL,
        )
