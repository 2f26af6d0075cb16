"""Tests of `seqpar.load`: a host reads each file once, and the text encoders are on rank 0 alone."""

from __future__ import annotations

import ctypes
import gc
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

import seqpar
from seqpar.loading import encoders as encoder_files
from seqpar.loading.encoders import begin_encoder, begin_encoders, open_encoder
from seqpar.loading.folder import check_model, parts_of_folder
from seqpar.loading.pipeline import Weights, load_pipeline
from seqpar.loading.placing import Placing
from seqpar.loading.reading import Reader, _Requests
from seqpar.loading.shared_encoder import EncoderResult, SharedEncoder, outputs_of, restored
from seqpar.mesh.mesh import Mesh
from seqpar.mesh.watch import LostRankError
from seqpar.pipelines.load import checked
from tests.support import pipelines
from tests.support.meshes import mesh as mesh_of
from tests.support.pool import Pool

pytestmark = pytest.mark.slow

# rows of two matrices of the encoder, 36 MB each: what malloc keeps no memory for once they are gone
HUGE = 9 << 15
THEIRS: Any = diffusers
ENCODERS: Any = transformers  # pyright does not see what they import lazily
Counts = dict[str, int]
ASKED = {"num_inference_steps": 2, "height": 32, "width": 32, "use_resolution_binning": False}
ASKED |= {"max_sequence_length": 16, "clean_caption": False, "output_type": "np"}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    pipelines.flux().to(torch.float32).save_pretrained(folder)
    return folder


def count(patch: pytest.MonkeyPatch) -> Counts:
    """Return bytes of weights by part that this process reads from now on, by our readers or by the libraries'."""
    counts = Counter[str]()

    def counted(owner: Any, name: str, read: Callable[..., tuple[Path, int]]) -> None:
        own = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            path, size = read(*args)
            counts[path.parent.name] += size
            return own(*args, **kwargs)

        patch.setattr(owner, name, called)

    counted(_Requests, "_submit", lambda own, key, tensor: (own._checkpoint.positions[key].path, tensor.nbytes))
    counted(_Requests, "_read_into", lambda own, room, key: (own._checkpoint.positions[key].path, len(room)))
    for owner, name in ((safetensors.torch, "load_file"), (ENCODERS.modeling_utils, "safe_open")):
        counted(owner, name, lambda path, *_: (Path(path), Path(path).stat().st_size))
    return counts


def peak() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 if match else 0


def loaded(rank: int, world: int, device: torch.device, folder: str, old: bool) -> tuple[Any, ...]:
    """Return the bytes read by part, the encoder's numbers, the peak of this rank's memory, and a picture."""
    mesh = mesh_of(device, ulysses=world)
    gc.collect()  # an earlier pipeline's memory, which is in cycles, would be used again
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    begun = peak()
    with pytest.MonkeyPatch.context() as patch:
        counts = count(patch)
        if old:
            pipe: Any = THEIRS.PixArtAlphaPipeline.from_pretrained(folder, torch_dtype=torch.float32)
            seqpar.parallelize(pipe.to(device), mesh)
        else:
            pipe = seqpar.load(folder, dtype=torch.float32, mesh=mesh)
    held = sum(x.numel() for x in pipe.text_encoder.parameters())
    pipelines.quiet(pipe)
    picture = pipe("a red cat", generator=pipelines.seeded(0), **ASKED).images[0]
    assert pipe.text_encoder.dtype == torch.float32
    assert pipe.text_encoder.device == device
    assert pipe.text_encoder.config.d_model == pipelines.WIDTH
    seqpar.release(pipe)
    return dict(counts), held, peak() - begun, picture


@pytest.fixture(scope="module")
def pixart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, pipe = tmp_path_factory.mktemp("pixart"), pipelines.pixart()
    sizes = {"d_model": pipelines.WIDTH, "d_kv": 8, "d_ff": HUGE, "num_layers": 1, "num_heads": 4}
    with torch.device("meta"):
        encoder = ENCODERS.T5EncoderModel(ENCODERS.T5Config(vocab_size=14, **sizes)).to_empty(device="cpu")
    for weight in encoder.parameters():
        torch.nn.init.constant_(weight, 0.01)
    pipe.text_encoder = encoder
    pipe.to(torch.float32).save_pretrained(folder)
    return folder


def test_a_host_reads_each_file_once_and_rank_0_alone_holds_the_encoder(ranks: Pool, pixart: Path) -> None:
    """Negative control: from_pretrained on every rank reads all files twice, and gives the same picture."""
    files = {path.parent.name: path for path in pixart.rglob("*.safetensors")}
    sizes = {part: path.stat().st_size for part, path in files.items()}
    headers = {part: 8 + int.from_bytes(path.read_bytes()[:8], "little") for part, path in files.items()}
    # first the old way, so that what both import is there before
    old, shared = (ranks.run(2, loaded, str(pixart), each) for each in (True, False))

    def read(results: list[Any]) -> Counts:
        return {part: sum(counts.get(part, 0) for counts, *_ in results) for part in sizes}

    ours = {part: sizes[part] - headers[part] for part in sizes}
    assert read(shared) == ours
    assert read(old) == {part: 2 * size for part, size in sizes.items()}
    # rank 0 reads the encoder, which is larger than all else
    assert [counts.get("transformer", 0) for counts, *_ in shared] == [0, ours["transformer"]]
    encoder = sizes["text_encoder"]
    (_, held, _, picture), (_, none, little, other) = shared
    assert (4 * held > 0.9 * encoder, none) == (True, 0)
    assert [4 * held > 0.9 * encoder for _, held, _, _ in old] == [True, True]
    # no lower bound for the ranks that hold it: an allocator may give them memory that it kept
    if ranks.device == "cpu":  # the first kernels of a GPU's libraries take more memory of the host than the encoder
        assert 2 * little < encoder, (little, encoder)
    for each in (other, old[0][3], old[1][3]):
        assert np.array_equal(picture, each)


def bytes_read(rank: int, world: int, device: torch.device, folder: str) -> Counts:
    with pytest.MonkeyPatch.context() as patch:
        counts = count(patch)
        seqpar.release(seqpar.load(folder, mesh=mesh_of(device, ulysses=world)))
    return counts


def test_ranks_read_about_as_many_bytes_each(ranks: Pool, flux: Path) -> None:
    """Rank 0 reads the encoders, which are small here, and less of the transformer."""
    mine, others = ranks.run(2, bytes_read, str(flux))
    assert 0 < mine["transformer"] < others["transformer"]
    assert others.keys() == {"transformer", "vae"}
    assert sum(mine.values()) == pytest.approx(sum(others.values()), rel=0.2)


def test_a_pipeline_is_made_of_models_with_their_weights(flux: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some constructors convert a VAE or copy layers of a transformer."""
    kind, whole = THEIRS.FluxPipeline, dict[str, bool]()
    construct = kind.__init__

    @wraps(construct)
    def constructed(self: Any, **parts: Any) -> None:
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                whole[name] = all(x.numel() and not x.is_meta for x in part.parameters())
        construct(self, **parts)

    monkeypatch.setattr(kind, "__init__", constructed)
    seqpar.release(seqpar.load(flux, mesh=Mesh.single()))
    assert whole == dict.fromkeys(("transformer", "vae", "text_encoder", "text_encoder_2"), True)


def encoded_first(rank: int, world: int, device: torch.device, folder: str, first: bool) -> tuple[Any, ...]:
    """Return how many encoders were whole while a transformer was placed, how many are so now, and two pictures."""
    mesh, whole = mesh_of(device, ulysses=world), list[int]()
    gc.collect()
    gc.freeze()  # older objects need not be looked through each time

    def call(pipe: Any, prompt: str = "a red cat") -> Any:
        return pipe(prompt, generator=pipelines.seeded(0), **ASKED).images[0]

    def encoders() -> int:
        gc.collect()
        return int(any(isinstance(each, torch.Tensor) and each.numel() > HUGE for each in gc.get_objects()))

    def placed(self: Weights, model: Any, placing: Placing, mesh: Mesh) -> None:
        whole.append(encoders())
        end(self, model, placing, mesh)

    end, (parts, _) = Weights.finish, checked(folder, torch.float32, ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "finish", placed)
        pipe = load_pipeline(parts, parts.kind, torch.float32, mesh, encode=(call,) if first else ())
    pipelines.quiet(pipe)
    seqpar.parallelize(pipe, mesh)
    pictures = [call(pipe), call(pipe)]
    if first:
        assert pipe.text_encoder.dtype == torch.float32
        with pytest.raises(ValueError, match="with another text than at first, expected the same texts"):
            call(pipe, "a blue dog")
        with pytest.raises(ValueError, match=r"reads text_encoder\.shared, which was freed"):
            print(pipe.text_encoder.shared)
    seqpar.release(pipe)
    return whole, encoders(), pictures


@pytest.mark.parametrize("world", [1, 2])
def test_encoders_have_gone_before_a_transformer_is_placed(ranks: Pool, pixart: Path, world: int) -> None:
    """The VAE, which a pipeline may need for its inputs, is placed before. Negative control: without `encode`."""
    first, kept = (ranks.run(world, encoded_first, str(pixart), each) for each in (True, False))
    assert first[0][:2] == ([1, 0], 0)
    assert kept[0][:2] == ([1, 1], 1)
    for (*_, mine), (*_, others) in zip(first, kept, strict=True):
        assert all(np.array_equal(mine[0], each) for each in (*mine, *others))


def shared_encoders(folder: Path, dtype: torch.dtype, mesh: Mesh) -> dict[str, SharedEncoder]:
    with Reader(mesh.device) as reader:
        fitted: Any = {name: check_model(folder / name, *part) for name, part in INDEX.items()}
        finish, _ = begin_encoders(fitted, dtype, mesh, reader, "got")
        reader.start()
        assert finish is not None
        return finish()


def test_results_are_given_again_as_they_were(encoders: Path) -> None:
    """A pipeline may change what it was given, and use several texts in another order."""
    shared = shared_encoders(encoders, torch.float64, Mesh.single())["text_encoder"]
    shared.keep()
    tokens, others, results = torch.tensor([[2, 3, 13]]), torch.tensor([[4, 3, 13]]), list[Any]()
    for _ in range(3):
        results.append(shared.module(tokens).text_embeds.clone())
        expected = shared.module(others).text_embeds.clone()
        shared.module(others).text_embeds.zero_()
        shared.module(tokens).text_embeds.zero_()
        if len(results) == 1:
            shared.end()
            with pytest.raises(ValueError, match=r"text_encoder\.forward with another text"):
                shared.module(tokens + 1)
            assert torch.equal(shared.module(others).text_embeds, expected)
    assert results[0].any()
    assert all(torch.equal(each, results[0]) for each in results)


def refused(rank: int, world: int, device: torch.device, folder: str, dtype: torch.dtype, grown: str | None) -> str:
    """Return the error of `seqpar.load`. grown: the part whose file gets another byte when it has been read."""

    def grow(read: Any, part_of: Callable[..., object]) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = read(*args, **kwargs)
            if grown is not None and Path(str(part_of(*args))).name == grown:
                with open(next(Path(folder, grown).glob("*.safetensors")), "ab") as file:
                    file.write(b"x")
            return result

        return called

    kind, left = THEIRS.FluxPipeline, grow(_Requests.__exit__, lambda own, *_: Path(own._checkpoint.name).parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Requests, "__exit__", left)
        patch.setattr(encoder_files, "_complete", grow(encoder_files._complete, lambda kind, path, *_: path))
        if any(Path(folder).glob("*/beside.py")):
            patch.setattr(kind, "from_pretrained", grow(kind.from_pretrained, lambda *_: grown))
        with pytest.raises(ValueError, match=folder) as error:
            seqpar.load(folder, dtype=dtype, mesh=mesh_of(device, ulysses=world))
    return str(error.value)


@pytest.mark.parametrize(
    ("world", "part", "ways"),
    [
        (2, "transformer", (0, 2)),
        (1, "vae", (1,)),
        (2, "vae", (2,)),
        (2, "text_encoder", (0, 1, 2)),
        (1, "text_encoder_2", (0, 1)),
    ],
)
def test_weights_that_change_or_are_not_finite_are_refused_on_all_ranks(
    ranks: Pool, flux: Path, tmp_path: Path, world: int, part: str, ways: tuple[int, ...]
) -> None:
    """Read by ranks together; encoders in another dtype by transformers; what has a program beside it by diffusers."""
    shutil.copytree(flux, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / part).glob("*.safetensors")
    every_way = (torch.float32, False), (torch.bfloat16, False), (torch.float32, True)
    for dtype, beside in [every_way[index] for index in ways]:
        if beside:
            (tmp_path / part / "beside.py").touch()
        before = file.read_bytes()
        one, *others = ranks.run(world, refused, str(tmp_path), dtype, part)
        assert f"{file} changed while it was read; load it again" in one
        file.write_bytes(before)
        state = safetensors.torch.load(before)
        state[max(state)] = torch.full_like(state[max(state)], torch.nan)
        safetensors.torch.save_file(state, file, {"format": "pt"})
        finite, *same = ranks.run(world, refused, str(tmp_path), dtype, None)
        assert f"got NaN or infinity in {max(state)}, expected finite weights" in finite
        assert str(file.parent if beside else file) in finite
        assert all(each == one for each in others)
        assert all(each == finite for each in same)
        file.write_bytes(before)


@pytest.mark.parametrize("fp32_state", [True, False])
def test_a_state_in_fp32_is_asked_for(flux: Path, fp32_state: bool) -> None:
    pipe = pipelines.quiet(seqpar.load(flux, dtype=torch.bfloat16, mesh=Mesh.single(), fp32_state=fp32_state))
    sizes = {"height": 16, "width": 16, "num_inference_steps": 2, "max_sequence_length": 16}
    latents = pipe("a red cat", **sizes, output_type="latent").images
    assert latents.dtype == (torch.float32 if fp32_state else torch.bfloat16)
    assert pipe("a red cat", **sizes).images[0].size == (16, 16)  # the decoder takes both
    seqpar.release(pipe)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", {"dtype": torch.int8}, r"got dtype=torch\.int8, expected torch\.float64, .*; for 8 bits use precision="),
        ("", {"local": "fp8"}, r"'fp8', which does not work here: takes head dims that 16 divides, not 8"),
        ("", {"precision": "fp4"}, "got precision='fp4', expected one of fp8, or None"),
        ("", {"precision": "fp8"}, r'precision="fp8" cannot be used: PixArtTransformer2DModel has no blocks that comp'),
        ("", {"cache": "dbcach"}, "got step cache 'dbcach', expected dbcache or taylorseer, as in dbcache:threshold="),
        ("", {"cache": "dbcache:back=9"}, "and 9 at the back in every step, which leaves none of the 2 blocks"),
        ("", {"loras": ["a.safetensors"]}, "is not supported: diffusers' PixArtAlphaPipeline loads no LoRA"),
        ("", {"strategy": "rings"}, "got strategy 'rings', expected one of"),
        ("", {"vae": "strips"}, "got vae='strips', expected 'auto', 'tiled', True or False"),
        ("vae", {}, r"vae.model_index\.json"),
        ("dit-s/2", {}, "got dit-s/2, a model with random weights, expected a diffusers pipeline's folder or hub id"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence(
    pixart: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any, message: str
) -> None:
    """And no weight is read before."""
    monkeypatch.delattr("seqpar.pipelines.load.load_pipeline")
    with pytest.raises(ValueError, match=message):
        seqpar.load(name if name == "dit-s/2" else pixart / name, **options)


INDEX = {
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "LlamaForCausalLM"],
}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = ENCODERS.LlamaForCausalLM(ENCODERS.LlamaConfig(vocab_size=14, **sizes))
    pipelines.clip(2, True).save_pretrained(folder / "text_encoder")
    pipelines.random_weights(llama, 3).save_pretrained(folder / "text_encoder_2")
    return folder


def same(one: Any, other: Any) -> None:
    """Fail if two results differ in their classes, in the names of their fields or in their numbers."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):  # the last bit of a product on a CPU depends on where in memory a weight begins
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
    elif isinstance(one, tuple | dict):
        pairs = (dict(enumerate(each)) if isinstance(each, tuple) else each for each in (one, other))
        for (mine, x), (theirs, y) in zip(*(pair.items() for pair in pairs), strict=True):
            assert mine == theirs
            same(x, y)


def compared(rank: int, world: int, device: torch.device, folder: str) -> list[str]:
    """Compare every rank's results with those of an encoder of its own for rank 0's prompt; return errors."""
    mesh, path, dtype = Mesh.joined(device), Path(folder), torch.float64
    loaded = shared_encoders(path, dtype, mesh)
    shared = {name: each.module for name, each in loaded.items()}
    rank_0s = torch.tensor([[2, 3, 13], [4, 13, 0]])
    ids = rank_0s if mesh.is_main else torch.tensor([[5, 13]])
    for name, (_, kind) in INDEX.items():
        encoder: Any = shared[name]
        theirs = getattr(ENCODERS, kind).from_pretrained(path / name, dtype=dtype).to(device)
        assert isinstance(encoder, type(theirs))
        assert (encoder.dtype, encoder.device, encoder.training) == (theirs.dtype, theirs.device, theirs.training)
        assert encoder.config.hidden_size == theirs.config.hidden_size
        assert mesh.is_main or not sum(x.numel() for x in encoder.parameters())
        options: Any = {"use_cache": False} if kind.startswith("Llama") else {}
        for more in ({"output_hidden_states": True}, {"return_dict": False}):
            with torch.no_grad():
                same(encoder(ids.to(device), **more, **options), theirs(rank_0s.to(device), **more, **options))
    encoder: Any = shared["text_encoder_2"]
    theirs = ENCODERS.LlamaForCausalLM.from_pretrained(path / "text_encoder_2", dtype=dtype).to(device)
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    same(encoder.generate(ids.to(device), **options), theirs.generate(rank_0s.to(device), **options))
    assert encoder(ids.to(device)).past_key_values is None  # stays with rank 0
    inner = {"output_hidden_states": True, "use_cache": False}  # of the encoder without its head
    same(encoder.model(ids.to(device), **inner), theirs.model(rank_0s.to(device), **inner))
    with pytest.raises(ValueError, match="rank 0: got a text_encoder_2 that fails on a prompt") as failed:
        encoder(torch.tensor([[0.5]], device=device))  # a GPU would not raise an error for a number above all tokens
    with pytest.raises(ValueError, match="do different things") as apart:
        print(encoder(ids) if mesh.is_main else encoder.lm_head)
    loaded["text_encoder_2"].meets = False  # as in a pipeline's constructor, whose error all ranks share
    with pytest.raises(ValueError, match=r"reads text_encoder_2\.model\.layers, which only rank 0 has"):
        mesh.on_all_ranks(lambda: None if mesh.is_main else encoder.model.layers)
    assert not hasattr(encoder, "adapter")
    return [str(failed.value), str(apart.value)]


@pytest.mark.parametrize("world", [2, 3])
def test_stubs_return_what_rank_0_computes_and_fail_as_it_does(ranks: Pool, encoders: Path, world: int) -> None:
    one, *others = ranks.run(world, compared, str(encoders))
    assert "rank 0 calls text_encoder_2.forward, rank 1 reads text_encoder_2.lm_head, which only rank 0 has" in one[1]
    assert all(other == one for other in others)


def test_an_output_of_an_unknown_class_or_field_is_refused() -> None:
    known = outputs_of(ENCODERS.T5EncoderModel)
    assert restored(EncoderResult(output="BaseModelOutput", fields={}), known, iter(())).last_hidden_state is None
    for name, field in (("Popen", "args"), ("BaseModelOutput", "args")):
        with pytest.raises(LostRankError, match=f"got an output {name} of rank 0"):
            restored(EncoderResult(output=name, fields={field: EncoderResult()}), known, iter(()))


def made_encoder(kind: str, dtype: torch.dtype) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 14}
    torch.manual_seed(3)
    if kind == "T5EncoderModel":  # its embedding has two names, and in fp16 a product stays in fp32
        t5 = ENCODERS.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=14)
        return ENCODERS.T5EncoderModel(t5).to(dtype)
    if kind == "LlamaForCausalLM":
        model = ENCODERS.LlamaForCausalLM(ENCODERS.LlamaConfig(intermediate_size=16, **sizes)).to(dtype)
        model.generation_config.max_new_tokens = 7
        return model
    if kind == "Qwen2_5_VLForConditionalGeneration":  # its files name weights in another way than its modules
        rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
        text = {**sizes, "intermediate_size": 16, "num_key_value_heads": 1, "rope_scaling": rope}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
        return ENCODERS.Qwen2_5_VLForConditionalGeneration(
            ENCODERS.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        ).to(dtype)
    return pipelines.clip(2, True).to(dtype)


def read_encoder(kind: Any, folder: Path, dtype: torch.dtype) -> tuple[Any, int]:
    with Reader(torch.device("cpu")) as reader:
        end, size = begin_encoder(kind, folder, open_encoder(folder), dtype, reader)
        reader.start()
        return end(), size


@pytest.mark.parametrize("shards", ["1KB", "1GB"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("T5EncoderModel", torch.float16),
        ("LlamaForCausalLM", torch.bfloat16),
        ("Qwen2_5_VLForConditionalGeneration", torch.bfloat16),
        ("CLIPTextModelWithProjection", torch.float32),
    ],
)
def test_encoders_are_those_that_transformers_loads(tmp_path: Path, kind: str, dtype: torch.dtype, shards: str) -> None:
    made_encoder(kind, dtype).save_pretrained(tmp_path, max_shard_size=shards)
    theirs = getattr(ENCODERS, kind).from_pretrained(tmp_path, dtype=dtype)
    ours, size = read_encoder(type(theirs), tmp_path, dtype)
    files = [path.read_bytes() for path in tmp_path.glob("*.safetensors")]
    assert size == sum(len(file) - 8 - int.from_bytes(file[:8], "little") for file in files)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert ours.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(ours.state_dict()[name], tensor)
    assert len({x.data_ptr() for x in ours.parameters()}) == len({x.data_ptr() for x in theirs.parameters()})
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert (ours.name_or_path, ours.dtype, ours.training) == (theirs.name_or_path, theirs.dtype, theirs.training)
    assert not theirs.can_generate() or ours.generation_config == theirs.generation_config


def test_files_of_encoders_that_are_not_safetensors_are_left_to_transformers(tmp_path: Path) -> None:
    encoder = made_encoder("T5EncoderModel", torch.float32)
    encoder.config.save_pretrained(tmp_path)
    torch.save(encoder.state_dict(), tmp_path / "pytorch_model.bin")
    read, size = read_encoder(type(encoder), tmp_path, torch.float32)
    assert size == 0
    assert all(map(torch.equal, read.parameters(), encoder.parameters()))


def test_a_setting_with_numbers_is_no_part(tmp_path: Path) -> None:
    """Krea 2's index names layers of its text encoder beside its parts."""
    krea = pipelines.krea2()
    krea.register_to_config(text_encoder_select_layers=[2, 5])
    krea.save_pretrained(tmp_path / "krea2")
    assert parts_of_folder(tmp_path / "krea2").index["text_encoder_select_layers"] == [2, 5]
