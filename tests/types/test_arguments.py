"""Tests that arguments of the library that cannot be used end in one clear ValueError, the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

import seqpar
from seqpar import DistributedDiT, Guidance, Mesh, Sampler, load, parallelize, sample
from seqpar.loop.loop import draw_noise
from seqpar.pipelines.classes import Files, Pipeline
from seqpar.transformer.call import NUMBERS
from tests.loop.test_sampling import scheduler
from tests.support import pipelines
from tests.support.diffusers_tiny import SD3
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.support.sharded import arguments, tiny
from tests.support.tiny import CLASSES, diffusers_dit

NOISE = draw_noise((1, 4, 8, 8), torch.Generator().manual_seed(0))
SETTINGS: dict[str, Any] = {"steps": 2, "guidance": Guidance(3.0)}


def labels(*numbers: Any, **options: Any) -> dict[str, Tensor]:
    return {"class_labels": torch.tensor(numbers, **options)}


# argument of `sample` -> values, each of which is refused by a message with these words
SAMPLE: list[tuple[str, list[Any], str]] = [
    ("steps", [-1, 0, 2.5, "4", True, None, 10**9], "got steps="),
    ("guidance", [4.0, None, "4", Guidance], "expected seqpar.Guidance"),
    ("eta", ["x", True, float("nan"), 10**400], "got eta="),
    ("generator", [5, torch.Generator], "got generator="),
    ("respacing", [250, [1]], "got respacing="),
    ("clip_denoised", ["x", None, 5], "expected True or False"),
    ("schedule", [None, 5, {"x": 1}, {"sigmas": [1.0]}], "got schedule"),
    ("negative", [5, {"class_labels": 3}, labels(CLASSES + 1)], "got (negative|class_labels)"),
    ("drawn", [None, 5, {"x": None}], "got drawn"),
    ("on_step", [None, 5], "got on_step="),
    ("graph", ["x", 1], "got graph="),
    ("scheduler", [None, "DDIMScheduler", type(scheduler()), object()], "got scheduler="),
    ("noise", [NOISE.long(), NOISE > 0, NOISE.to(torch.complex64), NOISE.to(torch.float8_e4m3fn)], "floating-point"),
    ("noise", [NOISE.numpy(), None, [1.0]], "expected a tensor"),
    ("noise", [NOISE.to_sparse(), NOISE.to("meta")], "expected a dense tensor"),
    ("noise", [NOISE[0], NOISE[:, :3], NOISE[:0], torch.zeros(1, 4, 7, 8)], "got "),
    ("prompt", [None, [3], labels(3)["class_labels"], {1: 2}, {"class_labels": 3}], "got (prompt|class_labels)"),
    ("prompt", [labels(CLASSES + 1), labels(-1), labels(1, CLASSES + 9)], f"expected 0 to {CLASSES - 1}"),
    ("prompt", [labels(3.0), labels(True), labels(3, dtype=torch.uint8), labels([3])], r"expected \(images,\), int64"),
    ("prompt", [{}, {"x": torch.zeros(1)}, labels(1, 2), {"class_labels": torch.tensor(3)}], "got "),
]


WRONG = [None, True, 0, 1.5, float("nan"), "", "x", b"auto", [1], {}, object(), torch.ones(2), nn.Linear]


def others(*right: type) -> list[Any]:
    """Return the values of `WRONG` that are of none of these types."""
    return [value for value in WRONG if not isinstance(value, right)]


# argument of `parallelize` or `load` -> values, each of which is refused by a message with its name
PARALLELIZE: list[tuple[str, list[Any]]] = [
    ("pipe_or_transformer", WRONG),
    ("mesh", [*others(type(None)), "ulysses", "ulysses=", "ulysses=2,ulysses=2", "heads=2", "ulysses=2"]),
    *((name, WRONG) for name in ("strategy", "local", "transport")),
    *((name, others(bool)) for name in ("native", "cfg")),
    ("cuts", others(type(None), dict)),
    ("vae", [*others(bool), "strips"]),
]
LOAD: list[tuple[str, list[Any]]] = [
    ("path_or_id", others(str)),
    ("path_or_id", [""]),
    ("dtype", [*others(type(None)), "bf16", torch.int8]),
    *((name, values) for name, values in PARALLELIZE if name in ("mesh", "strategy", "local", "transport", "vae")),
    ("loras", [*others(list), [1], [None]]),
    ("fp32_state", others(bool)),
]


def refusal(work: Callable[[], object]) -> str:
    """Return the text of the ValueError that `work` ends in, or what else it does."""
    try:
        return f"accepted: {work()}"
    except ValueError as error:
        return str(error)


def test_sample_refuses_what_it_cannot_use() -> None:
    dit = DistributedDiT(diffusers_dit(), Mesh.single())
    given = {"scheduler": scheduler(), "noise": NOISE, "prompt": labels(3), **SETTINGS}
    assert sample(dit, **given).shape == NOISE.shape
    assert sample(dit, **{**given, "prompt": labels(CLASSES)}).isfinite().all()  # the class "none"  # pyright: ignore[reportArgumentType]
    for name, values, expected in SAMPLE:
        for value in values:
            with pytest.raises(ValueError, match=expected):
                sample(dit, **{**given, name: value})
    for missing in ("guidance", "steps"):
        with pytest.raises(ValueError, match=f"got no {missing}=, expected "):
            sample(dit, **{name: value for name, value in given.items() if name != missing})
    with pytest.raises(ValueError, match="got step=, expected steps="):
        sample(dit, **given, step=2)  # pyright: ignore[reportCallIssue]
    for wrong in (None, dit.model):
        with pytest.raises(ValueError, match="expected a seqpar"):
            Sampler(wrong)  # pyright: ignore[reportArgumentType]


def test_a_call_of_the_model_refuses_what_it_cannot_use() -> None:
    dit = DistributedDiT(diffusers_dit(), Mesh.single())
    given = {"hidden_states": NOISE, "timestep": torch.tensor([3]), **labels(3)}
    wrong = [
        *(("hidden_states", x) for x in (NOISE.long(), NOISE > 0, NOISE + 1j, NOISE.to("meta"), NOISE.to_sparse())),
        *(("hidden_states", x) for x in (None, NOISE[0], NOISE[:0])),
        *(("timestep", x) for x in (None, "x", torch.tensor([1j]), torch.tensor([[3]]), torch.tensor([1, 2]))),
        *(("timestep", x) for x in (True, float("nan"), float("inf"), torch.tensor([float("nan")]))),
        *(("class_labels", x) for x in (None, torch.tensor([CLASSES + 1]), torch.tensor([3.0]), torch.tensor([[3]]))),
    ]
    mine = given["class_labels"]
    for name, value in wrong:
        assert dit(**given).sample.isfinite().all()
        with pytest.raises(ValueError, match="got "):
            dit(**{**given, name: value})
    mine.fill_(CLASSES + 1)  # the tensor that was right before
    with pytest.raises(ValueError, match=f"got class_labels {CLASSES + 1}, expected 0 to {CLASSES - 1}"):
        dit(**given)


def test_pipelines_and_models_refuse_what_they_cannot_use() -> None:
    with Pipeline.load(Files.locate("builtin"), Mesh.single()) as pipeline:
        for name, value in [
            *(
                ("size", x)
                for x in ((64, 64, 64), (64,), 64, "64x64", (64.0, 64.0), (64, None), (10**9, 10**9), (0, 64))
            ),
            *(("seed", x) for x in (2.5, "x", None, True, 2**64)),
            *(("classes", x) for x in ("cat", 3, None, [None], [10**9], [])),
            *(("scheduler", x) for x in (5, "x")),
            *(("steps", x) for x in (0, None)),
        ]:
            with pytest.raises(ValueError, match="got "):
                pipeline.latents(**{"classes": [3], **SETTINGS, name: value})
        latents = NOISE
        for value in (latents[0], latents.long(), None, latents[:, :3], latents[:0]):
            with pytest.raises(ValueError, match="got latents"):
                pipeline.decode(value)  # pyright: ignore[reportArgumentType]
    for model in (nn.Identity(), None):
        with pytest.raises(ValueError, match=r"got (a Identity|Identity|pipe_or_transformer=None)"):
            parallelize(model, Mesh.single())
    for given in ({"mesh": 5}, {"plan": 5}, {"mesh": Mesh.single(), "strategy": 5}):
        with pytest.raises(ValueError, match="got "):
            DistributedDiT(diffusers_dit(), **given)  # pyright: ignore[reportArgumentType]
    for given in ({"path": 5}, {"path": "dit-s/8", "dtype": torch.int8}):
        with pytest.raises(ValueError, match="got "):
            DistributedDiT.from_pretrained(**{"mesh": Mesh.single(), **given})


def test_parallelize_and_load_refuse_what_they_cannot_use(tmp_path_factory: pytest.TempPathFactory) -> None:
    transformer, folder = tiny(num_layers=1), tmp_path_factory.mktemp("pipeline")
    pipelines.flux().to(torch.float32).save_pretrained(folder)
    cases: Any = [
        (parallelize, PARALLELIZE, {"pipe_or_transformer": transformer}),
        (load, LOAD, {"path_or_id": folder}),
    ]
    for function, table, given in cases:
        for name, values in table:
            for value in values:
                text = refusal(lambda f=function, mine={**given, name: value}: f(**mine))
                assert re.match(rf"got .*\b{name}\b", text), (name, value, text)
    assert "forward" not in vars(transformer)


def by_names(rank: int, world: int, device: torch.device) -> list[object]:
    """Return the axes of transformers by the names of `--mesh`, and what is told where ranks name different ones."""
    found: list[object] = []
    for name in ("auto", "throughput", "ulysses=2", "ring=2", "data=2", "cfg=2", "data=1,cfg=1"):
        module: Any = SD3Transformer2DModel(**SD3)
        parallelize(module.to(device), mesh=name)
        found.append(str(module.forward.mesh))
        seqpar.release(module)
    found.append(str(DistributedDiT(diffusers_dit().to(device), "ulysses=2").mesh))
    wrong: Any = ({"mesh": ("ulysses=2", "ring=2")[rank]}, {"mesh": "cfg=2", "cfg": False}, {"mesh": "ulysses=3"})
    return [*found, *(refusal(lambda given=given: parallelize(module, **given)) for given in wrong)]


def test_python_takes_the_names_of_the_command_line(ranks: Pool) -> None:
    first, second = ranks.run(2, by_names)
    assert first == second
    axes = ["cfg 2", "data 2", "ulysses 2", "ring 2", "data 2", "cfg 2", "ulysses 2", "ulysses 2"]
    assert first[:-3] == axes
    assert first[-3].startswith("got mesh 'ring=2' on rank 1, expected 'ulysses=2' as on rank 0")
    assert first[-2].startswith("cfg=False contradicts a mesh with cfg=2")
    assert first[-1].startswith("got ")


def not_finite(rank: int, world: int, device: torch.device) -> list[str]:
    """Return what calls of a transformer tell of numbers on the host that one rank alone has."""
    module: Any = tiny()
    parallelize(module.to(device), make_mesh(device, cfg=1))
    given, factor = arguments(device), torch.tensor([float("nan"), 1])
    wrong = {name: (given[name].cpu() * factor).to(given[name].dtype) for name in NUMBERS}
    calls = [{name: wrong[name] if rank == where else given[name].cpu()} for where in (0, 1) for name in NUMBERS]
    return [refusal(lambda mine=mine: float(module(**{**given, **mine}).sample.sum())) for mine in calls]


def test_numbers_that_are_not_finite_are_refused_on_all_ranks(ranks: Pool) -> None:
    first, second = ranks.run(2, not_finite)
    assert first == second
    for text, where, name in zip(first, ("rank 0", "rank 0", "rank 1", "rank 1"), 2 * NUMBERS, strict=True):
        assert re.fullmatch(rf"{where}: got {name} \[nan, [.0-9]+\], expected finite numbers", text), text


def told(rank: int, world: int, device: torch.device) -> dict[str, str]:
    """Give one rank arguments that cannot be used, or other ones; return what each call tells."""
    made = {}
    for data in (1, 2):
        mesh = make_mesh(device, data=data, cfg=1)
        dit = DistributedDiT(diffusers_dit().to(device), mesh)
        noise, right, bad = torch.cat((NOISE, NOISE)), labels(3, 5), labels(3, CLASSES + 1)
        given = {"scheduler": scheduler(), "noise": noise, "prompt": right, **SETTINGS}
        for wrong in (0, 1):
            for name, value in [("prompt", bad), ("steps", 1), ("steps", "x"), ("guidance", 4.0), ("on_step", None)]:
                mine = {**given, name: value} if rank == wrong else given
                made[f"{name} {value} {wrong} {data}"] = refusal(
                    lambda dit=dit, mine=mine: float(sample(dit, **mine).sum())
                )
            y = {name: x.to(device) for name, x in (bad if rank == wrong else right).items()}
            x, t = noise.to(device, dit.dtype), torch.tensor([3, 3], device=device)
            made[f"call {wrong} {data}"] = refusal(lambda dit=dit, x=x, t=t, y=y: float(dit(x, t, **y).sample.sum()))
    path: Any = "dit-s/8" if rank == 0 else 5
    made["path"] = refusal(lambda: DistributedDiT.from_pretrained(path, make_mesh(device, cfg=1)))
    made["mesh"] = refusal(lambda: DistributedDiT(diffusers_dit(), make_mesh(device, cfg=1) if rank else None))
    return made


def test_a_wrong_argument_of_one_rank_is_told_by_all(ranks: Pool) -> None:
    """Rank 0's labels count, so that those of other ranks may have any values."""
    first, second = ranks.run(2, told)
    assert first == second
    for name, text in first.items():
        rank_0s = name.startswith(("prompt", "call")) and name.split()[-2] == "1"
        assert text.startswith("accepted") == rank_0s, (name, text)
        assert rank_0s or "got " in text
