"""Tests that real diffusers pipelines make diffusers' pictures after `parallelize`, whatever is asked of them.

The truth is the unchanged pipeline in one process; both sides keep fp64 where diffusers rounds to fp32. In every test
other ranks are given other seeds: all ranks must end with rank 0's picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from PIL import Image
from torch import Tensor

import seqpar
from seqpar.mesh.boundary import CancelledError, Reason, StepBoundary
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.load import keep_fp32
from seqpar.transformer.parallelize import passing, transformers_of
from tests.support import pipelines
from tests.support.diffusers_tiny import moved
from tests.support.foreign import StayDouble, in_double
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import mesh_for, random
from tests.support.pool import Pool

pytestmark = pytest.mark.slow
TOLERANCE = 1e-10
VISIBLE = 1e-4
SIZE = {"height": 20, "width": 12}  # 15 tokens for FLUX


@dataclass(frozen=True)
class Case:
    """A pipeline and its call.

    seeds: one, or one for each picture. change: changes the pipeline before the call. output: what the call returns,
    "pt" for pictures or "latent".
    """

    pipe: Callable[[], Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (1,)
    prompt: str | list[str] | None = "a red cat on the sea"
    change: Callable[[Any], None] = lambda pipe: None
    output: str = "latent"

    def pictures(self, pipe: Any, rank: int = 0, steps: int = 3) -> Tensor:
        """Return the pictures of a call; ranks other than 0 ask with other seeds."""
        generator = pipelines.seeded(*(seed + 100 * rank for seed in self.seeds))
        common = {"num_inference_steps": steps, "output_type": self.output, "generator": generator, **SIZE}
        prompt = {} if self.prompt is None else {"prompt": self.prompt}
        with StayDouble():
            result = pipe(**prompt, **{**common, **moved(dict(self.arguments), pipe.device)})
        pictures = result[0] if isinstance(result, tuple) else result[next(iter(result))]
        return torch.as_tensor(pictures)


def brighter(pipe: Any, step: int, t: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Change the latents of rank 0 after the first step, which must reach all ranks; others get zeros."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0  # noqa: TID251
    if step == 0:
        given["latents"] = given["latents"] * 0.5 if rank == 0 else torch.zeros_like(given["latents"])
    return given


def stopping(pipe: Any, step: int, t: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    pipe._interrupt = step == 1
    return given


def unipc(pipe: Any) -> None:
    pipe.scheduler = pipelines.THEIRS.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def heun(pipe: Any) -> None:
    pipe.scheduler = pipelines.THEIRS.FlowMatchHeunDiscreteScheduler()


def perturbed(kind: str, plain: Callable[[], Any], layers: str) -> Callable[[], Any]:

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
LAYERS = {
    "prompt_embeds": random((1, 7, 3, pipelines.WIDTH), 1),
    "prompt_embeds_mask": torch.tensor([[True, True, True, False, False, True, True]]),
    "negative_prompt_embeds": random((1, 7, 3, pipelines.WIDTH), 2),
    "negative_prompt_embeds_mask": torch.tensor([[True, False, False, False, False, True, True]]),
}
# texts of 7 and 4 tokens with padding behind them, without glyphs
HUNYUAN = {
    **{f"{name}prompt_embeds": random((1, 12, pipelines.WIDTH), seed) for seed, name in enumerate(("", "negative_"))},
    **{f"{name}prompt_embeds_mask": torch.arange(12)[None] < tokens for tokens, name in ((7, ""), (4, "negative_"))},
    **{f"{name}prompt_embeds_2": random((1, 6, 8), seed) for seed, name in enumerate(("", "negative_"), 2)},
    **{f"{name}prompt_embeds_mask_2": torch.zeros(1, 6, dtype=torch.int64) for name in ("", "negative_")},
}
OVIS = {name: x for name, x in EMBEDDED.items() if not name.endswith("mask")}
KANDINSKY = {
    f"{name}{what}": value
    for seed, name in enumerate(("", "negative_"))
    for what, value in {
        "prompt_embeds_qwen": random((1, 7 - seed, pipelines.WIDTH), seed),
        "prompt_embeds_clip": random((1, 16), 2 + seed),
        "prompt_cu_seqlens": torch.tensor([0, 7 - seed]),
    }.items()
}
FLUX_EMBEDDED = {
    "prompt_embeds": random((2, 9, pipelines.WIDTH), 3),
    "pooled_prompt_embeds": random((2, pipelines.WIDTH), 4),
    "negative_prompt_embeds": random((2, 9, pipelines.WIDTH), 5),
    "negative_pooled_prompt_embeds": random((2, pipelines.WIDTH), 6),
    "true_cfg_scale": 2.0,
}
PICTURE = random((1, 3, 20, 12), 7).sigmoid()
FRAME = Image.linear_gradient("L").convert("RGB").resize((64, 32))
ANIMATE = {"image": FRAME, "pose_video": [FRAME] * 9, "face_video": [FRAME] * 9, "height": 32, "width": 64}
# calls of one pipeline each, in this order; the first ones are decoded too, and no call follows a change
FLUX = {
    "flux": Case(pipelines.flux, SHORT, output="pt"),
    "flux, true guidance": Case(pipelines.flux, NEGATIVE, output="pt"),
    "guidance off, several pictures": Case(pipelines.flux, {**SHORT, "num_images_per_prompt": 3}),
    "several pictures": Case(pipelines.flux, {**NEGATIVE, "num_images_per_prompt": 2}),
    "given embeddings": Case(pipelines.flux, FLUX_EMBEDDED, prompt=None),
    "a callback changes latents": Case(pipelines.flux, {**NEGATIVE, "callback_on_step_end": brighter}),
    "interrupt": Case(pipelines.flux, {**NEGATIVE, "callback_on_step_end": stopping}),
}
SD3 = {
    "sd3": Case(pipelines.sd3, SHORT, output="pt"),
    "guidance off, one call": Case(pipelines.sd3, {**SHORT, "guidance_scale": 1.0}),
    "two prompts, doubled batch": Case(pipelines.sd3, {**SHORT, "negative_prompt": ["old", "blurry"]}, prompt=TWO),
    "a callback changes latents, one call": Case(pipelines.sd3, {**SHORT, "callback_on_step_end": brighter}),
    "two evaluations a step": Case(pipelines.sd3, SHORT, change=heun),
}
PIXARTS = {
    "pixart": Case(pipelines.pixart, PIXART, output="pt"),
    "a list of generators": Case(pipelines.pixart, {**PIXART, "num_images_per_prompt": 3}, seeds=(1, 2, 3)),
}
WAN = {
    "wan": Case(pipelines.wan, VIDEO, output="pt"),
    "guidance off, two calls": Case(pipelines.wan, {**VIDEO, "guidance_scale": 1.0}),
    "return_dict=False": Case(pipelines.wan, {**VIDEO, "return_dict": False}),
    "another scheduler": Case(pipelines.wan, VIDEO, change=unipc),
}
OTHERS = {
    "cogvideox": Case(pipelines.cogvideox, {**SHORT, "height": 16, "width": 24, "num_frames": 9}),
    "chroma": Case(pipelines.chroma, {**SHORT, "negative_prompt": "blurry", "guidance_scale": 3.0}),
    "wan, two experts": Case(lambda: pipelines.wan(2), VIDEO, output="pt"),
    "qwen-image": Case(pipelines.qwen_image, {**EMBEDDED, "true_cfg_scale": 3.0}, prompt=None, output="pt"),
    "krea 2": Case(pipelines.krea2, {**LAYERS, "guidance_scale": 3.0}, prompt=None),
    "hunyuan-video 1.5": Case(pipelines.hunyuan_video15, {**HUNYUAN, "num_frames": 5}, prompt=None),
    "auraflow": Case(pipelines.auraflow, {**SHORT, "negative_prompt": "blurry"}, output="pt"),
    "ovis-image": Case(pipelines.ovis_image, {**OVIS, "negative_prompt": None}, prompt=None, output="pt"),
    "ideogram 4": Case(pipelines.ideogram4, {**SHORT, "guidance_scale": 3.0, "guidance_schedule": None}, output="pt"),
    "kandinsky 5": Case(pipelines.kandinsky5, KANDINSKY, prompt=None),
    "wan-animate, two segments": Case(
        pipelines.wan_animate, {**ANIMATE, "guidance_scale": 2.0, "segment_frame_length": 5}, output="pt"
    ),
    "qwen-image, ControlNet": Case(
        pipelines.qwen_image_controlnet, {**EMBEDDED, "true_cfg_scale": 3.0, "control_image": PICTURE}, prompt=None
    ),
    "image to image": Case(
        lambda: pipelines.flux(kind="FluxImg2ImgPipeline"), {**SHORT, "image": PICTURE, "strength": 0.7}
    ),
}
PAG = {"pag_scale": 2.0}
SD3_PAG = perturbed("StableDiffusion3PAGPipeline", pipelines.sd3, "transformer_blocks.1")
PIXART_PAG = perturbed("PixArtSigmaPAGPipeline", pipelines.pixart, "transformer_blocks.1")
PAGS = {
    "perturbed sd3": Case(SD3_PAG, {**SHORT, **PAG}),
    "perturbed sd3, several pictures": Case(SD3_PAG, {**SHORT, **PAG, "num_images_per_prompt": 2}),
    "perturbed sd3, without guidance": Case(SD3_PAG, {**SHORT, **PAG, "guidance_scale": 1, "num_images_per_prompt": 2}),
    "perturbed pixart": Case(PIXART_PAG, {**PIXART, **PAG}),
    "perturbed pixart, several pictures": Case(PIXART_PAG, {**PIXART, **PAG, "num_images_per_prompt": 2}),
}
SMALL_VIDEO = {"height": 32, "width": 64, "num_frames": 5}
LTX = {
    "ltx": Case(pipelines.ltx, {**SMALL_VIDEO, **SHORT}),
    # guidance by the text, by a block without attention, and by video and sound apart
    "ltx-2": Case(
        pipelines.ltx2, {**SMALL_VIDEO, **pipelines.LTX2_TEXTS, "spatio_temporal_guidance_blocks": [1]}, prompt=None
    ),
}
CASES = FLUX | SD3 | PIXARTS | WAN | OTHERS | PAGS | LTX


@cache
def true_picture(name: str, device: str) -> Tensor:
    pipe = CASES[name].pipe().to(device)
    CASES[name].change(pipe)
    return CASES[name].pictures(pipe).cpu()


def sharded(rank: int, world: int, device: torch.device, names: Sequence[str], cfg: int) -> list[Tensor]:
    """Return this rank's pictures of calls of one pipeline after `parallelize`, which follow a shorter call."""
    pipe = CASES[names[0]].pipe()
    seqpar.parallelize(pipe, make_mesh(device, cfg=cfg))
    for module in transformers_of(pipe).values():
        in_double(module)
    CASES[names[0]].pictures(pipe, rank, steps=1 + (names[0] in PIXARTS))  # one: a distilled model
    made = []
    for name in names:
        CASES[name].change(pipe)
        made.append(CASES[name].pictures(pipe, rank))
    return made


LAYOUTS = [
    *((2, 2, tuple(group)) for group in (FLUX, SD3, PIXARTS, WAN)),
    *((2, 2, (name,)) for name in OTHERS),
    *((2, 1, (name,)) for name in ("ideogram 4", "ltx-2")),
    *((3, 1, (name,)) for name in ("wan, two experts", "ltx", "qwen-image, ControlNet")),
    (1, 1, ("qwen-image, ControlNet",)),
    (4, 2, ("flux, true guidance",)),
]


@pytest.mark.parametrize(("world", "cfg", "names"), LAYOUTS, ids=str)
def test_calls_of_a_pipeline_make_diffusers_pictures(ranks: Pool, world: int, cfg: int, names: tuple[str, ...]) -> None:
    for rank, calls in enumerate(ranks.run(world, sharded, names, cfg)):
        for name, pictures in zip(names, calls, strict=True):
            if rank == 0 or CASES[name].output == "pt":  # latents that are not decoded stay a rank's own
                assert (pictures - true_picture(name, ranks.device)).abs().max() < TOLERANCE, name


def controlled(pipe: Any, scale: float = 0.75) -> Tensor:
    """Return one evaluation of Z-Image with a ControlNet, which its pipeline does in fp32 alone."""
    latents, texts = ([moved(random(size, i), pipe.device) for i in range(2)] for size in ((4, 1, 10, 6), (9, 32)))
    times = latents[0].new_tensor([0.3, 0.7])
    with StayDouble(), torch.no_grad():
        samples = pipe.controlnet(latents, times, texts, latents[::-1], conditioning_scale=scale)
        return torch.stack(pipe.transformer(latents, times, texts, controlnet_block_samples=samples)[0])


def controlled_on_ranks(rank: int, world: int, device: torch.device, cfg: int) -> Tensor:
    """Return the second evaluation."""
    pipe = seqpar.parallelize(pipelines.z_image_controlnet(), make_mesh(device, cfg=cfg))
    in_double(pipe.transformer)
    return [controlled(pipe) for _ in range(2)][1]


@pytest.mark.parametrize(("world", "cfg"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_a_controlnet_that_shares_layers_with_the_transformer(ranks: Pool, world: int, cfg: int) -> None:
    pipe = pipelines.z_image_controlnet().to(ranks.device)
    wanted = controlled(pipe)
    assert (wanted - controlled(pipe, 0)).abs().max() > VISIBLE
    for got in ranks.run(world, controlled_on_ranks, cfg):
        assert (got - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("make", "park"),
    [
        (pipelines.qwen_image_controlnet, False),
        (pipelines.z_image_controlnet, False),
        (pipelines.z_image_controlnet, True),
    ],
)
def test_a_folder_with_a_controlnet_is_loaded(tmp_path: Path, make: Callable[[], Any], park: bool) -> None:
    pipe = make().to(torch.float32)
    pipe.register_modules(text_encoder=pipelines.t5(1).float(), tokenizer=pipelines.tokenizer(16))
    pipe.save_pretrained(tmp_path)
    loaded = seqpar.load(tmp_path, dtype=torch.float32, mesh=Mesh.single(), park=park)
    weights = [dict(x.controlnet.named_parameters()) for x in (loaded, pipe)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def refused(rank: int, world: int, device: torch.device, names: Sequence[str], cfg: int) -> list[Tensor] | str:
    try:
        return sharded(rank, world, device, names, cfg)
    except ValueError as error:
        return str(error)


PERTURBED = [
    (2, 2, tuple(PAGS)[:3]),
    (2, 2, tuple(PAGS)[3:]),
    (3, 1, ("perturbed sd3, several pictures",)),
    (3, 1, ("perturbed pixart",)),
]


@pytest.mark.parametrize(("world", "cfg", "names"), PERTURBED, ids=str)
def test_perturbed_attention_is_right_or_refused(ranks: Pool, world: int, cfg: int, names: tuple[str, ...]) -> None:
    """Its processors read the rows of all branches, so that every rank computes them; tokens cannot be split."""
    for rank, calls in enumerate(ranks.run(world, refused, names, cfg)):
        if isinstance(calls, str):
            assert world > cfg
            assert "PAG" in calls
        elif rank == 0:
            for name, pictures in zip(names, calls, strict=True):
                assert (pictures - true_picture(name, ranks.device)).abs().max() < TOLERANCE, name


def planned(
    rank: int, world: int, device: torch.device, name: str, options: dict[str, Any], computed: bool
) -> tuple[Tensor | None, str]:
    """Return this rank's pictures, where the planner decides on the mesh, or None unless computed; and the mesh."""
    pipe = seqpar.parallelize(CASES[name].pipe(), **options)
    in_double(pipe.transformer)
    return CASES[name].pictures(pipe, rank) if computed else None, str(pipe.transformer.forward.mesh)


@pytest.mark.parametrize(
    ("name", "options", "mesh", "computed"),
    [
        ("flux", {}, "ulysses 2", True),  # guidance is an input, so there is no second branch
        ("sd3", {}, "cfg 2", False),
        ("wan", {"strategy": "kv_gather"}, "ulysses 2", False),  # a named strategy needs ranks that share a sequence
        ("flux, true guidance", {"native": False, "transport": "peer"}, "ulysses 2", True),
        ("perturbed pixart", {"strategy": "auto", "cfg": True}, "ulysses 2", False),
        ("sd3", {"cfg": False}, "ulysses 2", False),
        ("wan", {"cuts": WanTransformer3DModel._cp_plan, "strategy": "ring"}, "ring 2", True),
    ],
)
def test_the_planner_decides_on_what_is_not_given(
    ranks: Pool, name: str, options: dict[str, Any], mesh: str, computed: bool
) -> None:
    for pictures, made in ranks.run(2, planned, name, options, computed):
        assert made == mesh
        assert (pictures is not None) is computed
        if computed:
            assert (pictures - true_picture(name, ranks.device)).abs().max() < TOLERANCE


def test_negative_control_options_and_seeds_are_visible(ranks: Pool) -> None:
    def far(name: str, other: str) -> bool:
        return bool((true_picture(name, ranks.device) - true_picture(other, ranks.device)).abs().max() > VISIBLE)

    assert far("return_dict=False", "guidance off, two calls")
    assert far("return_dict=False", "another scheduler")
    pipe, plain = pipelines.flux(), replace(CASES["flux"], output="latent")
    latents, guided = plain.pictures(pipe), replace(plain, arguments=NEGATIVE).pictures(pipe)
    assert (latents - guided).abs().max() > VISIBLE
    assert (latents - plain.pictures(pipe, rank=1)).abs().max() > VISIBLE
    for name in ("a callback changes latents", "interrupt"):
        assert (guided - true_picture(name, "cpu")).abs().max() > VISIBLE, name


# Cancelled runs end on all ranks at the same place, and the next picture is the same


class Wants:
    """Wants a run to end when it is asked for the time `place`; None: never."""

    def __init__(self, place: int | None) -> None:
        self.asked, self._place = 0, place

    def __call__(self) -> Reason | None:
        self.asked += 1
        return "cancelled" if self.asked == self._place else None


def given_up(rank: int, world: int, device: torch.device, name: str, cfg: int) -> tuple[int, list[int], list[bool]]:
    """Give a pipeline's calls up at places from the first to the last, as the last rank wants it.

    Returns how many boundaries a whole call passes, where each call ended, and whether the call after it has the bits
    of the first one.
    """
    case, mesh = CASES[name], make_mesh(device, cfg=cfg)
    pipe, passes = seqpar.parallelize(case.pipe(), mesh), list[int]()
    case.pictures(pipe, rank)  # from now on it is known whether a step has two calls
    with passing(pipe, lambda: passes.append(0)):
        first = case.pictures(pipe, rank)
    count, ends, same = len(passes), list[int](), list[bool]()
    for place in sorted({1, count // 2 + 1, count}):
        wants = Wants(place if rank == world - 1 else None)
        with pytest.raises(CancelledError), passing(pipe, StepBoundary(mesh, wants)):
            case.pictures(pipe, rank)
        ends.append(wants.asked)
        same.append(torch.equal(first, case.pictures(pipe, rank)))
    seqpar.release(pipe)
    return count, ends, same


PLACES = [(1, 1, "sd3"), (2, 2, "wan, two experts"), (3, 1, "image to image")]


@pytest.mark.parametrize(("world", "cfg", "name"), PLACES)
def test_a_pipeline_ends_at_any_place_and_goes_on_with_the_same_bits(
    ranks: Pool, world: int, cfg: int, name: str
) -> None:
    for count, ends, same in ranks.run(world, given_up, name, cfg):
        assert count >= 3  # a call of the transformer in each step
        assert ends == sorted({1, count // 2 + 1, count})
        assert all(same), same


def test_a_pipeline_that_is_not_parallelized_is_refused() -> None:
    with pytest.raises(ValueError, match="is not parallelized"), passing(CASES["flux"].pipe(), lambda: None):
        pass


# With 16-bit weights, the state of the loop can stay in fp32

STATE_STEPS = 28
FLOW: Any = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SHIFT: Any = {"use_dynamic_shifting": True, "time_shift_type": "exponential"}
CALL: dict[str, Any] = {"prompt": "a red cat", "height": 24, "width": 32}
TRUE = {**NEGATIVE, "true_cfg_scale": 2.0}
STATE_VIDEO = {"num_frames": 5, "height": 32}


def rounded(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Round timestep and guidance as FLUX.1 rounds them in bf16, which no state can change."""
    times = ("timestep", "guidance")
    return args, kwargs | {name: (kwargs[name].bfloat16() * 1000).double() / 1000 for name in times if name in kwargs}


SMALL: Any = {"in_channels": 16, "attention_head_dim": 8, "num_attention_heads": 2, "axes_dims_rope": (2, 2, 4)}
SHAPES = {"flux": (1, 48, 16), "wan": (1, 16, 2, 4, 4)}


def run(
    name: str, scheduler: Any, way: str, mesh: Mesh | None = None, steps: int = STATE_STEPS, **arguments: Any
) -> Tensor:
    pipelines.THEIRS.utils.logging.set_verbosity_error()  # about `to`
    pipe = getattr(pipelines, name)().to(torch.bfloat16).to(torch.float64 if way == "truth" else torch.bfloat16)
    pipe.scheduler = scheduler
    if way == "truth" and name == "flux":
        pipe.transformer.register_forward_pre_hook(rounded, with_kwargs=True)
    prepares, seen = pipe.prepare_latents, list[Tensor]()
    seqpar.parallelize(pipe, mesh or Mesh.single())
    if way == "fp32":
        assert keep_fp32(pipe) is None
    noise = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(5)).bfloat16()
    with StayDouble() if way == "truth" else nullcontext():
        pipe(
            **{**CALL, **arguments},
            latents=noise.to(pipe.transformer.dtype),
            num_inference_steps=steps,
            callback_on_step_end=lambda pipe, i, t, tensors: seen.append(tensors["latents"]) or {},
        )
    seqpar.release(pipe)
    assert pipe.prepare_latents == prepares
    return seen[-1]


STATES: list[tuple[str, Callable[[], Any], dict[str, Any], float]] = [
    ("flux", lambda: pipelines.flow(shift=3.0), TRUE, 1.5),
    ("flux", lambda: pipelines.THEIRS.UniPCMultistepScheduler(**FLOW, **SHIFT), SHORT, 2.0),
    ("wan", lambda: pipelines.flow(shift=3.0), STATE_VIDEO, 1.3),
]


@pytest.mark.parametrize(("name", "scheduler", "arguments", "factor"), STATES)
def test_latents_are_closer_to_the_truth(
    name: str, scheduler: Callable[[], Any], arguments: dict[str, Any], factor: float
) -> None:
    """Measured: FLUX 1.8 (UniPC 3.0), Wan 1.6 times as close."""
    truth = run(name, scheduler(), "truth", **arguments)
    plain, fp32 = (run(name, scheduler(), way, **arguments) for way in ("bf16", "fp32"))
    assert fp32.dtype == torch.float32
    away = [float((x.double() - truth).norm() / truth.norm()) for x in (plain, fp32)]
    assert factor * away[1] < away[0] < 0.1


def on_ranks(rank: int, world: int, device: torch.device, cfg: int) -> Tensor:
    return run("flux", pipelines.flow(shift=3.0), "fp32", mesh_for("ulysses", world, device, cfg), 5, **TRUE)


def test_ranks_keep_it_alike_and_promise_it(ranks: Pool) -> None:
    alone = run("flux", pipelines.flow(shift=3.0), "fp32", steps=5, **TRUE)
    for latents in (x for cfg in (1, 2) for x in ranks.run(2, on_ranks, cfg)):
        assert latents.dtype == torch.float32
        assert (latents - alone).norm() / alone.norm() < 0.05


def test_where_it_is_not_kept() -> None:
    """In other data types nothing is rounded, and a ControlNet would be given latents that it does not take."""
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single())
    assert keep_fp32(pipe) == "the transformer has weights of float64"
    seqpar.release(pipe)
    parts = {name: part for name, part in pipe.components.items() if name not in ("image_encoder", "feature_extractor")}
    net = pipelines.THEIRS.FluxControlNetModel(num_layers=1, num_single_layers=1, **SMALL)
    pipe = seqpar.parallelize(pipelines.THEIRS.FluxControlNetPipeline(**parts, controlnet=net), Mesh.single())
    assert keep_fp32(pipe) == "controlnet may read the latents, too"
    seqpar.release(pipe)
