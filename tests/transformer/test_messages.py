# pyright cannot infer the types of diffusers' modules
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
"""Tests that what users of `parallelize` get wrong ends in one sentence with its real cause, the same on all ranks."""

from __future__ import annotations

import contextlib
import io
import pickle
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux_img2img import FluxImg2ImgPipeline

import seqpar
from seqpar.mesh.mesh import Mesh
from tests.support import pipelines
from tests.support.calls import recorded_call
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool
from tests.transformer.test_call import arguments

SIZE = {"height": 16, "width": 16, "max_sequence_length": 16, "output_type": "pt"}


def test_a_compiled_transformer_is_refused_with_what_to_do() -> None:
    pipe = pipelines.flux()
    pipe.transformer = torch.compile(pipe.transformer)
    with pytest.raises(ValueError, match=r"the transformer is compiled\. Load the model without torch\.compile"):
        seqpar.parallelize(pipe, Mesh.single())


def test_a_transformer_that_is_compiled_as_a_whole_afterwards_is_called_as_it_is() -> None:
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single(), native=False)
    pipe.transformer = torch.compile(pipe.transformer)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pipe("a cat", num_inference_steps=2, **SIZE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_pickles_shared_transformers_and_layouts_that_contradict_are_refused() -> None:
    pipe = seqpar.parallelize(pipelines.flux(), Mesh.single())
    with pytest.raises(ValueError, match=r"pickled; call seqpar\.release first"):
        pickle.dumps(pipe)
    with pytest.raises(ValueError, match=r"a pipeline that shares it \(from_pipe\) can be called as it is"):
        seqpar.parallelize(FluxImg2ImgPipeline(**pipe.components), Mesh.single())
    with pytest.raises(ValueError, match="got cfg=1, expected True or False"):
        seqpar.parallelize(pipelines.sd3(), Mesh.single(), cfg=1)


def stopping_early(pipe: Any, step: int, t: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Stop after the first step on rank 1 alone."""
    pipe._interrupt = torch.distributed.get_rank() == 1  # noqa: TID251
    return given


def differing(rank: int, world: int, device: torch.device, how: str) -> str:
    """Return the message of a call in which rank 1 makes fewer steps, interrupts, or returns latents."""
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
    messages = ranks.run(2, differing, how)
    assert len(set(messages)) == 1
    calls, decodes = "calls FluxTransformer2DModel", "calls the VAE's decode"
    here, there = (calls, decodes) if how == "interrupt" else (decodes, calls)
    if how == "latents" and ranks.device == "cuda":  # where sizes are checked before the first step
        there = "prepares latents"
    assert messages[0].startswith(f"ranks do different things: rank 0 {here}, rank 1 {there}. All")


def lonely(rank: int, world: int, device: torch.device) -> str:
    """Return what is printed while a transformer is called step after step without a second branch."""
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
