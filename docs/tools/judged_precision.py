"""What 8 bits or step caches cost the built-in model of prompts: a classifier judges its images of 500 prompts.

The classifier (`examples/_judge.py`) learns from new renders of the font that the model learned from, half of them
decoded by the model's autoencoder. It never sees an image of the model. An image is right if thing, colour and
background are those of its prompt. Everything has a fixed seed; on one core of a CPU it takes about half an hour. A
step cache decides for each prompt by itself (--batch 1).

    python examples/train_builtin.py render --font NotoColorEmoji.ttf --out emoji.npz
    python docs/tools/judged_precision.py --data emoji.npz
    python docs/tools/judged_precision.py --data emoji.npz --cache dbcache taylorseer --steps 28 --batch 1
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_model, save_model
from torch import Tensor

import seqpar
from seqpar.loading.names import NAMES
from seqpar.transformer.lossy import computed_by, computed_steps
from seqpar.types.flags import parsed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from _judge import ASPECTS, Judge, expected, judge_loss, right
from _networks import PIXELS, decode, encode
from _prompts import SHORT, Facts, all_prompts, draw_facts, draw_pictures
from _report import said_facts
from _stage import Bench, Train

FOLDER = NAMES["builtin-text"]
GUIDANCE = 3.5


@dataclass(frozen=True)
class Flags:
    """Judge images of the built-in model of prompts with all steps in the weights' dtype, and otherwise."""

    data: Path
    """Renders of the font, by `examples/train_builtin.py render`."""
    judge: Path = Path("judge.safetensors")
    """Weights of the classifier; it is trained if they do not exist."""
    train_steps: int = 3000
    prompts: int = 500
    batch: int = 50
    steps: int = 8
    cache: tuple[str, ...] = ()
    """Step caches to judge, in place of 8 bits."""


def trained(flags: Flags, bench: Bench, vae: AutoencoderKL) -> Judge:
    """Return the classifier from its file, or train it on renders: half of each batch from a pool of decoded ones."""
    judge = Judge(len(bench.bank.names)).to(memory_format=torch.channels_last)
    if flags.judge.exists():
        load_model(judge, flags.judge)
        return judge.eval()

    def renders(count: int) -> tuple[Tensor, ...]:
        images, facts = bench.pictures(count, held_out=True, outlined=False)
        return images, *expected(facts, False).values()

    @torch.no_grad()
    def decoded(count: int) -> tuple[Tensor, ...]:
        images, *wanted = renders(count)
        return decode(vae, encode(vae, images)[0]).clamp(-1, 1), *wanted

    pool = [torch.cat(parts) for parts in zip(*(decoded(64) for _ in range(48)), strict=True)]
    optimizer = torch.optim.AdamW(judge.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(flags.train_steps):
        rate = 1e-3 * min(1, (step + 1) / 100) * (0.5 + 0.5 * cos(pi * step / flags.train_steps))
        optimizer.param_groups[0]["lr"] = rate
        rows = torch.randint(len(pool[0]), (32,), generator=bench.rng)
        batch = [torch.cat([column[rows], new]) for column, new in zip(pool, renders(32), strict=True)]
        loss = judge_loss(judge, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step} loss {loss.item():.3f}", flush=True)
    save_model(judge.eval(), flags.judge)
    return judge


def shares(judge: Judge, images: Tensor, facts: Facts) -> dict[str, float]:
    """Return the share of images in which each aspect, and all of them, are those of the prompts."""
    answers = right(judge, images, facts)
    aspects = [answers[aspect] for aspect in ASPECTS[:3]]  # none is drawn with lines
    named = dict(zip(ASPECTS[:3], aspects, strict=True)) | {"all": torch.stack(aspects).all(0)}
    return {aspect: round(answer.float().mean().item(), 4) for aspect, answer in named.items()}


@torch.no_grad()
def main(flags: Flags) -> None:
    bench = Bench(Train(data=flags.data, device="cpu"), "report")
    vae = AutoencoderKL.from_pretrained(Path(FOLDER) / "vae").eval().requires_grad_(False)
    with torch.enable_grad():
        judge = trained(flags, bench, vae)
    facts = draw_facts(bench.grammar, 1000, bench.rng, held_out=True)
    renders = draw_pictures(bench.bank, facts, pixels=PIXELS, rng=bench.rng)
    print("new renders", shares(judge, decode(vae, encode(vae, renders)[0]).clamp(-1, 1), facts), flush=True)

    facts = said_facts(bench, flags.prompts)
    texts = all_prompts(bench.bank.names)
    rows = bench.grammar.index(facts, torch.ones_like(facts.name_B, dtype=torch.bool)).tolist()
    ways: list[dict[str, Any]] = [{"cache": cache} for cache in flags.cache] or [{"precision": "fp8"}]
    pipes: dict[str, Any] = {
        name: seqpar.load(FOLDER, dtype=torch.float32, **way) for way in ways for name in way.values()
    }
    plain = next(iter(pipes.values()))
    size = {"height": PIXELS, "width": PIXELS, "num_inference_steps": flags.steps, "max_sequence_length": SHORT}
    images = {name: list[Tensor]() for name in (*pipes, "plain")}

    def drawn(pipe: Any, start: int) -> Tensor:
        prompts = [texts[row] for row in rows[start : start + flags.batch]]
        noise = torch.Generator().manual_seed(start)
        made = pipe(prompts, **size, guidance_scale=GUIDANCE, generator=noise, output_type="np")
        return torch.from_numpy(made.images).permute(0, 3, 1, 2) * 2 - 1

    for start in range(0, len(rows), flags.batch):
        for name, pipe in pipes.items():
            pipe.set_progress_bar_config(disable=True)
            images[name].append(drawn(pipe, start))
        with computed_by(plain, eight=False, cache=False):
            images["plain"].append(drawn(plain, start))
        done = min(start + flags.batch, len(rows))
        if done % 50 and done < len(rows):
            continue
        wide, seen = torch.cat(images["plain"]), facts.rows(slice(done))
        print(f"{done} prompts\nweights' dtype, all steps {shares(judge, wide, seen)}", flush=True)
        for name, pipe in pipes.items():
            made = torch.cat(images[name])
            decibels = -10 * ((made - wide) / 2).square().mean((1, 2, 3)).log10()
            count = computed_steps(pipe)
            steps = "" if count is None else f", {count[0] / count[1]:.0%} of the steps computed"
            print(
                f"{name} {shares(judge, made, seen)}, PSNR {decibels.mean():.1f} dB, worst {decibels.min():.1f}{steps}"
            )


if __name__ == "__main__":
    main(parsed(Flags, sys.argv[1:], "judged_precision"))
