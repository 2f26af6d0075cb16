"""Tests of parked weights: who is in the buffer, the bits of pipelines without it, and errors for their readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.cli.args import Args
from seqpar.convert.folder import convert
from seqpar.kernels.weight8 import Weight8, in_memory
from seqpar.loading import reading
from seqpar.loading.lora import Lora, parse
from seqpar.loading.parking import ENCODERS, Parking, WeightLayout, bring, bytes_on, seat_of
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines.diffusers import Source
from seqpar.pipelines.protocol import GenerationRequest
from seqpar.serve.ranks.checked import FittingLoras, loras_in
from seqpar.transformer import calibration
from seqpar.transformer import lora as lora_files
from seqpar.transformer.parallelize import call_of
from tests.cli.runs import shown
from tests.support import pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.pool import Pool

pytestmark = pytest.mark.slow
SMALL = {"height": 32, "width": 32, "num_frames": 5}
ASKED: dict[str, Any] = {**SMALL, "num_inference_steps": 2, "max_sequence_length": 16, "output_type": "latent"}
EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan22")
    pipelines.wan(2).save_pretrained(folder)
    return folder


def latents(pipe: Any, prompt: str = "a red cat") -> Tensor:
    pipelines.quiet(pipe)
    return pipe(prompt, generator=pipelines.seeded(0), **ASKED).frames


def parking_of(pipe: Any) -> Parking:
    seats = [seat_of(getattr(pipe, name)) for name in EXPERTS]
    (parking,) = {seat.parking for seat in seats if seat is not None}
    return parking


def loaded(folder: Path, cache: Path, **options: Any) -> Any:
    """Return a pipeline that is calibrated anew, whose large weights are read straight into their places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "SMALL", 1 << 10)
        patch.setattr(calibration, "SIZES", SMALL)
        patch.setenv("SEQPAR_CACHE", str(cache / str(options.get("park", False))))
        return seqpar.load(folder, **options)


def parked(
    rank: int, world: int, device: torch.device, folder: Path, cache: Path, precision: Any
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Return latents without parking and with it, and the swaps of each run."""
    mesh = mesh_of(device, ulysses=world)
    options: Any = {"dtype": torch.float32 if precision is None else torch.bfloat16, "precision": precision}
    pipe: Any = loaded(folder, cache, mesh=mesh, **options)
    whole = [latents(pipe), latents(pipe, "a cat")]
    seqpar.release(pipe)
    pipe = loaded(folder, cache, mesh=mesh, park=True, **options)
    parking, swaps, ours = parking_of(pipe), list[int](), list[Tensor]()
    keys = dict[str, Any]()
    for prompt in ("a red cat", "a cat", "a red cat"):
        before = parking.swaps
        ours.append(latents(pipe, prompt))
        swaps.append(parking.swaps - before)
        calls: Any = {name: call_of(getattr(pipe, name)) for name in EXPERTS}
        now = {name: call._generation for name, call in calls.items()}
        assert keys in ({}, now)  # graphs stay valid
        keys = now
    memory, counts = parking._buffer.data_ptr(), set[int]()
    for name in (EXPERTS[0], ENCODERS, EXPERTS[1]):
        parking.bring(name)
        counts.add(bytes_on(device, [x for x in pipe.components.values() if isinstance(x, torch.nn.Module)]))
        if name == ENCODERS:
            continue
        for weight in getattr(pipe, name).parameters():  # also those that fused blocks have joined
            assert all(memory <= x.data_ptr() < memory + len(parking._buffer) for x in in_memory(weight.detach()))
    (count,) = counts  # how much is left for the VAE depends on no call
    assert parking.nbytes < count < parking.nbytes + sum(x.nbytes for x in pipe.vae.parameters()) + (1 << 16)
    seqpar.release(pipe)
    return whole, ours, swaps


@pytest.mark.parametrize(("world", "precision"), [(1, None), (3, "fp8")])
def test_parked_weights_have_the_same_bits(
    cpu_ranks: Pool, wan: Path, tmp_path: Path, world: int, precision: str | None
) -> None:
    for rank, (whole, ours, swaps) in enumerate(cpu_ranks.run(world, parked, wan, tmp_path, precision)):
        assert not torch.equal(whole[0], whole[1])
        assert all(map(torch.equal, ours, (*whole, whole[0])))
        # the first transformer and back; on rank 0 also the encoder over what is there, and back
        assert swaps == ([4, 4, 4] if rank == 0 else [2, 2, 2])


def job(folder: Path, precision: Any, park: bool, *loras: Lora) -> Any:
    dtype = torch.float32 if precision is None else torch.bfloat16
    more: Any = {"prompts": ("x",), "steps": 2, "precision": precision, "park": park, "loras": loras}
    request = GenerationRequest(str(folder), dtype, **more)
    return Source.locate(folder).check(request)


def switched(
    rank: int, world: int, device: torch.device, folder: Path, loras: Path, precision: Any, park: bool
) -> list[Tensor]:
    mesh, asked = mesh_of(device, ulysses=world), job(folder, precision, park)
    pipe = asked.load_pipeline(mesh)
    fitting = FittingLoras.of(asked, loras_in(loras))
    merging = lora_files.switched(pipe, fitting.by_name, mesh)
    assert sum(own.numel() for own, _ in merging._kept.values()) == fitting.weights  # on the GPU
    assert (fitting.weights == 0) == (park or precision is not None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "SIZES", SMALL)
        seqpar.parallelize(pipe, mesh, precision=precision)
    made = [latents(pipe)]
    pair = (("high@transformer", 1.0), ("low@transformer_2", 0.8))
    for wanted in (pair, (("low@transformer_2", 0.5),), ()):
        merging.switch(wanted)  # while the second transformer is in
        made.append(latents(pipe))
    seqpar.release(pipe)
    return made


@pytest.mark.parametrize(("precision", "stored"), [(None, False), ("fp8", True)])
def test_loras_of_a_parked_transformer_are_switched(
    cpu_ranks: Pool, wan: Path, tmp_path: Path, precision: str | None, stored: bool
) -> None:
    from tests.cli.loras import of_wan, written

    loras, folder = tmp_path / "loras", tmp_path / "eight" if stored else wan
    loras.mkdir()
    written(loras, {"high": of_wan("lightning", 1), "low": of_wan("lightning", 2)})
    if stored:
        convert(wan, folder, dtype=torch.bfloat16, precision="fp8")
    whole, ours = (cpu_ranks.run(2, switched, folder, loras, precision, park) for park in (False, True))
    for theirs, made in zip(whole, ours, strict=True):
        assert all(map(torch.equal, theirs, made))
        assert torch.equal(made[0], made[3])
        assert len({float(x.double().sum()) for x in made}) == 3
    assert job(wan, precision, False).load.parameters == 2 * job(wan, precision, True).load.parameters


def test_loras_are_merged_into_parked_weights(wan: Path, tmp_path: Path) -> None:
    from tests.cli.loras import of_wan, written

    written(tmp_path, {"high": of_wan("lightning", 1), "low": of_wan("lightning", 2)})
    loras = [parse(f"{tmp_path}/{name}") for name in ("high.safetensors@transformer", "low.safetensors@transformer_2")]
    made = list[list[Tensor]]()
    for park in (False, True):
        pipe = job(wan, "fp8", park, *loras).load_pipeline(Mesh.single())
        made.append([])
        for name in EXPERTS:
            bring(module := getattr(pipe, name))
            weights = [x for x in module.parameters() if isinstance(x, Weight8)]
            made[-1] += [y for x in weights for y in (x.wide(), x.original())]  # centres have products with both
    assert len(made[0]) == 80
    assert all(map(torch.equal, *made))


READS: dict[str, Callable[[Any], object]] = {
    "numbers": lambda module: module.proj_out.weight + 1,
    "a write": lambda module: module.proj_out.weight.data.zero_(),
    "an address": lambda module: module.proj_out.weight.data_ptr(),
    "a file": lambda module: torch.save(module.state_dict(), "/dev/null"),
}


def test_whoever_reads_parked_weights_gets_an_error(wan: Path) -> None:
    pipe: Any = job(wan, None, True).load_pipeline(Mesh.single())  # not parallelized
    before = latents(pipe)
    assert pipe.transformer.dtype == torch.float32
    assert pipe.text_encoder.device == torch.device("cpu")
    pipe.to("cpu")  # where all of it is
    for name, read in READS.items():
        with pytest.raises(ValueError, match="parked in memory of the host"):
            read(pipe.transformer)
        if name in ("numbers", "an address"):
            read(pipe.transformer_2)  # which is in the buffer
        assert torch.equal(latents(pipe), before), name


def test_what_cannot_be_parked_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], wan: Path) -> None:
    pipelines.flux().save_pretrained(tmp_path)
    whole, pipe = (pipelines.quiet(seqpar.load(tmp_path, dtype=torch.float32, park=park)) for park in (False, True))
    said = "parked while not in use: text_encoder, text_encoder_2; not parked: transformer, because there are no two"
    assert capsys.readouterr().out.count(said) == 1
    asked: Any = {"num_inference_steps": 1, "height": 32, "width": 32, "output_type": "latent"}
    made = [each("a red cat", generator=pipelines.seeded(0), **asked).images for each in (whole, pipe)]
    assert torch.equal(*made)
    job(wan, None, True).load_pipeline(Mesh.single(), (lambda pipe: latents(pipe),))
    said = "use: transformer, transformer_2; not parked: text encoders, because they leave memory before transformers"
    assert capsys.readouterr().out.count(said) == 1
    (tmp_path / "transformer" / "own.py").write_text("")  # a program, so that diffusers loads it
    assert seat_of(seqpar.load(tmp_path, dtype=torch.float32, park=True).transformer) is None
    said = capsys.readouterr().out
    assert "because ranks read no transformer in whose place they could be" in said
    assert "parked while" not in said
    both = pipelines.ideogram4().to(torch.float32)
    both.register_modules(text_encoder=pipelines.t5(1).float(), tokenizer=pipelines.tokenizer(16))
    both.save_pretrained(tmp_path / "both")
    assert seat_of(seqpar.load(tmp_path / "both", dtype=torch.float32, park=True).transformer) is None
    said = "not parked: transformer and unconditional_transformer, because each step calls both; text encoders, because"
    assert capsys.readouterr().out.count(said) == 1


def test_the_command_verifies_parked_weights(cpu_ranks: Pool, wan: Path, tmp_path: Path) -> None:
    same: Any = {"prompt": ("a red cat",), "steps": 2, "size": "32x32", "frames": 5, "out": tmp_path / "x.mp4"}
    (printed, _), _ = cpu_ranks.run(2, shown, Args(str(wan), park=True, verify=True, **same))
    assert "every step holds" in printed


def test_weights_of_one_matrix_are_adjacent() -> None:
    eight = Weight8.empty((3, 5), torch.bfloat16, "meta")
    plain = torch.empty(7, dtype=torch.bfloat16, device="meta")
    layout = WeightLayout.of({"a": eight, "b": plain, "c": plain, "d": eight}, [["d", "a"], ["b", "d"], ["c", "none"]])
    assert layout.starts == {"d": (0, 256), "a": (15, 268), "b": (512,), "c": (768,)}
    assert layout.size == 782
