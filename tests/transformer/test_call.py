# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests of a transformer's call: whose arguments count, who computes which branch and rows, and what is refused.

What users get wrong ends in one sentence with its cause, the same on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from pathlib import Path
from typing import Any

import accelerate.hooks
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.pipelines.flux.pipeline_flux_img2img import FluxImg2ImgPipeline
from torch import Tensor

import seqpar
from seqpar.graphs.deferred import DeferredResult
from seqpar.mesh.mesh import Mesh
from seqpar.transformer.call import ShardedCall
from seqpar.transformer.parallelize import INSTALLED
from tests.support import pipelines
from tests.support.calls import Toy, recorded_call
from tests.support.diffusers_tiny import MODELS, moved
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool


def arguments(rows: int, seed: int) -> dict[str, Any]:
    """Return arguments of every kind; as many ids as rows, which must not be taken for rows."""
    return {
        "hidden_states": random((rows, 3, 4), seed),
        "timestep": random((rows,), seed + 1),
        "encoder_hidden_states": random((rows, 2, 4), seed + 2),
        "txt_ids": random((rows, 3), seed + 3),
        "img_shapes": [(1, row) for row in range(rows)],
        "attention_kwargs": {"a": [random((1,), seed + 4)][0], "b": {"scale": 0.5}},
    }


def truth(given: dict[str, Any], device: torch.device | str = "cpu") -> Tensor:
    return Toy()(**moved(given, device), return_dict=False)[0].cpu()


def by_rows(
    rank: int, world: int, device: torch.device, rows: int, axes: dict[str, int]
) -> tuple[list[Any], list[int]]:
    """Return the results of two calls, in which other ranks pass other values, and the rows that this rank computed."""
    call, body = recorded_call(make_mesh(device, **axes))
    results = [call(**arguments(rows, 10 * step + 100 * rank), return_dict=False)[0] for step in range(2)]
    return [x + 0 for x in results], body.calls


ROWS = [
    (2, 4, {"cfg": 2}, [[2, 2], [2, 2]]),
    (2, 3, {"cfg": 2}, [[2, 2], [1, 1]]),
    (2, 1, {"cfg": 2}, [[1, 1], [1, 1]]),
    (4, 5, {"data": 2, "cfg": 2}, [[2, 2], [1, 1], [1, 1], [1, 1]]),
    (4, 3, {"data": 2, "cfg": 2}, [[2, 2], [2, 2], [1, 1], [1, 1]]),
    (3, 2, {"cfg": 1}, [[2, 2]] * 3),
]


@pytest.mark.parametrize(("world", "rows", "axes", "computed"), ROWS, ids=str)
def test_rows_are_split_and_rank_0s_arguments_count(
    ranks: Pool, world: int, rows: int, axes: dict[str, int], computed: list[list[int]]
) -> None:
    answers = ranks.run(world, by_rows, rows, axes)
    assert [mine for _, mine in answers] == computed
    for results, _ in answers:
        wanted = (truth(arguments(rows, 10 * step), ranks.device) for step in range(2))
        assert all(torch.equal(x, other) for x, other in zip(results, wanted, strict=True))


def guided(rank: int, world: int, device: torch.device, how: str) -> tuple[list[Tensor], list[int]]:
    """Return the results of three steps of two calls each, and the number of calls that this rank had computed then.

    how: "guided" as pipelines do it; "read" reads the first result before the second call; "off" makes no second call;
    "sliced" takes a part of the first result before the second call; "unread" never reads the result of a first call.
    """
    call, body = recorded_call(make_mesh(device, cfg=2))
    results, counts = [], []
    for step in range(3):
        call.label = "cond"
        cond = call(**arguments(2, 100 * step), return_dict=False)[0]
        cond = cond[:, :2] if how == "sliced" else cond
        if how == "read":
            results.append(cond * 1)
        if how not in ("off", "unread"):
            call.label = "uncond"
            uncond = call(**arguments(2, 100 * step + 50), return_dict=False)[0]
            results.append(uncond * 1)
        if how != "unread" or step == 2:
            results.append(cond * 1)
        counts.append(len(body.calls))
    return results, counts


@pytest.mark.parametrize(
    ("how", "counts"),
    [
        ("guided", [2, 3, 4]),  # the first calls of a kind are computed at once; then each half computes one branch
        ("sliced", [2, 3, 4]),
        ("read", [2, 4, 6]),
        ("off", [1, 2, 3]),
        ("unread", [1, 1, 2]),  # a call that is not read runs beside the next one
    ],
)
def test_branches_are_computed_at_the_same_time_where_nothing_is_read(ranks: Pool, how: str, counts: list[int]) -> None:
    for results, counted in ranks.run(2, guided, how):
        assert counted == counts
        expected = []
        for step in range(3):
            cond, uncond = (truth(arguments(2, 100 * step + more), ranks.device) for more in (0, 50))
            expected += {
                "guided": [uncond, cond],
                "sliced": [uncond, cond[:, :2]],
                "read": [cond, uncond, cond],
                "off": [cond],
                "unread": [cond] if step == 2 else [],
            }[how]
        assert len(results) == len(expected)
        assert all(torch.equal(got, wanted) for got, wanted in zip(results, expected, strict=True))


def promised(rank: int, world: int, device: torch.device) -> list[Any]:
    """Return what a promise is before and after it is read, and what reading it after a release raises."""
    call, body = recorded_call(make_mesh(device, cfg=2))
    paired(call)
    kept = call(**arguments(1, 1)).sample
    known = (type(kept) is DeferredResult, kept.shape, kept.dtype, kept.device.type, len(body.calls))
    copied = copy.deepcopy(kept)
    plain = (type(copied), type(kept + 1), type(torch.cat([kept])), len(body.calls))
    paired(call)
    lost = call(**arguments(1, 2)).sample
    call.release()
    with pytest.raises(RuntimeError) as raised:
        lost.sum()
    return [known, plain, copied, str(raised.value)]


def paired(call: ShardedCall) -> None:
    for call.label in ("cond", "uncond"):
        call(**arguments(1, 0)).sample.sum()
    call.label = "cond"


def test_a_promise_is_a_tensor_that_is_computed_when_it_is_read(ranks: Pool) -> None:
    for known, plain, copied, told in ranks.run(2, promised):
        assert known == (True, (1, 3, 4), torch.float64, ranks.device, 2)
        assert plain == (Tensor, Tensor, Tensor, 3)
        assert torch.equal(copied, truth(arguments(1, 1), ranks.device))
        assert told == "a result was read after release(); read it before"


def changing(rank: int, world: int, device: torch.device, how: str) -> tuple[str, Tensor]:
    """Return the error where a module changes under a promise, and the result of the step that follows.

    how: "second" changes it on one rank before the second call, "read" before the result is read alone.
    """
    call, body = recorded_call(make_mesh(device, cfg=2))
    paired(call)
    first = call(**arguments(1, 1)).sample
    if rank == 1:
        body.key_ = "changed"
    with pytest.raises(ValueError, match="weights of Toy changed between the guidance calls") as raised:
        first.sum() if how == "read" else call(**arguments(1, 2))
    with pytest.raises(RuntimeError, match=r"Use parallelize\(cfg=False\)"):
        first.sum()
    return str(raised.value), call(**arguments(1, 3)).sample + 0


@pytest.mark.parametrize("how", ["second", "read"])
def test_a_change_under_a_promise_is_one_error_on_all_ranks(ranks: Pool, how: str) -> None:
    answers = ranks.run(2, changing, how)
    assert len({message for message, _ in answers}) == 1
    assert all(torch.equal(x, truth(arguments(1, 3), ranks.device)) for _, x in answers)


def differing(rank: int, world: int, device: torch.device, what: str) -> str:
    call, _ = recorded_call(make_mesh(device, cfg=1))
    given = arguments(2, 0)
    if rank == 1:
        given |= {
            "shape": {"hidden_states": random((2, 5, 4), 0)},
            "value": {"attention_kwargs": {**given["attention_kwargs"], "b": {"scale": 0.7}}},
            "missing": {"txt_ids": None},
            "nesting": {"img_shapes": [[1, 0], [1, 1]]},
            "gradients": {"timestep": given["timestep"].requires_grad_()},
        }[what]
    with pytest.raises(ValueError, match="got ") as raised:
        call(**given)
    return str(raised.value)


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("shape", ["hidden_states", "(2, 5, 4)", "(2, 3, 4)"]),
        ("value", ["attention_kwargs['b']['scale']", "0.7", "0.5"]),
        ("missing", ["arguments", "txt_ids"]),
        ("nesting", ["nesting"]),
        ("gradients", ["requires_grad", "timestep"]),
    ],
)
def test_arguments_of_another_form_end_in_one_error(ranks: Pool, what: str, names: list[str]) -> None:
    messages = ranks.run(3, differing, what)
    assert len(set(messages)) == 1
    assert all(name in messages[0] for name in names)


def test_a_call_has_the_forms_of_the_transformers_own() -> None:
    call, body = recorded_call(Mesh.single())
    given = arguments(2, 0)
    full = call(given["hidden_states"], given["timestep"])
    assert isinstance(full, Transformer2DModelOutput)
    assert type(full.sample) is Tensor
    assert isinstance(call(given["hidden_states"], timestep=given["timestep"], return_dict=False), tuple)
    assert inspect.signature(call) == inspect.signature(body.module.forward)
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(given["hidden_states"], given["timestep"], txt_id=None)
    with torch.inference_mode():
        inside = call(**given).sample
    assert not inside.is_inference()
    assert torch.equal(inside, truth(given))
    with pytest.raises(ValueError, match="timestep requires grad, but parallelize supports inference only"):
        call(**{**given, "timestep": given["timestep"].clone().requires_grad_()})


# The module stays in place -------------------------------------------------------------------------------------


def test_the_module_stays_diffusers_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = seqpar.parallelize(pipelines.flux().transformer, Mesh.single())  # by fused blocks
    assert capfd.readouterr().out.startswith("seqpar: FluxTransformer2DModel runs on one rank (")
    assert type(module).__name__ == "FluxTransformer2DModel"
    assert module.config.num_layers == module.config["num_layers"] == 2
    assert (module.dtype, module.device.type) == (torch.float64, "cpu")
    module.save_pretrained(tmp_path)
    other = type(module).from_pretrained(tmp_path, torch_dtype=torch.float64)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in module.state_dict().items())
    with module.cache_context("cond"):
        assert module.forward.label == "cond"
    assert module.forward.label is None


def test_release_restores_the_module() -> None:
    tiny = MODELS["flux"]
    module = tiny.build()
    before = set(vars(module))
    with pytest.raises(ValueError, match="is not parallelized"):
        seqpar.release(module)
    for _ in range(2):
        seqpar.parallelize(module, Mesh.single())
        with pytest.raises(ValueError, match="is parallelized already, expected a plain one"):
            seqpar.parallelize(module, Mesh.single())
        assert len(module(**tiny.arguments()).sample) == 2
        seqpar.release(module)
        assert not set(INSTALLED) & set(vars(module))
    copied = copy.deepcopy(module)
    assert all(torch.equal(x, y) for x, y in zip(tiny.whole(copied), tiny.whole(), strict=True))
    assert before <= set(vars(module))


def test_what_would_break_is_refused_in_a_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    module = seqpar.parallelize(MODELS["flux"].build(), Mesh.single(), native=False)
    for work in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="cannot be copied or pickled"):
            work(module)
    given = MODELS["flux"].arguments()
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.CpuOffload("cpu"))
    with pytest.raises(ValueError, match="has offloaded weights; parallelize needs them on the GPU"):
        module(**given)
    seqpar.release(module)
    assert ".<locals>.new_forward stays the forward of the released FluxTransformer2DModel" in capfd.readouterr().out
    truth = module(**given).sample
    accelerate.hooks.remove_hook_from_module(module)
    assert torch.equal(copy.deepcopy(module)(**given).sample, truth)


# Mistakes of users ---------------------------------------------------------------------------------------------

SIZE = {"height": 16, "width": 16, "max_sequence_length": 16, "output_type": "pt"}


def test_what_cannot_be_parallelized_is_refused_before_anything_changes() -> None:
    pipe, compiled, parallel = pipelines.flux(), pipelines.flux(), pipelines.flux()
    compiled.transformer = torch.compile(compiled.transformer, backend="eager")
    seqpar.parallelize(parallel, Mesh.single())
    sharing = FluxImg2ImgPipeline(**parallel.components)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (compiled, {}, r"the transformer is compiled\. Load the model without torch\.compile"),
        (sharing, {}, r"a pipeline that shares it \(from_pipe\) can be called as it is"),
        (pipelines.decoder(0), {}, "got AutoencoderKL, which has no known cuts of its tokens"),
        ({}, {}, "or transformer_2 or transformer_ref or unconditional_transformer, expected a diffusers"),
        (pipe.transformer, {"strategy": "other"}, "got strategy 'other', expected one of"),
        (pipelines.sd3(), {"cfg": 1}, "got cfg=1, expected True or False"),
    ]
    for thing, options, words in refused:
        with pytest.raises(ValueError, match=words):
            seqpar.parallelize(thing, Mesh.single(), **options)
    assert "forward" not in vars(pipe.transformer)
    with pytest.raises(ValueError, match=r"pickled; call seqpar\.release first"):
        pickle.dumps(parallel)


def test_a_transformer_that_is_compiled_as_a_whole_afterwards_is_called_as_it_is() -> None:
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single(), native=False)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pipe("a cat", num_inference_steps=2, **SIZE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def stopping_early(pipe: Any, step: int, t: Any, given: dict[str, Any]) -> dict[str, Any]:
    pipe._interrupt = torch.distributed.get_rank() == 1  # noqa: TID251
    return given


def diverging(rank: int, world: int, device: torch.device, how: str) -> str:
    pipe = seqpar.parallelize(pipelines.flux(), make_mesh(device, cfg=1))
    options: dict[str, dict[str, Any]] = {
        "steps": {"num_inference_steps": 2 + rank},
        "interrupt": {"num_inference_steps": 3, "callback_on_step_end": stopping_early},
        "latents": {"num_inference_steps": 2, "output_type": "latent" if rank else "pt"},
    }
    try:
        for _ in range(2):  # the rank that does not decode goes on to the next picture
            pipe("a cat", **{**SIZE, **options[how]})
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["steps", "interrupt", "latents"])
def test_ranks_that_do_different_things_are_told_which(ranks: Pool, how: str) -> None:
    messages = ranks.run(2, diverging, how)
    assert len(set(messages)) == 1
    calls, decodes = "calls FluxTransformer2DModel", "calls the VAE's decode"
    here, there = (calls, decodes) if how == "interrupt" else (decodes, calls)
    if how == "latents" and ranks.device == "cuda":  # where sizes are checked before the first step
        there = "prepares latents"
    assert messages[0].startswith(f"ranks do different things: rank 0 {here}, rank 1 {there}. All")


def lonely(rank: int, world: int, device: torch.device) -> str:
    call, _ = recorded_call(make_mesh(device, cfg=2))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step in range(8):
            call(**arguments(1, step))
    return out.getvalue()


def test_a_cfg_axis_without_a_second_branch_is_told_once(ranks: Pool) -> None:
    first, second = ranks.run(2, lonely)
    text = "seqpar: both halves of the cfg axis compute the same calls"
    assert first.count(text) == 1
    assert second == ""
