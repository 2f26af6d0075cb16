"""Tests that the ranks of a host read each tensor once and all get the model, or all the same error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seqpar.ranks.mesh import Mesh
from seqpar.weights import loading, staging
from seqpar.weights.checkpoint import open_checkpoint
from seqpar.weights.find import from_diffusers, locate
from seqpar.weights.loading import shares
from seqpar.weights.staging import Staging
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit


def built(rank: int, world: int, device: torch.device, folder: str) -> tuple[list[str], dict[str, Tensor]]:
    """Return the keys that this rank read for parameters, and the parameters that it got."""
    blueprint, read = locate(folder), list[str]()
    checkpoint, keys = blueprint.checkpoint, blueprint.keys
    assert checkpoint is not None
    assert keys is not None

    def counted(key: str) -> Tensor:
        read.append(key)
        return checkpoint.read(key)

    # repeats are compared, which reads them; here the reading of parameters is counted alone
    keys = replace(keys, repeats={}, ignored=keys.ignored | frozenset(keys.repeats))
    blueprint = replace(blueprint, checkpoint=replace(checkpoint, read=counted, positions={}), keys=keys)
    model = blueprint.build(torch.bfloat16, device, mesh=Mesh.joined(device))
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    return read, {name: parameter.data for name, parameter in model.named_parameters()}


def refused(rank: int, world: int, device: torch.device, folder: str) -> str:
    with pytest.raises(ValueError, match="differs from") as error:
        locate(folder).build(torch.float32, device, mesh=Mesh.joined(device))
    return str(error.value)


@pytest.mark.parametrize("world", [2, 3])
def test_each_tensor_is_read_by_one_rank_and_given_to_all(ranks: Pool, tmp_path: Path, world: int) -> None:
    """An error of one rank is the error of all: one rank compares a copy of the embedders, before any broadcast."""
    diffusers_dit().save_pretrained(tmp_path)  # pyright: ignore
    placed = locate(tmp_path).build(torch.bfloat16, torch.device("cpu"))  # out of the file, not through `read`
    truth_read, truth = built(0, 1, torch.device("cpu"), str(tmp_path))
    assert all(torch.equal(parameter, truth[name]) for name, parameter in placed.named_parameters())
    got = ranks.run(world, built, str(tmp_path))
    keys = [key for read, _ in got for key in read]
    assert sorted(keys) == sorted(truth_read)
    assert len(set(keys)) == len(keys)
    assert min(len(read) for read, _ in got) > 0
    for _, parameters in got:
        assert parameters.keys() == truth.keys()
        assert all(torch.equal(parameters[name], truth[name]) for name in truth)
    theirs = diffusers_dit()
    theirs.transformer_blocks[2].norm1.emb.timestep_embedder.linear_1.bias += 1  # pyright: ignore
    theirs.save_pretrained(tmp_path)  # pyright: ignore
    one, *others = ranks.run(world, refused, str(tmp_path))
    assert "transformer_blocks.2.norm1.emb.timestep_embedder.linear_1.bias differs" in one
    assert set(others) == {one}


@pytest.mark.parametrize("error", [SafetensorError, RuntimeError, IndexError])
@pytest.mark.parametrize(
    "key", ["proj_out_2.bias", "transformer_blocks.1.norm1.emb.class_embedder.embedding_table.weight"]
)
def test_an_error_of_one_rank_names_file_and_key(key: str, error: type[Exception]) -> None:
    """`Mesh.together` shares ValueError and OSError; after any other the ranks would wait for the one that failed."""
    blueprint = from_diffusers(diffusers_dit())
    checkpoint = blueprint.checkpoint
    assert checkpoint is not None

    def read(its: str) -> Tensor:
        if its == key:
            raise error("cut short")
        return checkpoint.read(its)

    spoiled = replace(blueprint, checkpoint=replace(checkpoint, read=read))
    with pytest.raises(ValueError, match=rf"DiTTransformer2DModel: got .*{key}.*, which do not load: .*cut short"):
        spoiled.build(torch.float32, torch.device("cpu"))


def test_memory_that_ends_while_buffers_are_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a thread's initializer would be "a thread initialized itself in vain", whatever it was."""

    def full(device: torch.device) -> Staging:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loading, "Staging", full)
    with pytest.raises(ValueError, match=r"which do not load: CUDA out of memory"):
        from_diffusers(diffusers_dit()).build(torch.float32, torch.device("cpu"))


SPOILED: dict[str, tuple[float, slice, torch.dtype]] = {
    "all NaN": (float("nan"), slice(None), torch.float32),
    "one infinity": (-float("inf"), slice(0, 1), torch.float64),
    "too large": (1e6, slice(0, 1), torch.float16),
}


@pytest.mark.parametrize("case", SPOILED)
def test_weights_that_are_not_finite_are_refused_by_the_name_of_their_key(case: str) -> None:
    value, where, dtype = SPOILED[case]
    theirs: Any = diffusers_dit()
    weight = theirs.transformer_blocks[1].attn1.to_out[0].weight
    from_diffusers(theirs).build(dtype, torch.device("cpu"))
    weight.view(-1)[where] = value
    message = r"got NaN or infinity in transformer_blocks\.1\.attn1\.to_out\.0\.weight, expected finite weights in "
    with pytest.raises(ValueError, match=message + str(dtype).removeprefix("torch.")):
        from_diffusers(theirs).build(dtype, torch.device("cpu"))


def test_the_shares_of_ranks_are_runs_of_about_equal_size(tmp_path: Path) -> None:
    diffusers_dit().save_pretrained(tmp_path)  # pyright: ignore
    blueprint = locate(tmp_path)
    assert blueprint.checkpoint is not None
    assert blueprint.keys is not None
    found = shares(blueprint.checkpoint, blueprint.keys, 4)
    assert [*found] == [*blueprint.keys.sources]
    assert [*found.values()] == sorted(found.values())
    sizes = {name: parameter.numel() for name, parameter in blueprint.meta().named_parameters()}
    parts = [sum(sizes[name] for name, part in found.items() if part == one) for one in range(4)]
    assert max(parts) - min(parts) <= 2 * max(sizes.values())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_come_whole_through_small_buffers(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks end inside of rows; out of a file and out of memory; a transposed matrix, a scalar and an empty tensor."""
    monkeypatch.setattr(staging, "CHUNK", 1000)
    stage, matrix = staging.Staging(torch.device(device)), torch.randn(70, 90, generator=torch.manual_seed(0))
    tensors = (matrix, matrix.bfloat16(), matrix.T, matrix[:, ::2], torch.tensor(3.0), torch.empty(0, 4))
    file = tmp_path / "model.safetensors"
    save_file({str(i): tensor.contiguous() for i, tensor in enumerate(tensors)}, file, {"format": "pt"})
    opened = open_checkpoint(file)
    assert opened.positions.keys() == opened.shapes.keys()
    for i, tensor in enumerate(tensors):
        for dtype in (None, torch.bfloat16, torch.float64):
            for got in (stage.copy(tensor, dtype), stage.fetch(opened, str(i), dtype)):
                assert got.device.type == device
                assert got.dtype == (dtype or tensor.dtype)
                assert torch.equal(got.cpu(), tensor.to(got.dtype))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="which ends at byte"):
        [stage.fetch(opened, key) for key in opened.positions]
