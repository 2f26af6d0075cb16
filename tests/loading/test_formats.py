"""Tests that every published format loads and reproduces the arithmetic of its publisher in fp64."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor, nn

from seqpar import DistributedDiT
from seqpar.loading.checkpoint import open_checkpoint
from seqpar.loading.layout import layout_of
from seqpar.loading.vae import check_vae, load_vae
from seqpar.loop.models import dit as dit_module
from seqpar.loop.models import large_dit
from seqpar.mesh.mesh import Mesh
from seqpar.pipelines import classes as class_labels
from seqpar.pipelines.unidiffuser_parts import Parts
from tests.loop.models.test_large_dit import TINY, VARIANTS, inputs, plain
from tests.support.meshes import random
from tests.support.published import original_decoder, rank_parts, save_consolidated, save_pdparams, save_pipeline_index
from tests.support.tiny import diffusers_dit, original_state_dict, with_original_arithmetic

CLOSE = 1e-11
HEADS = 4  # of a width of 24: neither 64 nor 72 wide
TRAINED = Namespace(
    model="DiT-of-ours", image_size=64, num_classes=10, lr=1e-4, vae="ema", resume=None, results_dir=Path("results")
)


def dit() -> nn.Module:
    """Return diffusers' DiT with a number of heads that its width does not tell."""
    return diffusers_dit(num_attention_heads=HEADS, attention_head_dim=6)


def wrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{key}": tensor for key, tensor in state.items()}


# what facebookresearch/DiT and its train.py write: the file's content for the weights to be read and other weights
DIT_FILES: dict[str, Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "released": lambda state, other: state,
    "ema": lambda state, other: {"ema": state},
    "model": lambda state, other: {"model": state},
    "wrapped": lambda state, other: wrapped(state),
    "train.py": lambda state, other: {
        "model": wrapped(other),
        "ema": state,
        "opt": {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]},
        "args": TRAINED,
    },
}


def prediction(model: nn.Module, size: int = 8) -> Tensor:
    """Return a prediction of two rows with different timesteps and labels."""
    x = random((2, 4, size, size), 1)
    return model(x, timestep=torch.tensor([960, 3]), class_labels=torch.tensor([2, 10])).sample


def loaded(path: Path, heads: int | None = None) -> DistributedDiT:
    return DistributedDiT.from_pretrained(path, Mesh.single(), torch.float64, heads=heads)


@pytest.mark.parametrize("kind", DIT_FILES)
def test_every_file_of_the_original_dit_reproduces_its_arithmetic(tmp_path: Path, kind: str) -> None:
    theirs = with_original_arithmetic(dit())
    state = original_state_dict(theirs)
    torch.save(DIT_FILES[kind](state, {key: tensor + 1 for key, tensor in state.items()}), tmp_path / "dit.pt")
    truth = prediction(theirs)
    assert (prediction(loaded(tmp_path / "dit.pt", HEADS)) - truth).abs().max() < CLOSE
    # negative control: as many heads as the width alone suggested once
    assert (prediction(loaded(tmp_path / "dit.pt", 3)) - truth).abs().max() > 1e-3


def test_arguments_in_a_dict_say_the_heads_and_the_size(tmp_path: Path) -> None:
    state = original_state_dict(with_original_arithmetic(dit()))
    torch.save({"ema": state, "args": {"num_heads": HEADS, "results_dir": Path("results")}}, tmp_path / "dit.pt")
    assert loaded(tmp_path / "dit.pt").config.num_attention_heads == HEADS
    torch.save({"ema": state, "args": {"num_heads": HEADS, "image_size": 512}}, tmp_path / "dit.pt")
    with pytest.raises(ValueError, match="say image_size=512, but whose tensors have 64"):
        loaded(tmp_path / "dit.pt")


def test_a_model_that_args_name_has_its_own_heads_and_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """train.py builds what args.model says; other arguments beside it, or tensors of another patch, contradict it."""
    monkeypatch.setitem(dit_module.PRESETS, "dit-tiny/2", dit_module.Config(HEADS, 6, 3))
    state, args = original_state_dict(dit()), {"model": "DiT-tiny/2"}
    torch.save({"ema": state, "args": Namespace(**args, num_heads=HEADS)}, tmp_path / "dit.pt")
    assert loaded(tmp_path / "dit.pt", HEADS).config.num_attention_heads == HEADS
    with pytest.raises(ValueError, match=r"got a DiT with --heads 3, expected the 4 heads of args\.model, DiT-tiny/2"):
        loaded(tmp_path / "dit.pt", 3)
    torch.save({"ema": state, "args": Namespace(**args, num_heads=3)}, tmp_path / "dit.pt")
    with pytest.raises(ValueError, match=r"got a DiT with args.num_heads 3, expected the 4 heads of args\.model"):
        loaded(tmp_path / "dit.pt")
    monkeypatch.setitem(dit_module.PRESETS, "dit-tiny/2", dit_module.Config(HEADS, 6, 3, patch_size=4))
    with pytest.raises(ValueError, match="say patch_size=4, but whose tensors have 2"):
        loaded(tmp_path / "dit.pt")


def averaged(table: Tensor) -> Tensor:
    """Return what train.py's moving average makes of a parameter that never changes: its rounding in fp32 adds up."""
    average = table.float().clone()
    for _ in range(1000):
        average.mul_(0.9999).add_(table.float(), alpha=1 - 0.9999)
    return average


TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "averaged": averaged,
    "rounded": lambda table: table.bfloat16(),
    "learned": lambda table: random(tuple(table.shape), 5),
}


def with_table(table: str) -> tuple[Any, Tensor]:
    """Return the original DiT with another table of positions, and the one that it had."""
    theirs: Any = with_original_arithmetic(dit())
    computed = theirs.pos_embed.pos_embed.clone()
    theirs.pos_embed.pos_embed = TABLES[table](computed).double()
    return theirs, computed


@pytest.mark.parametrize("table", TABLES)
def test_the_positions_of_an_original_file_are_the_models(tmp_path: Path, table: str) -> None:
    """Only a learned table has no positions for other sizes."""
    theirs, computed = with_table(table)
    state = original_state_dict(theirs)
    torch.save(state, tmp_path / "dit.pt")
    truth, ours = prediction(theirs), loaded(tmp_path / "dit.pt", HEADS)
    assert (prediction(ours) - truth).abs().max() < CLOSE
    torch.save(state | {"pos_embed": computed}, tmp_path / "computed.pt")
    plain_one = loaded(tmp_path / "computed.pt", HEADS)
    assert (prediction(plain_one) - truth).abs().max() > 1e5 * CLOSE  # negative control
    assert [name for name, _ in plain_one.model.named_parameters() if "pos" in name] == []
    if table != "learned":
        assert torch.equal(ours.model.positions(12, 12), plain_one.model.positions(12, 12))
        return
    with pytest.raises(ValueError, match=r"got a latent of 12 x 12 .* expected 8 x 8, the only size that its pos_emb"):
        prediction(ours, 12)


def test_a_learned_table_is_refused_at_another_size_before_weights_load(tmp_path: Path) -> None:
    torch.save(original_state_dict(with_table("learned")[0]), tmp_path / "dit.pt")
    files = class_labels.Files.locate(tmp_path / "dit.pt", HEADS)
    assert files.latent_size((64, 64)) == files.latent_size(None) == (8, 8)
    with pytest.raises(ValueError, match=r"got a latent of 8 x 12 .* expected 8 x 8"):
        files.latent_size((64, 96))


def test_an_original_safetensors_file_is_the_same(tmp_path: Path) -> None:
    theirs = with_original_arithmetic(dit())
    save_file(original_state_dict(theirs), tmp_path / "dit.safetensors")
    assert (prediction(loaded(tmp_path / "dit.safetensors", HEADS)) - prediction(theirs)).abs().max() < CLOSE


class NormOfRanks(nn.Module):
    """LayerNorm as N model-parallel ranks compute it: each normalises its own heads with its own weights."""

    def __init__(self, parts: list[dict[str, Tensor]], key: str) -> None:
        super().__init__()
        self.norms = [(part[f"{key}.weight"], part[f"{key}.bias"]) for part in parts]

    def forward(self, x: Tensor) -> Tensor:
        pieces = zip(x.chunk(len(self.norms), -1), self.norms, strict=True)
        return torch.cat([F.layer_norm(piece, piece.shape[-1:], *norm) for piece, norm in pieces], -1)


def of_ranks(config: large_dit.Config, ranks: int) -> nn.Module:
    """Return the plain Large-DiT with the arithmetic of so many model-parallel ranks."""
    model: Any = plain(config)
    parts = rank_parts(model.state_dict(), ranks)
    for index, layer in enumerate(model.layers if config.qk_norm else ()):
        for name in ("q_norm", "k_norm"):
            setattr(layer.attention, name, NormOfRanks(parts, f"layers.{index}.attention.{name}"))
    return model


@pytest.mark.parametrize("variant", ["released", "no qk norm", "grouped"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_any_number_of_ranks_merge(tmp_path: Path, ranks: int, variant: str) -> None:
    """The averaged weights are read, and a single file stands for all."""
    config = VARIANTS[variant]
    state = plain(config).state_dict()
    save_consolidated(tmp_path, state, ranks)
    save_consolidated(tmp_path, {key: tensor + 1 for key, tensor in state.items()}, ranks, "consolidated")
    x, t, y = inputs((6, 10))
    truth = of_ranks(config, ranks)(x, t, y)
    for path in (tmp_path, tmp_path / f"consolidated_ema.00-of-{ranks:02d}.pth"):
        got = loaded(path, 32)(x, timestep=t, class_labels=y).sample
        assert (got - truth).abs().max() < 1e-10 * truth.abs().max()
    if ranks > 1 and config.qk_norm:  # negative control: the norm over all heads is another one
        assert (plain(config)(x, t, y) - truth).abs().max() > 1e-5 * truth.abs().max()


def test_the_arguments_of_large_dits_training_confirm_and_complete(tmp_path: Path) -> None:
    save_consolidated(tmp_path, plain(TINY).state_dict(), 1)
    args = {"image_size": 512, "num_classes": 10, "qk_norm": True, "num_heads": 32, "vae": "ema"}
    torch.save(Namespace(**args), tmp_path / "model_args.pth")
    assert loaded(tmp_path).config == replace(TINY, sample_size=64)
    for name, wrong in {"num_classes": 1000, "qk_norm": False, "model_parallel_size": 2}.items():
        torch.save(Namespace(**args | {name: wrong}), tmp_path / "model_args.pth")
        with pytest.raises(ValueError, match=name):
            loaded(tmp_path)
    torch.save(Namespace(**args), tmp_path / "model_args.pth")
    with pytest.raises(ValueError, match="heads=16, but whose tensors have 32"):
        loaded(tmp_path, 16)


PADDLE_LARGE = {
    "_class_name": "DiTLLaMA2DModel",
    "_ppdiffusers_version": "0.24.1",
    **{"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 3},
    **{"num_attention_heads": 32, "attention_head_dim": 2, "mlp_ratio": 4.0, "n_kv_heads": None, "multiple_of": 16},
    **{"ffn_dim_multiplier": None, "norm_eps": 1e-5, "class_dropout_prob": 0.1, "num_classes": 10},
    **{"learn_sigma": True, "qk_norm": True},
}


@pytest.mark.parametrize(("protocol", "pairs"), [(2, False), (4, False), (4, True)])
def test_ppdiffusers_large_dit_loads_without_paddle(tmp_path: Path, protocol: int, pairs: bool) -> None:
    """Square matrices are transposed, too; blocks have the authors' RMSNorm unless the config asks for LayerNorm."""
    theirs = plain(TINY)
    save_pdparams(tmp_path / "model_state.pdparams", theirs, protocol, pairs)
    x, t, y = inputs((8, 8))
    for norm, truth in (("rms", theirs), ("layer", plain(VARIANTS["paddle"]))):
        config = PADDLE_LARGE | ({"block_norm": norm} if norm == "layer" else {})
        (tmp_path / "config.json").write_text(json.dumps(config))
        dit = loaded(tmp_path)
        assert dit.config == replace(TINY, sample_size=8, block_norm=norm)
        assert (dit(x, timestep=t, class_labels=y).sample - truth(x, t, y)).abs().max() < 1e-9


def paddle_dit(folder: Path, theirs: Any) -> None:
    folder.mkdir(parents=True)
    config = {**theirs.config, "_class_name": "Transformer2DModel", "_ppdiffusers_version": "0.24.1"}
    (folder / "config.json").write_text(json.dumps(config))
    save_pdparams(folder / "model_state.pdparams", theirs)


def test_a_ppdiffusers_pipeline_folder_loads_with_its_decoder(tmp_path: Path) -> None:
    theirs, vae = dit(), small_vae()
    paddle_dit(tmp_path / "transformer", theirs)
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text(json.dumps({**vae.config, "_class_name": "AutoencoderKL"}))
    save_pdparams(tmp_path / "vae" / "model_state.pdparams", vae)
    parts = {"transformer": ["ppdiffusers", "Transformer2DModel"], "vae": ["ppdiffusers", "AutoencoderKL"]}
    save_pipeline_index(tmp_path, parts, "_ppdiffusers_version")
    assert (prediction(loaded(tmp_path)) - prediction(theirs)).abs().max() < CLOSE
    assert_same_decoder(load_vae(tmp_path / "vae", torch.float32, torch.device("cpu")), vae)


def test_ppdiffusers_safetensors_in_bfloat16_are_transposed(tmp_path: Path) -> None:
    """numpy has no bfloat16: Paddle writes its bits as uint16."""
    theirs: Any = dit()
    theirs.load_state_dict({key: tensor.bfloat16() for key, tensor in theirs.state_dict().items()})
    linear = {f"{name}.weight" for name, module in theirs.named_modules() if isinstance(module, nn.Linear)}
    state = {key: (x.T if key in linear else x).bfloat16().contiguous() for key, x in theirs.state_dict().items()}
    bits = {key: tensor.view(torch.uint16) for key, tensor in state.items()}
    save_file(bits, tmp_path / "diffusion_paddle_model.safetensors", metadata={"format": "pd"})
    (tmp_path / "config.json").write_text(json.dumps({**theirs.config, "_class_name": "Transformer2DModel"}))
    assert (prediction(loaded(tmp_path)) - prediction(theirs)).abs().max() < CLOSE


def small_vae() -> Any:
    """Return a decoder of three levels with random weights."""
    torch.manual_seed(0)
    levels: dict[str, Any] = {
        "down_block_types": ["DownEncoderBlock2D"] * 3,
        "up_block_types": ["UpDecoderBlock2D"] * 3,
        "block_out_channels": (32, 64, 64),
    }
    return AutoencoderKL(layers_per_block=2, **levels).eval().requires_grad_(False)


def assert_same_decoder(ours: Any, theirs: Any) -> None:
    x = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert ours.config.scaling_factor == theirs.config.scaling_factor
    picture = theirs.decode(x).sample
    picture = theirs.decode(x).sample
    assert torch.equal(ours.decode(x).sample, picture)
    assert torch.equal(ours.encode(picture).latent_dist.mean, theirs.encode(picture).latent_dist.mean)


def test_the_original_autoencoder_is_diffusers(tmp_path: Path) -> None:
    theirs = small_vae()
    state = {f"module.{key}": tensor for key, tensor in original_decoder(theirs).items()}
    torch.save({"state_dict": state}, tmp_path / "autoencoder_kl.pth")
    assert check_vae(tmp_path / "autoencoder_kl.pth").block_out_channels == [32, 64, 64]
    assert_same_decoder(load_vae(tmp_path / "autoencoder_kl.pth", torch.float32, torch.device("cpu")), theirs)
    del state["module.decoder.mid.attn_1.q.bias"]
    torch.save(state, tmp_path / "autoencoder_kl.pth")
    with pytest.raises(ValueError, match=r"Missing 1: decoder\.mid\.attn_1\.q\.bias"):
        check_vae(tmp_path / "autoencoder_kl.pth")


def test_unidiffusers_folder_is_known_by_its_keys(tmp_path: Path) -> None:
    """The names of the files do not matter; prefixes of wrappers are taken off."""
    unet = ("patch_embed.proj.weight", "mid_block.attn.qkv.weight")
    torch.save({key: torch.ones(1) for key in unet}, tmp_path / "a.pth")
    torch.save({"module.encode_prefix.weight": torch.ones(2)}, tmp_path / "b.pth")
    torch.save(original_decoder(small_vae()), tmp_path / "c.pth")
    torch.save({"clip": torch.ones(1)}, tmp_path / "d.pth")
    layout = layout_of(tmp_path)
    assert layout is not None
    assert layout.kind == "unidiffuser"
    assert {part: path.name for part, path in layout.parts.items()} == {
        "unet": "a.pth",
        "text_decoder": "b.pth",
        "vae": "c.pth",
    }
    assert list(open_checkpoint(layout.parts["text_decoder"]).shapes) == ["encode_prefix.weight"]
    torch.save({key: torch.ones(1) for key in unet}, tmp_path / "v0.pth")
    with pytest.raises(ValueError, match=r"a\.pth and v0\.pth in .*, expected one unet; name the file"):
        layout_of(tmp_path)
    torch.save({"state": {}, "param_groups": []}, tmp_path / "optimizer.pt")
    named = layout_of(tmp_path / "v0.pth")
    assert named is not None
    assert {**named.parts, "unet": "v0"} == {**layout.parts, "unet": "v0"}
    assert named.parts["unet"].name == "v0.pth"
    assert len(named.refused) == 1
    assert "optimizer.pt, expected named tensors" in named.refused[0]
    with pytest.raises(
        ValueError, match=r"without caption_decoder\.pth, expected it beside a\.pth; got .*optimizer\.pt"
    ):
        Parts.of_original({"unet": tmp_path / "a.pth"}, named.refused)
    (tmp_path / "v0.pth").unlink()
    assert layout_of(tmp_path) == replace(layout, refused=named.refused)
    for name, present in (("uvit_v1.pth", True), ("odd.pt", False)):  # a part by its name, or no U-ViT beside it
        (tmp_path / name).write_bytes(b"")
        (tmp_path / "a.pth").rename(tmp_path / ("a.pth" if present else "a.bin"))
        with pytest.raises(ValueError, match=r"got checkpoint .*" + name):
            layout_of(tmp_path)
        (tmp_path / name).unlink()
    (tmp_path / "a.bin").rename(tmp_path / "a.pth")
    torch.save({"encode_prefix.weight": torch.ones(2)}, tmp_path / "e.pth")
    with pytest.raises(ValueError, match=r"b\.pth and e\.pth in .*, expected one text_decoder"):
        layout_of(tmp_path)
