"""Tests of UniDiffuser's own loop: a complete tiny folder against diffusers' UniDiffuserPipeline in fp64.

diffusers draws the noise of its unconditional branch within its loop; both draw it in fp32 here, from one seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from seqpar import Guidance
from seqpar.cli.args import Args
from seqpar.cli.sample import run
from seqpar.loading.reading import Reader
from seqpar.loop import loop
from seqpar.loop import request as checks
from seqpar.loop.loop import draw_noise
from seqpar.loop.models import uvit
from seqpar.loop.request import Request
from seqpar.loop.steppers import decide
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import unidiffuser
from seqpar.pipelines.unidiffuser import Asked, Files, Pipeline
from seqpar.pipelines.unidiffuser_parts import load_encoders
from seqpar.planner.search import Preferences
from tests.support.foreign import StayDouble, bound
from tests.support.meshes import TRANSPORTS, mesh_for
from tests.support.pool import Pool

STEPS, SEED = 5, 7  # steps of orders 1, 2 and 3
PROMPTS = ["a red cat", "the old house in the sea"]
CLOSE, PIXEL = bound(1e-9, 2e-4), bound(1e-6, 2e-4)  # of latents in fp64 (relative), of pixels in fp32
ON = Guidance(8.0)

Layout = tuple[str, int, int]
"""Strategy, sizes of the cfg and data axes."""


@cache
def pipe(version_1: bool) -> Any:
    """Return diffusers' pipeline of a version; every process has the same weights."""
    from tests.support import pipelines  # loads diffusers, after TRITON_INTERPRET is set

    return pipelines.unidiffuser(version_1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A folder of each version; version 0's caption decoder is a .bin file, as the published ones are."""
    found = {version_1: tmp_path_factory.mktemp("unidiffuser") for version_1 in (True, False)}
    for version_1, folder in found.items():
        pipe(version_1).save_pretrained(folder)
    (file,) = (found[False] / "text_decoder").glob("*.safetensors")
    torch.save(pipe(False).text_decoder.state_dict(), file.with_suffix(".bin"))
    file.unlink()
    return found


@contextmanager
def drawing_as_ours(own: torch.Generator | None = None) -> Iterator[None]:
    """Let diffusers' pipeline draw noise in fp32, and keep what is fp64 in fp64.

    own: draws the noise instead of the pipeline's generator, which also draws a sample of the autoencoder.
    """
    from diffusers.pipelines.deprecated.unidiffuser import pipeline_unidiffuser

    def drawn(shape: tuple[int, ...], generator: Any = None, device: Any = None, dtype: Any = None) -> Tensor:
        return draw_noise(shape, own or generator).to(dtype)

    with pytest.MonkeyPatch.context() as patch, StayDouble():
        patch.setattr(pipeline_unidiffuser, "randn_tensor", drawn)
        yield


@cache
def theirs(version_1: bool, count: int, scale: float) -> tuple[Tensor, Tensor]:
    settings = {"num_inference_steps": STEPS, "guidance_scale": scale}
    with drawing_as_ours():
        made = [
            pipe(version_1)(
                prompt=PROMPTS[:count], generator=torch.Generator().manual_seed(SEED), output_type=kind, **settings
            )
            for kind in ("latent", "pt")
        ]
    latents, images = (each.images for each in made)
    return latents, images


def ours(
    rank: int, world: int, device: torch.device, folder: str, layout: Layout, count: int, change: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:  # other ranks ask for other texts and seeds, which must not count
    strategy, cfg, data = layout
    transport = TRANSPORTS[(world // 2 + cfg + 1) % len(TRANSPORTS)]
    mesh, wish = mesh_for(strategy, world, device, cfg, data), Preferences(strategy=strategy, transport=transport)
    asked = PROMPTS[:count] if rank == 0 else ["another"] * count
    settings = {"steps": STEPS, "guidance": ON, "seed": SEED + rank, **change}
    with (
        StayDouble(),
        Pipeline.load(Files.locate(folder), mesh, torch.float64, preferences=wish, prompts=asked) as pipeline,
    ):
        latents = pipeline.latents(asked, **settings)
        return latents, pipeline.decode(latents)


@pytest.mark.parametrize(
    ("world", "layout", "version_1", "count", "scale"),
    [
        (1, ("ulysses", 1, 1), True, 2, 8.0),
        (2, ("kv_gather", 2, 1), False, 2, 8.0),
        (3, ("kv_first", 1, 1), True, 1, 1.0),
        (4, ("ulysses", 2, 2), True, 2, 8.0),
    ],
    ids=str,
)
def test_pictures_are_those_of_diffusers(
    ranks: Pool, folders: Mapping[bool, Path], world: int, layout: Layout, version_1: bool, count: int, scale: float
) -> None:
    truth, shown = theirs(version_1, count, scale)
    for latents, images in ranks.run(
        world, ours, str(folders[version_1]), layout, count, {"guidance": Guidance(scale)}
    ):
        assert (latents.cpu() - truth).abs().max() < CLOSE * truth.abs().max()
        assert images.shape == (count, 3, 16, 16)
        assert (images.cpu() - shown).abs().max() < PIXEL


def own_noise(rank: int, world: int, device: torch.device, folder: str) -> Tensor:
    """Ranks draw other noise for the unconditional branch, and rank 0's is not sent."""
    fresh = Pipeline._fresh

    def other(self: Pipeline, shapes: Any, generator: torch.Generator, evaluations: int) -> dict[str, Tensor]:
        return fresh(self, shapes, torch.Generator().manual_seed(rank) if rank else generator, evaluations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "_fresh", other)
        patch.setattr("seqpar.loop.loop.rank_0s", lambda mesh, request: request)
        return ours(rank, world, device, folder, ("ulysses", 1, 1), 1, {"seed": SEED})[0]


def test_negative_control_noise_that_differs_between_ranks_counts_where_rank_0s_is_not_sent(
    ranks: Pool, folders: Mapping[bool, Path]
) -> None:
    truth, _ = theirs(True, 1, 8.0)
    for latents in ranks.run(2, own_noise, str(folders[True])):
        assert (latents.cpu() - truth).abs().max() > CLOSE * truth.abs().max()


MISTAKES = ("none", "guidance", "seed", "noise kept", "noise timestep", "data type", "text timestep")


def mistaken(pipeline: Pipeline, wrong: str) -> Tensor:
    change = {"guidance": {"guidance": Guidance(7.0)}, "seed": {"seed": SEED + 1}}.get(wrong, {})
    values = {"data type": {"data_type": 0}, "text timestep": {"other_timestep": 1}}.get(wrong, {})
    fresh, prompt = Pipeline._fresh, unidiffuser._prompt

    def kept(self: Pipeline, *given: Any) -> dict[str, Tensor]:
        return {name: x[:1].expand_as(x) for name, x in fresh(self, *given).items()}

    def other(names: Any, count: int) -> dict[str, Tensor]:
        return prompt(names, count) | {name: torch.full((count,), value) for name, value in values.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unidiffuser, "_prompt", other)
        if wrong == "noise kept":
            patch.setattr(Pipeline, "_fresh", kept)
        if wrong == "noise timestep":
            patch.setattr(uvit, "NOISE", 999)
        return pipeline.latents(PROMPTS[:1], **{"steps": STEPS, "guidance": ON, "seed": SEED, **change})


def test_negative_control_a_mistake_is_seen(folders: Mapping[bool, Path]) -> None:
    truth, files = theirs(True, 1, 8.0)[0], Files.locate(folders[True])
    with StayDouble(), Pipeline.load(files, Mesh.single(), torch.float64, prompts=PROMPTS[:1]) as pipeline:
        for wrong in MISTAKES:
            error = (mistaken(pipeline, wrong) - truth).abs().max() / truth.abs().max()
            assert error < CLOSE if wrong == "none" else error > 1e-4, wrong


PICTURE = Image.fromarray(np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3))


def in_mode(rank: int, world: int, device: torch.device, mode: uvit.Mode, folder: str) -> tuple[Any, list[str]]:
    mesh, guidance = mesh_for("ulysses", world, device), ON if mode == "img2text" else Guidance(1.0)
    files = Files.locate(folder, mode)
    with (
        StayDouble(),
        Pipeline.load(files, mesh, torch.float64, preferences=Preferences(strategy="ulysses")) as pipeline,
    ):
        noise, given = start(mode), {}
        if mode == "img2text":
            given = pipeline.image_streams([PICTURE], seed=SEED)
        if mode in ("image", "text"):
            given = {name: x for name, x in start("joint").items() if name not in noise}
        streams = pipeline.streams(Asked(1, STEPS, guidance, SEED), given=given, noise=noise)
        return streams, pipeline.captions(streams["text"]) if "text" in streams else []


def test_a_random_model_has_no_encoders_for_captions_and_images() -> None:
    random: Any = SimpleNamespace(files=SimpleNamespace(source=None))
    with pytest.raises(ValueError, match="without a caption decoder, expected a pipeline's folder"):
        Pipeline.captions(random, torch.zeros(1, 1, 1))
    with pytest.raises(ValueError, match="without image encoders, expected a pipeline's folder"):
        Pipeline.image_streams(random, ())


def start(mode: uvit.Mode) -> dict[str, Tensor]:
    """Return the noise of the streams that a mode denoises; text as the caption decoder's first layer makes it."""
    drawn, shapes = torch.Generator().manual_seed(SEED + 1), {"image": (1, 4, 8, 8), "clip": (1, 1, 5)}
    made = {name: draw_noise(shape, drawn).double() for name, shape in shapes.items()}
    made["text"] = pipe(True).text_decoder.encode(draw_noise((1, 16, 32), drawn).double())
    return {name: made[name] for name in uvit._STATES[mode]}


def their_mode(mode: uvit.Mode) -> tuple[Tensor | None, list[str]]:
    made, drawn = pipe(True), torch.Generator().manual_seed(SEED + 1)
    shapes = {"vae": (1, 4, 8, 8), "clip": (1, 1, 5), "prompt": (1, 16, 32)}
    given: dict[str, Any] = {f"{name}_latents": draw_noise(x, drawn).double() for name, x in shapes.items()}
    made.mode = {"image": "img"}.get(mode, mode)
    scale = 8.0 if mode == "img2text" else 1.0
    if mode == "img2text":
        given = {"image": PICTURE, "prompt_latents": given["prompt_latents"]}
    settings = {"num_inference_steps": STEPS, "guidance_scale": scale, "output_type": "latent"}
    try:
        with drawing_as_ours(torch.Generator().manual_seed(SEED)):
            out = made(**given, **settings, generator=torch.Generator().manual_seed(SEED))
    finally:
        made.mode = None
    return out.images, out.text or []


@pytest.mark.parametrize(("world", "mode"), [(2, "joint"), (1, "image"), (1, "text"), (2, "img2text")])
def test_other_modes_make_what_diffusers_makes(
    ranks: Pool, folders: Mapping[bool, Path], world: int, mode: uvit.Mode
) -> None:
    images, texts = their_mode(mode)
    for streams, captions in ranks.run(world, in_mode, mode, str(folders[True])):
        assert captions == texts
        assert ("image" in streams) == (images is not None)
        if images is not None:
            assert (streams["image"].cpu() - images).abs().max() < CLOSE * images.abs().max()
    assert len(texts) == (mode != "image")


def test_modes_say_what_they_lack(folders: Mapping[bool, Path]) -> None:
    with Pipeline.load(Files.locate(folders[False], "img2text")) as pipeline:
        with pytest.raises(ValueError, match="got mode img2text without image, clip, which `given` must have"):
            pipeline.streams(Asked(1, 2, ON))
        with pytest.raises(ValueError, match="got prompts in mode img2text, expected text2img"):
            pipeline.latents(PROMPTS, steps=2, guidance=ON)
        with pytest.raises(ValueError, match=r"got the given streams \{'clip': \(1, 1, 5\)\}, expected"):
            pipeline.streams(Asked(1, 2, ON), given={"clip": torch.zeros(1, 1, 5)})
    with (
        Pipeline.load(Files.locate(folders[False], "joint")) as pipeline,
        pytest.raises(ValueError, match="got guidance in mode joint, expected text2img or img2text"),
    ):
        pipeline.streams(Asked(1, 2, ON))


def from_rank_0_alone(rank: int, world: int, device: torch.device, folder: str) -> tuple[Tensor, list[str]]:
    image = {"image": torch.ones(1, 4, 8, 8), "clip": torch.ones(1, 1, 5)}
    given: list[Any] = [image, {"clip": torch.ones(1, 1, 5)}, {**image, "clip": "x"}, None]
    asked, told = Asked(1, 2, ON, SEED), []
    with Pipeline.load(Files.locate(folder, "img2text"), mesh_for("ulysses", world, device)) as pipeline:
        noise = {"text": torch.ones(1, 16, 6)}
        text = pipeline.streams(asked, given=None if rank else image, noise=None if rank else noise)["text"]
        before = text.clone()
        pipeline.streams(Asked(1, 2, ON, SEED + 1), given=image)
        assert torch.equal(text, before), "a later call changed what this one returned"
        for each in given[1:]:
            with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared)
                pipeline.streams(asked, given=image if rank else each)
            told.append(str(error.value))
    return text, told


def test_streams_are_those_of_rank_0_alone(ranks: Pool, folders: Mapping[bool, Path]) -> None:
    (truth, told), *_ = ranks.run(1, from_rank_0_alone, str(folders[True]))
    for text, errors in ranks.run(2, from_rank_0_alone, str(folders[True])):
        assert (text - truth).abs().max() < 1e-5 * truth.abs().max()
        assert [*errors[::2], errors[1].removeprefix("rank 0: ")] == [*told[::2], told[1]]
        assert "got clip of type str" in errors[1]


def kept(rank: int, world: int, device: torch.device, folder: str) -> list[tuple[bool, int]]:
    """Whether a kept run gives the bits of a new one, and how often a scheduler was traced until then."""
    files, mesh = Files.locate(folder), mesh_for("ulysses", world, device)
    first: dict[str, Any] = {"prompts": PROMPTS, "guidance": ON}
    others = {"prompts": ["a", "the"], "seed": 1, "guidance": Guidance(3.0)}
    found = []
    with pytest.MonkeyPatch.context() as patch, Pipeline.load(files, mesh, torch.float64) as pipeline:
        counted = Mock(side_effect=decide)
        patch.setattr(loop, "decide", counted)
        pipeline.latents(**first, steps=3)
        for change in (others, {"prompts": ["a dog"], "scheduler": "DEISMultistepScheduler"}):
            again = pipeline.latents(**{**first, **change}, steps=3)
            count = counted.call_count
            with Pipeline.load(files, mesh, torch.float64) as new:
                found.append((torch.equal(again, new.latents(**{**first, **change}, steps=3)), count))
            counted.reset_mock()
    return found


def test_a_kept_run_serves_other_texts_seeds_and_scales(ranks: Pool, folders: Mapping[bool, Path]) -> None:
    assert ranks.run(2, kept, str(folders[True])) == [[(True, 1), (True, 1)]] * 2


def parameters_read(rank: int, world: int, device: torch.device, folder: str) -> list[set[str]]:
    begin, found = Reader.begin, list[set[str]]()

    def seen(self: Reader, checkpoint: Any, keys: Any, names: Any, like: Any) -> Any:
        if names:  # else there are no repeats to compare
            found.append(set(names))
        return begin(self, checkpoint, keys, names, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "begin", seen)
        Pipeline.load(Files.locate(folder), mesh_for("ulysses", world, device)).release()
    return found


def test_the_ranks_of_a_host_share_the_reading_of_the_model(ranks: Pool, folders: Mapping[bool, Path]) -> None:
    (alone,) = ranks.run(1, parameters_read, str(folders[True]))
    (first, mine), (second, other) = ranks.run(2, parameters_read, str(folders[True]))
    assert first == second == alone[0]
    assert mine
    assert not mine & other
    assert mine | other == alone[1]


def on_rank(rank: int, world: int, device: torch.device, args: Args) -> None:
    run(args)


def test_the_command_line_writes_the_picture(ranks: Pool, folders: Mapping[bool, Path], tmp_path: Path) -> None:
    args = Args(str(folders[True]), prompt=(PROMPTS[0],), steps=STEPS, seed=SEED, dtype="fp64", out=tmp_path / "x.png")
    ranks.run(2, on_rank, args)
    with Image.open(tmp_path / "x.png") as found:
        pixels = np.asarray(found.convert("RGB"), dtype=np.float64) / 255
    _, shown = theirs(True, 1, 8.0)
    assert np.abs(pixels - shown[0].permute(1, 2, 0).numpy()).max() < 0.6 / 255


def test_code_in_a_tokenizers_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if somebody answers yes: transformers asks on the terminal, where other ranks would wait."""
    monkeypatch.setattr("builtins.input", lambda question: "y")
    told, folder = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}, "clip_tokenizer"
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "tokenizer_config.json").write_text(json.dumps(told))
    (tmp_path / folder / "evil.py").write_text(f"open({str(tmp_path / 'proof')!r}, 'w')")
    with pytest.raises(ValueError, match="does not load"):
        load_encoders(tmp_path, torch.float32)
    assert not (tmp_path / "proof").exists()


def test_drawn_streams_of_the_unconditional_branch_are_checked() -> None:
    drawn = {"text": torch.zeros(2, 1, 3, 4)}
    for wrong, message in (
        ({"clip": torch.zeros(2, 1, 3, 4)}, r"expected one of drawn: \['text'\]"),
        ({"text": torch.zeros(2, 1, 2, 4)}, r"expected \(2, 1, 3, 4\) as drawn"),
    ):
        request = Request(None, torch.zeros(1), {}, 2, ON, drawn=drawn, negative_drawn=wrong)
        with pytest.raises(ValueError, match=message):
            checks.check_drawn(request, 2, 1)
