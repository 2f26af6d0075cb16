"""Tests that real diffusers pipelines make diffusers' pictures after `parallelize`, whatever is asked of them.

The truth is the unchanged pipeline in one process; both sides keep fp64 where diffusers rounds to fp32. In every test
other ranks are given other seeds: all ranks must end with rank 0's picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor

import seqpar
from seqpar.adapter.parallelize import transformers_of
from tests.support import pipelines
from tests.support.diffusers_tiny import moved
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool

TOLERANCE = 1e-10
VISIBLE = 1e-4
SIZE = {"height": 20, "width": 12}  # 15 tokens for FLUX


@dataclass(frozen=True)
class Case:
    """A pipeline and its call. seeds: one, or one for each picture. change: changes the pipeline before the call."""

    pipe: Callable[[], Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1,)
    prompt: str | list[str] | None = "a red cat on the sea"
    change: Callable[[Any], None] = lambda pipe: None

    def pictures(self, pipe: Any, rank: int = 0) -> Tensor:
        """Return the pictures of a call; ranks other than 0 ask with other seeds."""
        generator = pipelines.seeded(*(seed + 100 * rank for seed in self.seeds))
        common = {"num_inference_steps": 3, "output_type": "pt", "generator": generator, **SIZE}
        prompt = {} if self.prompt is None else {"prompt": self.prompt}
        with StayDouble():
            result = pipe(**prompt, **{**common, **moved(dict(self.arguments), pipe.device)})
        pictures = result[0] if isinstance(result, tuple) else result[next(iter(result))]
        return torch.as_tensor(pictures)

    def truth(self, device: str = "cpu") -> Tensor:
        """Return the pictures of the unchanged pipeline, which one process computes on a device, in host memory."""
        pipe = self.pipe().to(device)
        self.change(pipe)
        return self.pictures(pipe).cpu()


def brighter(pipe: Any, step: int, t: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Change the latents of rank 0 after the first step, which must reach all ranks; others get zeros."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0  # noqa: TID251
    if step == 0:
        given["latents"] = given["latents"] * 0.5 if rank == 0 else torch.zeros_like(given["latents"])
    return given


def stopping(pipe: Any, step: int, t: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Stop after the second step."""
    pipe._interrupt = step == 1
    return given


def unipc(pipe: Any) -> None:
    """Replace the scheduler by one with history."""
    pipe.scheduler = pipelines.THEIRS.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def heun(pipe: Any) -> None:
    """Replace the scheduler by one with two evaluations a step."""
    pipe.scheduler = pipelines.THEIRS.FlowMatchHeunDiscreteScheduler()


def perturbed(kind: str, plain: Callable[[], Any], layers: str) -> Callable[[], Any]:
    """Return what makes a pipeline of a class with perturbed attention in some layers, of another one's parts."""

    def make() -> Any:
        parts = {name: part for name, part in plain().components.items() if part is not None}
        return pipelines.quiet(getattr(pipelines.THEIRS, kind)(**parts, pag_applied_layers=layers))

    return make


SHORT = {"max_sequence_length": 16}
NEGATIVE = {"negative_prompt": "blurry", "true_cfg_scale": 2.5, **SHORT}
TWO = ["a red cat", "the old blue house"]
VIDEO = {"height": 48, "width": 80, "num_frames": 5, **SHORT}
PIXART = {"height": 24, "width": 16, "use_resolution_binning": False, "clean_caption": False, **SHORT}
EMBEDDED = {
    "prompt_embeds": random((1, 7, pipelines.WIDTH), 1),
    "prompt_embeds_mask": torch.ones(1, 7, dtype=torch.int64),
    "negative_prompt_embeds": random((1, 5, pipelines.WIDTH), 2),
    "negative_prompt_embeds_mask": torch.ones(1, 5, dtype=torch.int64),
}
FLUX_EMBEDDED = {
    "prompt_embeds": random((2, 9, pipelines.WIDTH), 3),
    "pooled_prompt_embeds": random((2, pipelines.WIDTH), 4),
    "negative_prompt_embeds": random((2, 9, pipelines.WIDTH), 5),
    "negative_pooled_prompt_embeds": random((2, pipelines.WIDTH), 6),
    "true_cfg_scale": 2.0,
}
PICTURE = random((1, 3, 20, 12), 7).sigmoid()
CASES = {
    "flux": Case(pipelines.flux, SHORT),
    "flux, true guidance": Case(pipelines.flux, NEGATIVE),
    "sd3": Case(pipelines.sd3, SHORT),
    "pixart": Case(pipelines.pixart, PIXART),
    "wan": Case(pipelines.wan, VIDEO),
    "wan, two experts": Case(lambda: pipelines.wan(2), VIDEO),
    "qwen-image": Case(pipelines.qwen_image, {**EMBEDDED, "true_cfg_scale": 3.0}, prompt=None),
}
OPTIONS = {
    "guidance off, two calls": Case(pipelines.wan, {**VIDEO, "guidance_scale": 1.0}),
    "guidance off, one call": Case(pipelines.sd3, {**SHORT, "guidance_scale": 1.0}),
    "guidance off, several pictures": Case(pipelines.flux, {**SHORT, "num_images_per_prompt": 3}),
    "several pictures": Case(pipelines.flux, {**NEGATIVE, "num_images_per_prompt": 2}),
    "two prompts, doubled batch": Case(pipelines.sd3, {**SHORT, "negative_prompt": ["old", "blurry"]}, prompt=TWO),
    "a list of generators": Case(pipelines.pixart, {**PIXART, "num_images_per_prompt": 3}, seeds=(1, 2, 3)),
    "given embeddings": Case(pipelines.flux, FLUX_EMBEDDED, prompt=None),
    "a callback changes latents": Case(pipelines.flux, {**NEGATIVE, "callback_on_step_end": brighter}),
    "a callback changes latents, one call": Case(pipelines.sd3, {**SHORT, "callback_on_step_end": brighter}),
    "interrupt": Case(pipelines.flux, {**NEGATIVE, "callback_on_step_end": stopping}),
    "return_dict=False": Case(pipelines.wan, {**VIDEO, "return_dict": False}),
    "image to image": Case(
        lambda: pipelines.flux(kind="FluxImg2ImgPipeline"), {**SHORT, "image": PICTURE, "strength": 0.7}
    ),
    "another scheduler": Case(pipelines.wan, VIDEO, change=unipc),
    "two evaluations a step": Case(pipelines.sd3, SHORT, change=heun),
}
PAG = {"pag_scale": 2.0}
SD3_PAG = perturbed("StableDiffusion3PAGPipeline", pipelines.sd3, "transformer_blocks.1")
PIXART_PAG = perturbed("PixArtSigmaPAGPipeline", pipelines.pixart, "transformer_blocks.1")
PERTURBED = {
    "sd3": Case(SD3_PAG, {**SHORT, **PAG}),
    "sd3, several pictures": Case(SD3_PAG, {**SHORT, **PAG, "num_images_per_prompt": 2}),
    "sd3, without guidance": Case(SD3_PAG, {**SHORT, **PAG, "guidance_scale": 1.0, "num_images_per_prompt": 2}),
    "pixart": Case(PIXART_PAG, {**PIXART, **PAG}),
    "pixart, several pictures": Case(PIXART_PAG, {**PIXART, **PAG, "num_images_per_prompt": 2}),
}
EVERY = CASES | OPTIONS | {f"perturbed {name}": case for name, case in PERTURBED.items()}


@cache
def true_picture(name: str, device: str) -> Tensor:
    """Return the truth of a case, computed on "cpu" or "cuda"."""
    return EVERY[name].truth(device)


def sharded(rank: int, world: int, device: torch.device, name: str, cfg: int) -> Tensor:
    """Return this rank's pictures of the second of two calls, after `parallelize`."""
    case, pipe = EVERY[name], EVERY[name].pipe()
    seqpar.parallelize(pipe, make_mesh(device, cfg=cfg))
    for module in transformers_of(pipe).values():
        in_double(module)
    case.pictures(pipe, rank)
    case.change(pipe)
    return case.pictures(pipe, rank)


MORE = [(1, 1, "flux"), (4, 2, "flux, true guidance"), (4, 2, "sd3")]
LAYOUTS = [*((world, cfg, name) for world, cfg in ((2, 2), (3, 1)) for name in CASES), *MORE]


@pytest.mark.parametrize(("world", "cfg", "name"), LAYOUTS)
def test_a_pipeline_makes_diffusers_picture(ranks: Pool, world: int, cfg: int, name: str) -> None:
    truth = true_picture(name, ranks.device)
    for pictures in ranks.run(world, sharded, name, cfg):
        assert (pictures - truth).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_pipelines_work(ranks: Pool, name: str) -> None:
    truth = true_picture(name, ranks.device)
    for pictures in ranks.run(2, sharded, name, 2):
        assert (pictures - truth).abs().max() < TOLERANCE


def refused(rank: int, world: int, device: torch.device, name: str, cfg: int) -> Tensor | str:
    """Return this rank's pictures after `parallelize`, or the message of the ValueError."""
    try:
        return sharded(rank, world, device, name, cfg)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", PERTURBED)
@pytest.mark.parametrize(("world", "cfg"), [(2, 2), (3, 1)])
def test_perturbed_attention_is_right_or_refused(ranks: Pool, world: int, cfg: int, name: str) -> None:
    """Its processors read the rows of all branches, so that every rank computes them; tokens cannot be split."""
    truth = true_picture(f"perturbed {name}", ranks.device)
    for pictures in ranks.run(world, refused, f"perturbed {name}", cfg):
        if isinstance(pictures, str):
            assert world > cfg
            assert "PAG" in pictures
        else:
            assert (pictures - truth).abs().max() < TOLERANCE


def planned(rank: int, world: int, device: torch.device, name: str, options: dict[str, Any]) -> tuple[Tensor, str]:
    """Return this rank's pictures, where the planner decides on the mesh, and the mesh."""
    pipe = seqpar.parallelize(EVERY[name].pipe(), **options)
    in_double(pipe.transformer)
    return EVERY[name].pictures(pipe, rank), str(pipe.transformer.forward.mesh)


@pytest.mark.parametrize(
    ("name", "options", "mesh"),
    [
        ("flux", {}, "ulysses 2"),  # guidance is an input, so there is no second branch
        ("sd3", {}, "cfg 2"),
        ("wan", {"strategy": "kv_gather"}, "ulysses 2"),  # a named strategy needs ranks that share a sequence
        ("flux, true guidance", {"native": False, "transport": "peer"}, "ulysses 2"),
        ("perturbed pixart", {"strategy": "auto", "cfg": True}, "ulysses 2"),
        ("sd3", {"cfg": False}, "ulysses 2"),
        ("wan", {"cuts": WanTransformer3DModel._cp_plan, "strategy": "ring"}, "ring 2"),
    ],
)
def test_the_planner_decides_on_what_is_not_given(ranks: Pool, name: str, options: dict[str, Any], mesh: str) -> None:
    truth = true_picture(name, ranks.device)
    for pictures, made in ranks.run(2, planned, name, options):
        assert made == mesh
        assert (pictures - truth).abs().max() < TOLERANCE


def test_negative_control_options_and_seeds_are_visible(ranks: Pool) -> None:
    def far(name: str, other: str) -> bool:
        return bool((true_picture(name, ranks.device) - true_picture(other, ranks.device)).abs().max() > VISIBLE)

    assert far("flux", "flux, true guidance")
    assert far("flux, true guidance", "a callback changes latents")
    assert far("flux, true guidance", "interrupt")
    assert far("wan", "guidance off, two calls")
    assert far("wan", "another scheduler")
    pipe = pipelines.flux()
    assert (CASES["flux"].pictures(pipe) - CASES["flux"].pictures(pipe, rank=1)).abs().max() > VISIBLE
