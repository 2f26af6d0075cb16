# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
# pyright: reportOptionalCall=false, reportOptionalSubscript=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
"""What a trained model is worth: pictures of prompts, looked at by the judge and saved for people to look at."""

import torch
from _flux import parameters, save_pipeline
from _judge import ASPECTS, Judge, right
from _networks import PIXELS, decode, encode
from _prompts import HELD_OUT, Facts, all_prompts, draw_facts, facts_of_pairs
from _stage import Bench
from _training import save_grid
from diffusers import AutoencoderKL, FluxPipeline


@torch.no_grad()
def judged_renders(bench: Bench, vae: AutoencoderKL, judge: Judge) -> dict[str, float]:
    """Return the shares of new renders, decoded by the VAE, of which the judge is right."""
    images, facts = bench.pictures(2 * bench.config.batch, held_out=True, outlined=False)
    answers = right(judge, decode(vae, encode(vae, images)[0]).clamp(-1, 1), facts)
    return {aspect: answer.float().mean().item() for aspect, answer in answers.items()}


def report(bench: Bench) -> dict[str, float]:
    """Save the pipeline, load what a user gets, and let the judge look at its pictures."""
    config, folder, lora = bench.config, bench.config.work / "emoji-flux", bench.config.work / "outline.safetensors"
    parts = bench.parts("guide")
    metrics: dict[str, float] = {"parameters": parameters(parts, bench.vae())}
    save_pipeline(folder, parts, bench.vae(), bench.tokenizers)
    metrics["folder_mb"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6
    pipe = FluxPipeline.from_pretrained(folder, dtype=torch.float32).to(bench.device)
    pipe.set_progress_bar_config(disable=True)
    judge, pairs = bench.judge(), [pair for pair in HELD_OUT for _ in range(max(1, config.prompts // 20))]
    seen = said_facts(bench, config.prompts)
    metrics |= _judged(bench, pipe, judge, seen, "seen")
    metrics |= _judged(bench, pipe, judge, facts_of_pairs(bench.grammar, pairs, bench.rng), "held_out")
    pipe.load_lora_weights(lora.parent, weight_name=lora.name)
    return metrics | _judged(bench, pipe, judge, seen.rows(slice(config.prompts // 4)), "lora", lines=True)


def said_facts(bench: Bench, count: int) -> Facts:
    """Return facts in which everything is said, none of them of a held-out pair."""
    facts = draw_facts(bench.grammar, 4 * count, bench.rng, held_out=False)
    return facts.rows(facts.all_said().nonzero()[:count, 0])


def _judged(
    bench: Bench, pipe: FluxPipeline, judge: Judge, facts: Facts, what: str, *, lines: bool = False
) -> dict[str, float]:
    """Generate an image of each prompt in 25 steps, with the pipeline's guidance; save some, return who is right."""
    texts = all_prompts(bench.bank.names)
    rows = bench.grammar.index(facts, torch.ones_like(facts.name_B, dtype=torch.bool)).tolist()
    prompts, images = [texts[row] for row in rows], []
    for start in range(0, len(prompts), 100):
        some = prompts[start : start + 100]
        generator = torch.Generator("cpu").manual_seed(bench.config.seed)
        result = pipe(some, height=PIXELS, width=PIXELS, num_inference_steps=25, generator=generator, output_type="np")
        images.append(torch.from_numpy(result.images))
    images_NHWC = torch.cat(images)
    answers = right(judge, images_NHWC.permute(0, 3, 1, 2).to(bench.device) * 2 - 1, facts, lines=lines)
    marks = ["" if good else "  WRONG" for good in answers["all"].tolist()]
    captions = tuple(f"{prompt[:26]}{mark}" for prompt, mark in zip(prompts, marks, strict=True))[:96]
    save_grid(
        bench.config.work / f"{what}.png", images_NHWC[:96].repeat_interleave(2, 1).repeat_interleave(2, 2), 8, captions
    )
    return {f"{what}_prompts": len(prompts)} | {
        f"{what}_right_{aspect}": answers[aspect].float().mean().item() for aspect in (*ASPECTS, "all")
    }
