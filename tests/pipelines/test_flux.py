"""Tests of FLUX.1's own loop: pictures from a complete tiny folder, against diffusers' FluxPipeline in fp64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Guidance
from seqpar.pipelines import _flux_text, _loaded
from seqpar.pipelines.flux import Files, Pipeline, generate
from seqpar.planner.search import Wish
from seqpar.ranks.mesh import Mesh
from seqpar.sampling.loop import draw_noise
from tests.support.foreign import StayDouble
from tests.support.meshes import mesh_for
from tests.support.pool import Pool

STEPS, SEED, SIZE, TEXT = 3, 5, (28, 20), 7
PROMPTS = ["a red cat", "the old house in the sea", "a red cat"]  # also two pictures of one prompt
NEGATIVE = "blurry"
UNIPC: Any = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "use_dynamic_shifting": True,
}
CLOSE, PIXEL = 1e-10, 1e-6  # largest errors: latents are fp64, our decoder's pixels are rounded to fp32

Layout = tuple[str, int, int]
"""Strategy, sizes of the cfg and data axes."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return a folder like FLUX.1-dev's (True: it takes the guidance scale and shifts by size) and one like schnell's.

    Schedules are shifted in both.
    """
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    found = {}
    for embeds in (True, False):
        pipe, found[embeds] = pipelines.flux(embeds), tmp_path_factory.mktemp("flux")
        pipe.scheduler = pipelines.flow(shift=3.0, use_dynamic_shifting=embeds)
        pipe.save_pretrained(found[embeds])
    return found


@cache
def theirs(folder: Path, guidance: Guidance, device: str = "cpu", unipc: bool = False) -> tuple[Tensor, Tensor]:
    """Return diffusers' latents and pictures of the prompts, from the noise that ours start with, in host memory."""
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
    from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

    pipe = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float64)
    pipe.set_progress_bar_config(disable=True)
    pipe.to(device)
    pipe.scheduler = UniPCMultistepScheduler(**UNIPC) if unipc else pipe.scheduler
    height, width = (side // 2 for side in SIZE)
    noise = draw_noise((len(PROMPTS), 4, height, width), torch.Generator().manual_seed(SEED)).double()
    latents = FluxPipeline._pack_latents(noise, len(PROMPTS), 4, height, width)
    true = {"true_cfg_scale": guidance.scale, "negative_prompt": [NEGATIVE] * len(PROMPTS)} if guidance.on else {}
    sizes = {"height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS, "max_sequence_length": TEXT}
    given: Any = {"latents": latents.to(device), "guidance_scale": guidance.embedded or 0.0, **sizes, **true}
    seen = list[Tensor]()
    given["callback_on_step_end"] = lambda pipe, step, t, tensors: seen.append(tensors["latents"].cpu()) or tensors
    with StayDouble():
        made: Any = pipe(PROMPTS, **given, output_type="pt")
    return FluxPipeline._unpack_latents(seen[-1], *SIZE, 2), made.images.cpu()


def ours(
    rank: int,
    world: int,
    device: torch.device,
    folder: str,
    layout: Layout,
    guidance: Guidance,
    change: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return our latents and pictures of the prompts; other ranks ask for others, which must not count."""
    strategy, cfg, data = layout
    files = replace(Files.locate(folder), text_tokens=TEXT)
    mesh, wish = mesh_for(strategy, world, device, cfg, data), Wish(strategy=strategy)
    asked = PROMPTS if rank == 0 else ["another"] * len(PROMPTS)
    settings = {"steps": STEPS + rank, "seed": SEED + rank, "size": SIZE, "negative": NEGATIVE, **change}
    with StayDouble(), Pipeline.load(files, mesh, torch.float64, wish=wish, prompts=asked) as pipeline:
        latents = pipeline.latents(asked, guidance=guidance, **settings)
        return latents, pipeline.decode(latents)


DEV, SCHNELL, TRUE, BOTH = Guidance(1.0, embedded=3.5), Guidance(1.0), Guidance(4.0), Guidance(2.0, embedded=3.5)


@pytest.mark.parametrize(
    ("world", "layout", "guidance"),
    [
        (1, ("ulysses", 1, 1), BOTH),
        (2, ("ulysses", 1, 1), SCHNELL),
        (2, ("ulysses", 2, 1), BOTH),
        (3, ("kv_first", 1, 1), DEV),
        (3, ("ring", 1, 1), TRUE),
        (3, ("ulysses", 1, 3), DEV),
        (4, ("kv_gather", 2, 1), TRUE),
        (4, ("usp", 1, 1), DEV),
    ],
    ids=str,
)
def test_pictures_are_those_of_diffusers(
    ranks: Pool, folders: Mapping[bool, Path], world: int, layout: Layout, guidance: Guidance
) -> None:
    folder = folders[guidance.embedded is not None]
    truth, shown = theirs(folder, guidance, ranks.device)
    for latents, images in ranks.run(world, ours, str(folder), layout, guidance, {}):
        assert (latents - truth).abs().max() < CLOSE
        assert images.shape == (len(PROMPTS), 3, *SIZE)
        assert (images - shown).abs().max() < PIXEL
    assert (truth[0] - truth[2]).abs().max() > 0.05  # one prompt, two pictures


def test_negative_control_what_is_asked_for_counts(folders: Mapping[bool, Path]) -> None:
    changes: dict[str, dict[str, Any]] = {
        "embedded": {"guidance": Guidance(2.0, embedded=3.0)},
        "scale": {"guidance": Guidance(2.1, embedded=3.5)},
        "negative": {"negative": "old"},
        "seed": {"seed": SEED + 1},
    }
    files, truth = replace(Files.locate(folders[True]), text_tokens=TEXT), theirs(folders[True], BOTH)[0]
    asked: dict[str, Any] = {"guidance": BOTH, "negative": NEGATIVE, "seed": SEED, "steps": STEPS, "size": SIZE}
    with StayDouble(), Pipeline.load(files, Mesh.single(), torch.float64, prompts=PROMPTS) as pipeline:
        for name, change in changes.items():
            latents = pipeline.latents(PROMPTS, **{**asked, **change})
            assert (latents - truth).abs().max() > 1e-4, name


def test_another_scheduler_follows_the_flow(folders: Mapping[bool, Path]) -> None:
    truth, _ = theirs(folders[True], DEV, unipc=True)
    change = {"scheduler": "UniPCMultistepScheduler"}
    latents, _ = ours(0, 1, torch.device("cpu"), str(folders[True]), ("ulysses", 1, 1), DEV, change)
    assert (latents - truth).abs().max() < 1e-4  # diffusers' UniPC keeps fp32 coefficients


def encodings(rank: int, world: int, device: torch.device, folder: str) -> tuple[int, list[int]]:
    """Return how often this rank loaded text encoders, and how many of them were alive when other weights loaded."""
    made: list[Any] = []
    alive: list[int] = []
    load, build = _flux_text.load_encoders, _loaded.load_vae

    def counted(path: Path, dtype: torch.dtype) -> Any:
        pipe = load(path, dtype)
        made.append([weakref.ref(getattr(pipe, name)) for name in _flux_text.ENCODERS])
        return pipe

    def watched(*args: Any) -> Any:
        alive.append(sum(each() is not None for pair in made for each in pair))
        return build(*args)

    gc.disable()  # the encoders must be freed by us, not by chance
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_flux_text, "load_encoders", counted)
            patch.setattr(_loaded, "load_vae", watched)
            files = replace(Files.locate(folder), text_tokens=TEXT)
            with Pipeline.load(files, mesh_for("ulysses", world, device), prompts=PROMPTS) as pipeline:
                for prompts in (PROMPTS, PROMPTS[:1], ["a dog"]):
                    pipeline.latents(prompts, steps=1, guidance=DEV, size=SIZE)
    finally:
        gc.enable()
    return len(made), alive


def test_rank_0_alone_loads_encoders_and_frees_them_before_other_weights(
    ranks: Pool, folders: Mapping[bool, Path]
) -> None:
    assert ranks.run(2, encodings, str(folders[True])) == [(2, [0]), (0, [0])]  # the second time for another prompt


def encoders_lost(rank: int, world: int, device: torch.device, folder: str) -> str:
    def fail(*_: object) -> None:
        raise ValueError("no encoders")

    files, mesh = Files.locate(folder), mesh_for("ulysses", world, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flux_text, "load_encoders", fail)
        with pytest.raises(ValueError, match="no encoders") as error:
            Pipeline.load(files, mesh, prompts=PROMPTS)
    return str(error.value)


def test_encoders_that_do_not_load_are_an_error_on_every_rank(ranks: Pool, folders: Mapping[bool, Path]) -> None:
    first, second = ranks.run(2, encoders_lost, str(folders[True]))
    assert first == second == "rank 0: no encoders"


def test_a_pipeline_in_memory_makes_the_latents_of_its_folder(folders: Mapping[bool, Path]) -> None:
    from diffusers.pipelines.flux.pipeline_flux import FluxPipeline

    settings: Any = {"steps": 2, "guidance": DEV, "size": SIZE}
    files = replace(Files.locate(folders[True]), text_tokens=TEXT)
    pipe = FluxPipeline.from_pretrained(folders[True], torch_dtype=torch.float32)
    with Pipeline.load(files, Mesh.single()) as loaded, Pipeline.of(pipe, Mesh.single(), text_tokens=TEXT) as made:
        found = made.latents(PROMPTS, **settings)
        assert torch.equal(found, loaded.latents(PROMPTS, **settings))
        assert torch.equal(made.decode(found), loaded.decode(found))
        assert made.texts.rows(PROMPTS)["pooled_projections"].shape == (3, 32)  # encoded once, kept
    assert pipe.text_encoder is not None


def kept(rank: int, world: int, device: torch.device, folder: str) -> list[bool]:
    """Return whether a kept run gives the bits of a new one, for other texts, another scale and another number."""
    files, mesh = replace(Files.locate(folder), text_tokens=TEXT), mesh_for("ulysses", world, device)
    first: dict[str, Any] = {"prompts": PROMPTS, "guidance": BOTH, "negative": "old"}
    others = {"prompts": ["the sea", "a dog", "the sea"], "guidance": Guidance(3.0, embedded=2.0), "negative": "blurry"}
    found = []
    with Pipeline.load(files, mesh, torch.float64) as pipeline:
        for change in (others, {**others, "prompts": ["a dog"], "seed": 1}):
            pipeline.latents(**first, steps=2, size=SIZE)
            again = pipeline.latents(**{**first, **change}, steps=2, size=SIZE)
            with Pipeline.load(files, mesh, torch.float64) as new:
                found.append(torch.equal(again, new.latents(**{**first, **change}, steps=2, size=SIZE)))
    return found


def test_a_kept_run_serves_other_texts_and_scales(ranks: Pool, folders: Mapping[bool, Path]) -> None:
    assert ranks.run(2, kept, str(folders[True])) == [[True] * 2] * 2


def generated(rank: int, world: int, device: torch.device, folder: str) -> list[Any]:
    """Return the pictures of one call whose other ranks ask for a second branch and another size, as tensors."""
    asked: Any = {"size": (24, 16 + 8 * rank), "guidance": Guidance(3.0) if rank else None, "steps": 1 + rank}
    images = generate(["a cat", "a dog"], folder, mesh=mesh_for("ulysses", world, device), **asked)
    return [torch.from_numpy(np.array(image)).int().flatten(0, 1) for image in images]


def test_generate_is_the_whole_path_in_one_call(ranks: Pool, folders: Mapping[bool, Path]) -> None:
    truth = generated(0, 1, torch.device("cpu"), str(folders[False]))
    assert [len(image) for image in truth] == [16 * 24] * 2
    for images in ranks.run(2, generated, str(folders[False])):
        assert all((x - y).abs().max() <= 1 for x, y in zip(images, truth, strict=True))


def one_decoder(rank: int, world: int, device: torch.device) -> float:
    """Return the difference between our pictures before and while a diffusers pipeline shares its decoder's input."""
    from tests.support import pipelines

    pipe, mesh = pipelines.flux(), mesh_for("ulysses", world, device)
    latents = torch.randn(3, 4, 6, 4, dtype=torch.float64)
    with Pipeline.of(pipe, mesh, text_tokens=TEXT) as ours:
        before = ours.decode(latents)
        seqpar.parallelize(pipe, mesh)
        after = ours.decode(latents)
        seqpar.release(pipe)
    return (before - after).abs().max().item()


def test_our_loop_decodes_beside_a_pipeline_that_shares_its_decoder(ranks: Pool) -> None:
    """One rank decodes two pictures and the other one: a decoder that waited for all ranks would hang."""
    assert ranks.run(2, one_decoder) == [0.0, 0.0]


def test_the_planner_counts_text_as_a_stream_of_its_own(folders: Mapping[bool, Path]) -> None:
    load = Files.locate(folders[True]).load_of(["a cat"], False, 1, torch.float32, SIZE)
    assert (load.tokens, load.others) == (7 * 5, (_flux_text.TOKENS,))


def test_sigmas_and_shift_are_those_of_diffusers(folders: Mapping[bool, Path]) -> None:
    """1024 x 1024 pixels of the real model are 4096 tokens, where the shift is diffusers' maximum."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    files, plain = Files.locate(folders[True]), Files.locate(folders[False])
    scheduler = files.schedule(None, 28, size=(256, 256))
    assert files.timing(scheduler, 28, (256, 256))["mu"] == calculate_shift(4096) == pytest.approx(1.15)
    assert len(scheduler.timesteps) == 28
    assert set(plain.timing(plain.scheduler(), 4, (256, 256))) == {"sigmas"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("DDIMScheduler", "got scheduler 'DDIMScheduler' of diffusion by betas for a model .* is of flow matching"),
        ("FlowMatchHeunDiscreteScheduler", "expected one of flow matching that takes sigmas"),
    ],
)
def test_a_scheduler_that_follows_no_flow_is_refused(folders: Mapping[bool, Path], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Files.locate(folders[True]).schedule(name, 4, size=SIZE)


def test_texts_of_other_lengths_are_refused(folders: Mapping[bool, Path]) -> None:
    """Padding would be attended to, because FLUX has no mask."""
    files = replace(Files.locate(folders[False]), text_tokens=TEXT)
    with Pipeline.load(files, Mesh.single(), prompts=PROMPTS) as pipeline:
        prompt = pipeline.texts.rows(PROMPTS)
        short = {**prompt, "encoder_hidden_states": prompt["encoder_hidden_states"][:, 1:]}
        scheduler = files.schedule(None, 1, size=SIZE)
        with pytest.raises(ValueError, match=r"a negative encoder_hidden_states of shape \(6, 32\) a row"):
            pipeline.sampler(
                scheduler,
                torch.zeros(3, 4, 14, 10),
                prompt,
                steps=1,
                guidance=TRUE,
                negative=short,
                schedule=files.timing(scheduler, 1, SIZE),
            )
