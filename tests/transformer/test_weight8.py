"""Tests of weights that are in memory in 8 bits alone: torch sees numbers of their dtype, GEMMs the bits of copies."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import seqpar
from seqpar.cli.main import command
from seqpar.convert.folder import convert
from seqpar.families._find import stored_in_8_bits
from seqpar.kernels import weight8
from seqpar.kernels.rows8 import rounded
from seqpar.kernels.weight8 import Weight8, in_memory
from seqpar.loading import originals, reading
from seqpar.loading.folder import check_model
from seqpar.loading.pipeline import Weights
from seqpar.loading.placing import Team
from seqpar.loading.random import WithoutValues
from seqpar.mesh.mesh import Mesh
from seqpar.transformer import calibration
from seqpar.transformer.calibration import Calibration, matrices_of
from seqpar.transformer.lora import LoraTerm, Merging
from seqpar.transformer.lossy import computed_by
from seqpar.transformer.parallelize import calls_of
from tests.conftest import DEVICE
from tests.kernels.shared import gpu
from tests.support import pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.pool import Pool
from tests.support.sharded import raised

BF16 = torch.bfloat16
ASKED: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "latent"}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=BF16, generator=torch.Generator().manual_seed(seed))


# As a tensor ----------------------------------------------------------------------------------------------------

READ: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda weight: F.linear(numbers(2, 5, 32), weight, numbers(48)),
    "product": lambda weight: numbers(5, 32) @ weight.t(),
    "product into": lambda weight: torch.mm(numbers(5, 32), weight.t(), out=torch.empty(5, 48, dtype=BF16)),
    "rows": lambda weight: weight[3:9],
    "one row": lambda weight: weight[4],
    "columns": lambda weight: weight[:, 8:],
    "split": lambda weight: weight.split([16, 32])[1],
    "equal parts": lambda weight: weight.split(20)[2],
    "chunk": lambda weight: weight.chunk(3)[2],
    "cat": lambda weight: torch.cat([weight, weight]),
    "wider": lambda weight: weight.to(torch.float64),
    "norm": lambda weight: weight.double().norm(),
    "copied from": lambda weight: torch.zeros(48, 32, dtype=BF16).copy_(weight),
    "clone": lambda weight: weight.clone(),
    "deep copy": copy.deepcopy,
    "zeros": lambda weight: weight.new_zeros(3),
    "a plain parameter": lambda weight: nn.Parameter(weight),
    "saved": lambda weight: saved({"weight": weight})["weight"],
}
WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "multiplied": lambda weight: weight.mul_(-3),
    "added": lambda weight: weight.add_(numbers(48, 32, seed=2), alpha=2),
    "data": lambda weight: weight.data.add_(1),
    "set": lambda weight: weight.__setitem__((slice(None), -1), 0),
    "copied": lambda weight: weight.copy_(numbers(48, 32, seed=3)),
    "data replaced": lambda weight: setattr(weight, "data", numbers(48, 32, seed=3)),
    "rows written": lambda weight: weight[4:8].zero_(),
    "an output": lambda weight: torch.mul(numbers(48, 32), 2, out=weight),
}


def saved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", READ)
def test_torch_reads_the_numbers_for_which_it_stands(name: str) -> None:
    weight = Weight8.of(numbers(48, 32))
    got, want = READ[name](weight), READ[name](weight.wide())
    assert got.dtype == want.dtype
    assert torch.equal(got.wide() if isinstance(got, Weight8) else got, want)
    assert not torch.equal(want, READ[name](numbers(48, 32))) or name == "zeros"  # a negative control


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_rounded_and_counted(name: str) -> None:
    weight = nn.Parameter(Weight8.of(numbers(48, 32), lambda: numbers(48, 32)), requires_grad=False)
    assert isinstance(weight, Weight8)
    plain, values, before = weight.wide(), weight.e4m3, weight._version
    WRITTEN[name](weight)
    WRITTEN[name](plain)
    assert torch.equal(weight.wide(), Weight8.of(plain).wide())
    assert torch.equal(weight.original(), weight.wide())  # the original is none any more
    assert weight.e4m3 is values  # GEMMs hold this memory
    assert not weight.loaded
    assert weight._version > before or "data" in name


def test_rows_share_its_memory_and_its_original() -> None:
    weight = Weight8.of(numbers(48, 32), lambda: numbers(48, 32))
    rows: Any = weight[3:9]
    assert rows.e4m3.data_ptr() == weight.e4m3[3:].data_ptr()
    assert torch.equal(rows.original(), numbers(48, 32)[3:9])


def test_it_is_rounded_as_copies_are_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight8, "CHUNK", 7 * 32)
    weight, (values, scales) = Weight8.of(numbers(48, 32)), rounded(numbers(48, 32).float())
    assert torch.equal(weight.e4m3.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(weight.scales, scales.flatten())
    assert torch.equal(weight.wide(), weight8.reference(values, weight.scales, BF16))


def test_modules_move_it_and_load_it() -> None:
    layer = nn.Linear(32, 48, dtype=BF16)
    layer.weight = nn.Parameter(Weight8.of(numbers(48, 32)))
    before = layer.weight.detach().clone()
    again = nn.Linear(32, 48, dtype=BF16)
    again.load_state_dict(layer.state_dict())
    assert type(again.weight) is nn.Parameter
    assert torch.equal(again.weight, before)
    layer.load_state_dict({"weight": numbers(48, 32, seed=1), "bias": numbers(48)})
    assert isinstance(layer.weight, Weight8)
    assert torch.equal(layer.weight.detach(), Weight8.of(numbers(48, 32, seed=1)))
    assert layer.to(torch.float32)(torch.ones(32)).dtype == torch.float32
    assert layer.to("meta").weight.device.type == "meta"


@pytest.mark.filterwarnings("ignore:TypedStorage")  # of safetensors, which asks for the address in several ways
def test_files_that_would_hold_other_bytes_are_refused(tmp_path: Path) -> None:
    weight = Weight8.of(numbers(48, 32))
    assert "stored in 8 bits has no memory in its dtype" in raised(lambda: save_file({"x": weight}, tmp_path / "x"))
    for name in ("data_ptr", "untyped_storage"):
        assert "stored in 8 bits" in raised(getattr(weight, name))


# In a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipelines.flux().to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def small_calibration(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("SEQPAR_CACHE", str(cache))
    monkeypatch.setattr(calibration, "SIZES", {"height": 32, "width": 32})


def load(folder: Path, **options: Any) -> Any:
    options = {"mesh": Mesh.single()} | options  # GPUs round no fp32
    return pipelines.quiet(seqpar.load(folder, dtype=torch.float32, precision="fp8", **options))


def latents(pipe: Any) -> Tensor:
    return pipe("a red cat", generator=pipelines.seeded(1), **ASKED).images


def fused_of(pipe: Any) -> Any:
    return calls_of(pipe)[0][1].sharded.fused


def beside(folder: Path, pipe: Any, change: Callable[[Any], object] = id) -> Any:
    """Return the pipeline whose GEMMs compute with copies beside the weights, others with numbers of 8 bits."""
    plain = pipelines.quiet(type(pipe).from_pretrained(folder, torch_dtype=torch.float32))
    change(plain.transformer)
    layers = [layer for layers in matrices_of(plain.transformer).values() for layer in layers]
    for name in stored_in_8_bits(plain.transformer):
        layer = plain.transformer.get_submodule(name.removesuffix(".weight"))
        if not any(layer is other for other in layers):
            layer.weight = nn.Parameter(Weight8.of(layer.weight.detach()))
    known = fused_of(pipe).calibration
    same = Calibration(known.means, fast=known.fast, rough=known.rough)
    return seqpar.parallelize(plain, precision="fp8", calibrate={"transformer": same}, mesh=Mesh.single())


def bits_of(module: nn.Module) -> dict[str, Tensor]:
    stored = {name: x for name, x in module.named_parameters() if isinstance(x, Weight8)}
    return {
        name: torch.cat([x.e4m3.view(torch.uint8).flatten(), x.scales.view(torch.uint8)]) for name, x in stored.items()
    }


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def test_gemms_have_the_bits_of_copies_and_a_second_load_reads_nothing_twice(
    flux: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, original = list[str](), Weights.original
    monkeypatch.setattr(Weights, "original", lambda self, name: reads.append(name) or original(self, name))
    pipe = load(flux)
    got = latents(pipe)
    assert reads
    assert bits_of(pipe.transformer).keys() == {*stored_in_8_bits(pipe.transformer)}
    assert torch.equal(latents(beside(flux, pipe)), got)
    reads.clear()
    again = load(flux)
    assert torch.equal(latents(again), got)
    assert not reads

    # bf16, or fp32 here, is read again to compare with it, and 8 bits are as they were
    with computed_by(again, eight=False):
        wide = latents(again)
    plain = pipelines.quiet(type(pipe).from_pretrained(flux, torch_dtype=torch.float32))
    assert torch.equal(wide, latents(seqpar.parallelize(plain, mesh=Mesh.single())))
    assert torch.equal(latents(again), got)
    assert not torch.equal(wide, got)


def test_a_load_keeps_the_bytes_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 128}
    model = pipelines.THEIRS.FluxTransformer2DModel(
        **sizes, in_channels=16, joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(32, 32, 64)
    )
    model.to(BF16).save_pretrained(tmp_path)
    whole = sum(x.nbytes for x in model.parameters())
    alive, most, memory = 0, 0, reading._memory

    def counted(tensor: Tensor, size: int) -> Tensor:
        nonlocal alive, most
        alive += size
        most = max(most, alive)

        def gone() -> None:
            nonlocal alive
            alive -= size

        finalize(tensor, gone)
        return tensor

    def rounded_(weight: Tensor, *args: Any) -> Any:
        made = of(weight, *args)
        return counted(made, made.e4m3.nbytes + made.scales.nbytes)

    of = Weight8.of
    monkeypatch.setattr(reading, "AHEAD", 1 << 22)
    monkeypatch.setattr(reading, "_memory", lambda *args: counted(made := memory(*args), made.nbytes))
    monkeypatch.setattr(Weight8, "of", rounded_)
    fitted: Any = check_model(tmp_path, "diffusers", "FluxTransformer2DModel")
    weights, mesh = Weights.of(fitted, BF16, eight=True), Mesh.single()
    with reading.Reader(torch.device("cpu")) as reader:
        placing = weights.begin(reader, Team(), ())
        reader.start()
        empty = weights.empty(BF16)
        weights.finish(empty, placing, mesh)
    kept = sum(x.e4m3.nbytes + x.scales.nbytes if isinstance(x, Weight8) else x.nbytes for x in empty.parameters())
    assert kept <= 0.56 * whole
    assert kept <= most <= 0.65 * whole
    assert equal(
        bits_of(empty),
        {name: bits_of(holder(x))["x"] for name, x in model.named_parameters() if name in bits_of(empty)},
    )


def holder(weight: Tensor) -> nn.Module:
    module = nn.Module()
    module.x = nn.Parameter(Weight8.of(weight.detach()))
    return module


def stored(rank: int, world: int, device: torch.device, folder: str, cache: str) -> tuple[Any, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEQPAR_CACHE", cache)
        patch.setattr(calibration, "SIZES", {"height": 32, "width": 32})
        pipe = load(Path(folder), mesh=mesh_of(device, ulysses=world))
        folded = {f"{key}": matrix.folded for (_, key), matrix in fused_of(pipe)._in_8.items()}
        bits = bits_of(pipe.transformer)
        seqpar.release(pipe)
    return bits, folded


def test_all_ranks_have_the_bits_of_one(cpu_ranks: Pool, flux: Path, tmp_path: Path) -> None:
    ((bits, folded),) = cpu_ranks.run(1, stored, str(flux), str(tmp_path / "1"))
    for got in cpu_ranks.run(3, stored, str(flux), str(tmp_path / "3")):
        assert equal(got[0], bits)
        assert equal(got[1], folded)


def terms(module: nn.Module, seed: int, paths: tuple[str, ...]) -> dict[str, LoraTerm]:
    made = dict[str, LoraTerm]()
    for number, path in enumerate(paths):
        layer: Any = module.get_submodule(path)
        random = torch.Generator().manual_seed(seed + number)
        factors = (
            torch.randn(2, layer.in_features, generator=random),
            torch.randn(layer.out_features, 2, generator=random),
        )
        made[path] = LoraTerm(*factors, None, 0.3)
    return made


PATHS = ("transformer_blocks.0.attn.to_k", "single_transformer_blocks.0.proj_out", "transformer_blocks.0.norm1.linear")


@pytest.mark.parametrize("small", [True, False], ids=["from files", "from memory"])
def test_loras_are_merged_into_what_the_files_hold_and_leave_no_trace(
    flux: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if small:
        monkeypatch.setattr(originals, "_shared", lambda *_: None)
    pipe = load(flux)
    module, fresh, picture = pipe.transformer, bits_of(pipe.transformer), latents(pipe)
    loras = {name: terms(module, seed, PATHS[start:]) for name, seed, start in (("a", 0, 0), ("b", 9, 1))}
    merging = Merging(module, loras, Mesh.single())
    seen = dict[tuple[str, ...], Tensor]()
    for names in (("b",), ("a", "b"), ("a",), ("a", "b"))[: 2 if small else 4]:
        merging.switch(tuple((name, 0.8) for name in names))
        seen.setdefault(names, got := latents(pipe))
        assert torch.equal(got, seen[names])
        wanted = tuple((name, 0.8) for name in names)
        plain = beside(flux, pipe, lambda model, wanted=wanted: Merging(model, loras).switch(wanted))
        assert torch.equal(latents(plain), got), names  # also the centre's products, of these weights
    assert len({float(x.double().sum()) for x in seen.values()}) == len(seen)
    for_good = load(flux)  # as --lora merges them
    Merging(for_good.transformer, loras).switch((("a", 0.8), ("b", 0.8)))
    assert torch.equal(latents(for_good), seen["a", "b"])
    merging.switch(())
    assert equal(bits_of(module), fresh)
    assert torch.equal(latents(pipe), picture)


def held(rank: int, world: int, device: torch.device, small: bool) -> tuple[int, list[Tensor]]:
    reads, mesh = list[int](), mesh_of(device, ulysses=world)

    def source(number: int) -> Tensor:
        reads.append(number)
        return numbers(5 + number, 32, seed=number)

    like: dict[str, Tensor] = {f"{n}": torch.empty(5 + n, 32, device="meta") for n in range(5)}
    eight = like["8 bits"] = Weight8.of(numbers(7, 32, seed=7))
    sources = {f"{n}": partial(source, n) for n in range(5)} | {"8 bits": lambda: eight}
    with pytest.MonkeyPatch.context() as patch:
        if small and rank == 0:
            patch.setattr(originals.os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError("no space")))
        functions = originals.hold(like, sources, mesh)
    once, before = len(reads), eight.clone()
    eight.mul_(-3)
    got = functions["8 bits"]()
    assert all(map(torch.equal, in_memory(got), in_memory(before)))
    return once, [functions[f"{n}"]().clone() for n in range(5)]


@pytest.mark.parametrize("small", [False, True])
def test_originals_are_read_once_a_host(cpu_ranks: Pool, small: bool) -> None:
    results = cpu_ranks.run(2, held, small)
    assert sum(count for count, _ in results) == (0 if small else 5)
    for _, tensors in results:
        assert all(torch.equal(x, numbers(5 + n, 32, seed=n)) for n, x in enumerate(tensors))
    assert not [*originals.SHARED.glob("seqpar-*")]


def test_originals_arrive_while_earlier_ones_are_read() -> None:
    weights = [numbers(300 + 7 * n, 1001, seed=n) for n in range(7)]
    on_device = [weight.to(DEVICE) for weight in weights]
    places = [weight.pin_memory() if DEVICE != "cpu" else weight for weight in weights]
    sources: list[Callable[[], Tensor]] = [partial(x.view_as, x) for x in places]
    sources[4] = lambda: weights[4].to(DEVICE) * 1  # a source may compute on the device
    eight = Weight8.of(weights[5])
    sources[5], weights[5] = eight.clone, eight.wide()
    got = list[Tensor]()
    for number, original in enumerate(originals.arriving([*zip(on_device, sources, strict=True)])):
        if original.is_cuda:
            torch.cuda._sleep((number % 3) * 10_000_000)
        got.append(original.clone())
    assert [x.cpu().equal(weight) for x, weight in zip(got, weights, strict=True)] == 7 * [True]


@gpu
def test_gpu_a_refused_lock_leaves_no_error_to_the_next_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    device, memory = torch.device(DEVICE), torch.zeros(1 << 20, dtype=torch.uint8)
    for _ in range(2):  # the second time it is locked already
        originals.lock(memory, device, "of a test")
    assert capsys.readouterr().out.count("is not page-locked") == 1
    assert torch.ones(4, device=device).add(1).sum() == 8


def test_adapters_of_peft_are_merged_into_what_the_files_hold(flux: Path) -> None:
    pipe = load(flux)
    module, fresh, picture = pipe.transformer, bits_of(pipe.transformer), latents(pipe)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["to_q", "proj_mlp", "norm1.linear"], init_lora_weights=False)
    module.add_adapter(config, "a")
    got = latents(pipe)
    assert not torch.equal(got, picture)
    state = {name: x for name, x in module.state_dict().items() if "lora" in name}

    def adapted(model: Any) -> None:
        model.add_adapter(config, "a")
        model.load_state_dict(state, strict=False)
        model.fuse_lora()
        model.unload_lora()

    assert torch.equal(latents(beside(flux, pipe, adapted)), got)
    module.disable_adapters()
    assert torch.equal(latents(pipe), picture)
    module.enable_adapters()
    assert torch.equal(latents(pipe), got)
    seqpar.release(pipe)
    module.delete_adapters("a")
    assert {name.replace(".base_layer", "") for name in bits_of(module)} == fresh.keys()


def test_weights_written_in_place_lose_the_original_and_its_product(flux: Path) -> None:
    pipe = load(flux)
    before, layer = latents(pipe), pipe.transformer.transformer_blocks[0].attn.to_q
    with torch.no_grad():
        layer.weight.mul_(-3)
    after, numbers_ = latents(pipe), layer.weight.wide()
    assert not torch.equal(after, before)
    assert torch.equal(layer.weight.original(), numbers_)
    fused = fused_of(pipe)
    matrix = next(x for (block, name), x in fused._in_8.items() if name == "image qkv")
    product = matrix.weight.original() @ matrix.reads.centre_E
    torch.testing.assert_close(matrix.folded, product + matrix.bias)


def test_gemms_that_keep_their_dtype_get_their_originals(flux: Path) -> None:
    pipe = load(flux)
    module, known = pipe.transformer, fused_of(pipe).calibration
    seqpar.release(pipe)
    merging = Merging(module, {"a": terms(module, 0, PATHS)}, Mesh.single())
    rough = frozenset({"transformer_blocks.0, image qkv"})
    made = Calibration(known.means, known.products, known.fast, rough)
    seqpar.parallelize(pipe, precision="fp8", calibrate={"transformer": made}, mesh=Mesh.single())
    plain = type(module).from_pretrained(flux / "transformer", torch_dtype=torch.float32)
    attention, theirs = module.transformer_blocks[0].attn, plain.transformer_blocks[0].attn
    for part in ("to_q", "to_k", "to_v"):
        weight = getattr(attention, part).weight
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, getattr(theirs, part).weight)
    before = latents(pipe)
    assert merging.switch((("a", 0.8),))
    assert not torch.equal(latents(pipe), before)
    assert merging.switch(())
    assert torch.equal(latents(pipe), before)


@pytest.mark.parametrize("wanted", [(), (("a", 0.5),)])
def test_a_switch_that_fails_is_undone_by_the_next(flux: Path, monkeypatch: pytest.MonkeyPatch, wanted: Any) -> None:
    pipe = load(flux)
    merging = Merging(pipe.transformer, {"a": terms(pipe.transformer, 0, PATHS)}, Mesh.single())
    merging.switch(wanted)
    before = latents(pipe)
    monkeypatch.setattr(Weight8, "came_from", fails)
    with pytest.raises(OSError, match="no memory"):
        merging.switch((("a", 1.0),))
    monkeypatch.undo()
    assert not torch.equal(latents(pipe), before)
    assert merging.switch(wanted)
    assert torch.equal(latents(pipe), before)


def fails(*_: object) -> None:
    raise OSError("no memory")


def test_files_that_have_changed_are_no_originals(flux: Path, tmp_path: Path) -> None:
    shutil.copytree(flux, tmp_path / "flux")
    pipe = load(tmp_path / "flux")
    (file,) = (tmp_path / "flux" / "transformer").glob("*.safetensors")
    file.write_bytes(file.read_bytes())
    loras = {"a": terms(pipe.transformer, 0, PATHS)}
    assert "changed while it was read" in raised(lambda: Merging(pipe.transformer, loras, Mesh.single()))


PAGE = Path(__file__).parents[2] / "docs" / "precision.md"
PARKED = "Wan 2.2 14B with [`--park`](models/wan.md#parked-weights)"
MODELS_OF_PAGE = {
    "FLUX.1-dev": ("FluxTransformer2DModel", {"num_layers": 19, "num_single_layers": 38}, {"guidance_embeds": True}, 1),
    "Qwen-Image": ("QwenImageTransformer2DModel", {"num_layers": 60}, {}, 1),
    "Wan 2.1 14B": ("WanTransformer3DModel", {"num_layers": 40}, {}, 1),
    "Wan 2.2 14B": ("WanTransformer3DModel", {"num_layers": 40}, {}, 2),
    PARKED: ("WanTransformer3DModel", {"num_layers": 40}, {}, 1),
    "FLUX.2-dev": ("Flux2Transformer2DModel", {"num_layers": 8, "num_single_layers": 48}, {}, 1),
    "MiniMax-H3": ("MiniMaxH3Transformer3DModel", {"num_layers": 50}, {}, 1),
}
"""Class, blocks, config, and how many of it a GPU has."""
FITS_32 = {("Wan 2.2 14B", "fp8"): 4, (PARKED, "bf16"): 2}
"""On so many GPUs these rows need GPUs of 32 GB alone, as the page says below the table."""


@pytest.mark.parametrize("name", MODELS_OF_PAGE)
def test_the_page_counts_these_weights(name: str) -> None:
    kind, blocks, config, copies = MODELS_OF_PAGE[name]

    def count(**layers: int) -> Tensor:
        with torch.device("meta"), WithoutValues():
            model = getattr(pipelines.THEIRS, kind)(**config, **layers)
        stored_ = sum(model.get_parameter(key).numel() for key in stored_in_8_bits(model))
        return torch.tensor([sum(x.numel() for x in model.parameters()), stored_], dtype=torch.float64)

    one = dict.fromkeys(blocks, 1)
    every, stored_ = (
        count(**one) + sum((n - 1) * (count(**{**one, key: 2}) - count(**one)) for key, n in blocks.items())
    ).tolist()
    rows = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name}, "))
    (row,) = (line for line in rows if " + " in line.split("|")[2])
    _, _, bf16, fits, fp8, fits8, _ = (cell.strip() for cell in row.split("|"))
    for text, weights, card in ((bf16, 2 * every, fits), (fp8, 2 * every - stored_, fits8)):
        held_, more = map(float, text.split(" + "))
        assert held_ == pytest.approx(copies * weights / 2**30, abs=0.06)
        for gpus in (1, 2, 4):
            fits_in = next(size for size in (24, 32, 48, 80) if held_ + more / gpus <= 0.95 * size)
            smaller = gpus >= FITS_32.get((name, "bf16" if text is bf16 else "fp8"), 5)
            assert fits_in == (32 if smaller else int(card))


# A folder in 8 bits ---------------------------------------------------------------------------------------------


def test_a_folder_in_8_bits_has_the_bits_of_a_load(flux: Path, tmp_path: Path, capfd: Any) -> None:
    target = tmp_path / "eight"
    command(["convert", str(flux), str(target), "--precision", "fp8"])
    assert "written" in capfd.readouterr().out

    def bf16(folder: Path, **options: Any) -> Any:
        return pipelines.quiet(seqpar.load(folder, dtype=BF16, mesh=Mesh.single(), **options))

    whole, eight = bf16(flux, precision="fp8"), bf16(target, precision="fp8")
    assert equal(bits_of(eight.transformer), bits_of(whole.transformer))
    assert all(weight.source is None for weight in eight.transformer.parameters() if isinstance(weight, Weight8))
    assert latents(eight).isfinite().all()
    wide = bf16(target)  # without precision the numbers for which the 8 bits stand
    for name, weight in wide.transformer.named_parameters():
        assert type(weight) is nn.Parameter
        assert torch.equal(weight, eight.transformer.get_parameter(name).detach() + 0)

    # LoRAs are added to these numbers, and leave no trace
    fresh, loras = bits_of(eight.transformer), {"a": terms(eight.transformer, 0, PATHS)}
    merging = Merging(eight.transformer, loras, Mesh.single())
    merging.switch((("a", 1.0),))
    assert not equal(bits_of(eight.transformer), fresh)
    merging.switch(())
    assert equal(bits_of(eight.transformer), fresh)

    # diffusers would leave the scales out
    kind = type(eight.transformer)
    assert "seqpar-e4m3" in raised(lambda: kind.from_pretrained(target / "transformer"))
    for options, says in (
        ((str(target),), "is in 8 bits already"),
        ((str(flux), "--dtype", "fp16"), "leave --dtype out"),
    ):
        source, *more = options
        words = ["convert", source, str(tmp_path / "other"), "--precision", "fp8", *more]
        assert says in raised(lambda: command(words))  # noqa: B023
    assert not [*tmp_path.glob("other*")]


@pytest.mark.parametrize("fault", ["a scale is missing", "a scale of another shape"])
def test_scales_that_fit_no_weight_are_refused(flux: Path, tmp_path: Path, fault: str) -> None:
    target = tmp_path / "eight"
    convert(flux, target, precision="fp8")
    (file,) = (target / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("_scale"))
    scale = tensors.pop(key)
    if fault == "a scale of another shape":
        tensors[key] = scale.flatten().clone()
    save_file(tensors, file)
    says = "is in e4m3 without" if fault == "a scale is missing" else "fits no weight in e4m3"
    assert says in raised(lambda: load(target))
