"""Tests that the ranks of a host read each tensor once and all get the model, or all the same error."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from seqpar.loading import placing as loading
from seqpar.loading import reading
from seqpar.loading.checkpoint import Checkpoint, from_state_dict, open_checkpoint
from seqpar.loading.placing import shares
from seqpar.loading.reading import Reader
from seqpar.loop.blueprint import from_diffusers, locate
from seqpar.mesh.mesh import Mesh
from seqpar.types.keys import KeyMap, TensorSource
from tests.support.pool import Pool
from tests.support.tiny import diffusers_dit

CPU = torch.device("cpu")


def built(
    rank: int, world: int, device: torch.device, folder: str, small: int = loading.SMALL
) -> tuple[list[str], dict[str, Tensor]]:
    """Return the keys that this rank read for parameters, and the parameters that it got."""
    blueprint, read = locate(folder), list[str]()
    checkpoint: Any = blueprint.checkpoint
    keys: Any = blueprint.keys

    def counted(key: str) -> Tensor:
        read.append(key)
        return checkpoint.read(key)

    # repeats are compared, which reads them; here the reading of parameters is counted alone
    keys = replace(keys, repeats={}, ignored=keys.ignored | frozenset(keys.repeats))
    blueprint = replace(blueprint, checkpoint=replace(checkpoint, read=counted, positions={}), keys=keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "SMALL", small)
        model = blueprint.build(torch.bfloat16, device, mesh=Mesh.joined(device))
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())
    return read, {name: parameter.data for name, parameter in model.named_parameters()}


def refused(rank: int, world: int, device: torch.device, folder: str) -> str:
    with pytest.raises(ValueError, match="differs from") as error:
        locate(folder).build(torch.float32, device, mesh=Mesh.joined(device))
    return str(error.value)


@pytest.mark.parametrize(("world", "small"), [(2, 0), (2, 1 << 10), (3, loading.SMALL)])
def test_each_tensor_is_read_by_one_rank_and_given_to_all(ranks: Pool, tmp_path: Path, world: int, small: int) -> None:
    """An error of one rank is the error of all: one rank compares a copy of the embedders, before any broadcast."""
    diffusers_dit().save_pretrained(tmp_path)  # pyright: ignore
    placed = locate(tmp_path).build(torch.bfloat16, CPU)  # out of the file, not through `read`
    truth_read, truth = built(0, 1, CPU, str(tmp_path))
    assert all(torch.equal(parameter, truth[name]) for name, parameter in placed.named_parameters())
    got = ranks.run(world, built, str(tmp_path), small)
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
def test_an_error_of_one_rank_names_file_and_key(
    key: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Mesh.on_all_ranks` shares ValueError and OSError; after any other, ranks would wait for the failed one."""
    blueprint = from_diffusers(diffusers_dit())
    checkpoint: Any = blueprint.checkpoint

    def read(its: str) -> Tensor:
        if its == key:
            raise error("cut short")
        return checkpoint.read(its)

    spoiled = replace(blueprint, checkpoint=replace(checkpoint, read=read))
    with pytest.raises(ValueError, match=rf"DiTTransformer2DModel: got .*{key}.*, which do not load: .*cut short"):
        spoiled.build(torch.float32, CPU)

    def full(device: torch.device, threads: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reading, "_native", full)  # while buffers are made
    with pytest.raises(ValueError, match=r"got its weights, which do not load: CUDA out of memory"):
        from_diffusers(diffusers_dit()).build(torch.float32, CPU)


def failing(owner: Any, name: str, after: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        own, calls = getattr(owner, name), count()

        def called(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == after:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return own(*args, **kwargs)

        patch.setattr(owner, name, called)

    return plant


# what fails, whether tensors are small enough to come together, and the message
ERRORS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], bool, str]] = {
    "NaN": (lambda patch: None, True, "NaN or infinity"),
    "NaN in a large one": (lambda patch: None, False, "NaN or infinity"),
    "a request": (failing(reading._Requests, "ask", 9), False, "out of memory"),
    "a request for a small one": (failing(reading._Requests, "ask", 9), True, "out of memory"),
    "a look": (failing(torch.Tensor, "aminmax", 7), False, "out of memory"),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ERRORS)
def test_after_an_error_no_thread_and_no_weight_stays(
    tmp_path: Path, device: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even until Python looks for garbage: the next try may need the memory."""
    theirs: Any = diffusers_dit()
    theirs.proj_out_2.bias.data[0] = float("nan")
    theirs.save_pretrained(tmp_path)
    blueprint, began = locate(tmp_path), len(os.listdir("/proc/self/task"))
    plant, small, message = ERRORS[case]
    monkeypatch.setattr(reading, "SMALL", reading.SMALL if small else 0)
    gc.collect()
    gc.disable()
    try:
        alive = {id(each) for each in gc.get_objects() if isinstance(each, Tensor)}
        with monkeypatch.context() as patch:
            plant(patch)
            with pytest.raises(ValueError, match=message):
                blueprint.build(torch.float32, torch.device(device))
        left = [each for each in gc.get_objects() if isinstance(each, Tensor) and id(each) not in alive]
        most, until = began + (device == "cuda") * 16, time.monotonic() + 10  # CUDA starts some once
        while (threads := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < until:
            time.sleep(0.01)  # the system lists a thread that has been joined for a moment
    finally:
        gc.enable()
    assert threads <= most
    assert not [each.shape for each in left if each.numel() > 1 and not each.is_meta]


@pytest.mark.parametrize(
    ("value", "where", "dtype"),
    [
        (float("nan"), slice(None), torch.float32),
        (-float("inf"), slice(0, 1), torch.float64),
        (1e6, slice(0, 1), torch.float16),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_the_name_of_their_key(
    value: float, where: slice, dtype: torch.dtype
) -> None:
    theirs: Any = diffusers_dit()
    from_diffusers(theirs).build(dtype, CPU)
    theirs.transformer_blocks[1].attn1.to_out[0].weight.view(-1)[where] = value
    message = r"got NaN or infinity in transformer_blocks\.1\.attn1\.to_out\.0\.weight, expected finite weights in "
    with pytest.raises(ValueError, match=message + str(dtype).removeprefix("torch.")):
        from_diffusers(theirs).build(dtype, CPU)


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ([0], [120]),
        ([0, 0, 0, 0], [30, 30, 30, 30]),
        ([40, 0], [40, 80]),
        ([300, 0, 0], [0, 60, 60]),  # a rank with more than its share already gets nothing
        ([0, 50, 1000], [85, 35, 0]),
        ([70, 70, 70], [40, 40, 40]),
    ],
)
def test_shares_of_ranks_are_runs_after_which_each_has_read_as_many_bytes(
    taken: list[int], expected: list[int]
) -> None:
    sizes = {str(i): 1 + i % 3 for i in range(60)}
    found = shares(sizes, taken)
    assert [*found] == [*sizes]
    assert [*found.values()] == sorted(found.values())
    parts = [sum(sizes[name] for name, part in found.items() if part == one) for one in range(len(taken))]
    assert all(abs(part - right) <= max(sizes.values()) for part, right in zip(parts, expected, strict=True))


def saved(folder: Path, tensors: dict[str, Tensor]) -> Checkpoint:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "x.safetensors", {"format": "pt"})
    return open_checkpoint(folder / "x.safetensors")


def begin(reader: Reader, checkpoint: Checkpoint, dtype: torch.dtype | None = None, made: Any = None) -> Any:
    """Ask for all tensors of a checkpoint."""
    sources = {key: TensorSource((key,), made or (lambda x: x)) for key in sorted(checkpoint.shapes)}
    like = {key: torch.empty(0, dtype=dtype or checkpoint.dtypes[key], device="meta") for key in sources}
    found = reader.begin(checkpoint, KeyMap(sources), list(sources), like)
    reader.start()
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("ahead", "small"), [(0, 0), (reading.AHEAD, 0), (reading.AHEAD, 1 << 13), (0, reading.SMALL)])
def test_tensors_come_whole_through_small_buffers(
    tmp_path: Path, device: str, ahead: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks end inside of rows; out of a file and out of memory; a transposed matrix, a scalar and an empty tensor."""
    for name, value in (("BLOCK", 1 << 12), ("AHEAD", ahead), ("SMALL", small)):
        monkeypatch.setattr(reading, name, value)
    matrix = torch.randn(70, 90, generator=torch.manual_seed(0))
    three = torch.arange(3).to(torch.bfloat16)  # after which an fp32 tensor may begin at no multiple of its bytes
    kinds = (matrix, matrix.bfloat16(), matrix.T, matrix[:, ::2], three, torch.tensor(3.0), torch.empty(0, 4))
    tensors = {str(i): each for i, each in enumerate(kinds)}
    opened, file = saved(tmp_path, tensors), tmp_path / "x.safetensors"
    assert opened.positions.keys() == opened.shapes.keys()
    with Reader(torch.device(device)) as reader:
        for checkpoint in (opened, replace(opened, read=tensors.__getitem__, positions={})):
            for dtype in (None, torch.bfloat16, torch.float64):
                for key, got in begin(reader, checkpoint, dtype).result().items():
                    assert got.device.type == device
                    assert got.dtype == (dtype or tensors[key].dtype)
                    assert torch.equal(got.cpu(), tensors[key].to(got.dtype))
        file.write_bytes(file.read_bytes()[:-1])
        with pytest.raises(ValueError, match=r"safetensors changed while it was read; load it again"):
            begin(reader, opened).result()


@pytest.mark.parametrize("by_position", [True, False])
def test_few_tensors_wait_in_the_dtype_of_the_file(
    tmp_path: Path, by_position: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is converted while later tensors come: a device need not hold a model in both dtypes."""
    monkeypatch.setattr(reading, "AHEAD", 64)
    monkeypatch.setattr(reading, "SMALL", 0)
    opened, ask = saved(tmp_path, {str(i): torch.ones(8) for i in range(9)}), reading._Requests.ask
    waiting, most = 0, 0

    def asked(self: Any, key: str) -> Any:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        return ask(self, key)

    def made(tensor: Tensor) -> Tensor:
        nonlocal waiting
        waiting -= 1
        return tensor

    monkeypatch.setattr(reading._Requests, "ask", asked)
    with Reader(CPU) as reader:
        found = begin(reader, opened if by_position else replace(opened, positions={}), made=made)
        assert found.result().keys() == opened.shapes.keys()
    assert (most, waiting) == (3 if by_position else 1, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_error_frees_no_memory_that_is_still_written_to(tmp_path: Path, device: str) -> None:
    opened = saved(tmp_path, {str(i): torch.ones(1 << 18) for i in range(20)})
    submit, leave = reading._Requests._submit, reading._Requests.__exit__
    written, pending = dict[int, Any](), list[bool]()

    def submitted(self: Any, key: str, tensor: Tensor) -> int:
        number = submit(self, key, tensor)
        written[number] = weakref.ref(tensor)
        return number

    def left(self: Any, *error: Any) -> None:
        pending.extend(written[number]() is not None for number in self._coming)
        native, numbers = self._native, [*self._coming]
        leave(self, *error)
        assert not self._coming
        for number in numbers:
            with pytest.raises(IndexError):  # it has been waited for
                native.wait_read(number)

    def broken(tensor: Tensor) -> Tensor:
        raise RuntimeError("no memory left")

    with Reader(torch.device(device)) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading._Requests, "_submit", submitted)
        patch.setattr(reading._Requests, "__exit__", left)
        with pytest.raises(ValueError, match="which do not load: no memory left"):
            begin(reader, opened, made=broken).result()
    assert pending == [True] * 19


@pytest.mark.parametrize("small", [0, reading.SMALL])
def test_errors_of_the_disk_are_told_as_they_are(tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "SMALL", small)
    opened = saved(tmp_path, {"one": torch.ones(8), "two": torch.ones(8)})
    with Reader(CPU) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading.os, "O_RDONLY", reading.os.O_WRONLY)  # which the system refuses to read
        with pytest.raises(OSError, match="Bad file descriptor"):
            begin(reader, opened).result()
        patch.undo()
        assert all(each.eq(1).all() for each in begin(reader, opened).result().values())
        # fewer bytes than the size at which the header was read, as where a network's file system fails
        patch.setattr(reading.os, "preadv", lambda file, rooms, offset: os.pread(file, 16, offset) and 16)
        if small:
            with pytest.raises(ValueError, match="expected 32 bytes that can be read"):
                begin(reader, opened).result()


@pytest.mark.parametrize("small", [0, reading.SMALL])
@pytest.mark.parametrize("by_position", [True, False])
def test_tensors_are_new_and_can_be_changed(
    tmp_path: Path, by_position: bool, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share no memory with their source; callers may be in inference mode."""
    monkeypatch.setattr(reading, "SMALL", small)
    tensors = {"one": torch.ones(8), "two": torch.ones(8)}
    opened = saved(tmp_path, tensors)
    checkpoint = opened if by_position else replace(opened, read=tensors.__getitem__, positions={})
    keys, like = KeyMap(dict.fromkeys("ab", TensorSource(("one",)))), dict.fromkeys("ab", torch.empty(8, device="meta"))
    with Reader(CPU) as reader:
        found, again = begin(reader, checkpoint).result(), begin(reader, checkpoint).result()
        twins = reader.begin(checkpoint, keys, ["a", "b"], like).result()
        with torch.inference_mode():
            assert not begin(reader, checkpoint).result()["one"].is_inference()
    every = [*found.values(), *again.values(), *twins.values(), *tensors.values()]
    assert len({each.untyped_storage().data_ptr() for each in every}) == len(every)


@pytest.mark.parametrize(("twin", "equal"), [(1.0, True), (1.0 + 2**-12, False)])
def test_repeats_are_compared_as_they_are(twin: float, equal: bool) -> None:
    """A bf16 copy of fp32 numbers with more digits is no copy."""
    state = {"first": torch.full((3,), twin), "copy": torch.ones(3).bfloat16()}
    keys, like = KeyMap({"x": TensorSource(("first",))}, repeats={"copy": "first"}), torch.empty(3, device="meta")
    model = torch.nn.Module()
    model.register_parameter("x", torch.nn.Parameter(like))
    with Reader(CPU) as reader:
        placing = loading.begin({"x": like}, from_state_dict("state", state), keys, reader, loading.Team())
        reader.start()
        with nullcontext() if equal else pytest.raises(ValueError, match="state: copy differs from first, expected"):
            placing.finish(model, None)


def test_what_is_not_begun_when_loading_ends_is_dropped(tmp_path: Path) -> None:
    opened, begun = saved(tmp_path, {"one": torch.ones(8)}), list[Any]()
    keys = KeyMap({"one": TensorSource(("one",), lambda one: begun.append(1) or one)})
    with Reader(CPU) as reader:
        dropped = reader.begin(opened, keys, ["one"], {"one": torch.ones(1)})
        (tmp_path / "x.safetensors").unlink()  # whoever opens it fails otherwise
    with pytest.raises(CancelledError):
        dropped.result()
    assert not begun
