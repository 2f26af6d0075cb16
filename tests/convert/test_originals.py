"""Tests that original files of DiT and Large-DiT have the arithmetic of their publishers, in fp64, or are rejected."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from seqpar import DistributedDiT
from seqpar.convert.originals import open_transformer
from seqpar.loop.models import dit as dit_module
from seqpar.loop.models import large_dit
from seqpar.mesh.mesh import Mesh
from tests.loop.models.test_large_dit import TINY, VARIANTS, inputs, plain
from tests.support.meshes import random
from tests.support.published import rank_parts, save_consolidated
from tests.support.tiny import diffusers_dit, original_state_dict, with_original_arithmetic
from tests.support.uvit import original_state

CLOSE = 1e-11
HEADS = 4  # of a width of 24: neither 64 nor 72 wide
TRAINED = Namespace(model="DiT-of-ours", image_size=64, num_classes=10, lr=1e-4, resume=None, results_dir=Path("x"))


def dit() -> nn.Module:
    # its width does not state the number of heads
    return diffusers_dit(num_attention_heads=HEADS, attention_head_dim=6)


def wrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{key}": tensor for key, tensor in state.items()}


# what facebookresearch/DiT and its train.py write: the file's content for the weights to be read and other weights
DIT_FILES: dict[str, Callable[[dict[str, Tensor], dict[str, Tensor]], dict[str, Any]]] = {
    "released": lambda state, other: state,
    "ema": lambda state, other: {"ema": state},
    "model": lambda state, other: {"model": state},
    "wrapped": lambda state, other: wrapped(state),
    "safetensors": lambda state, other: state,
    "train.py": lambda state, other: {
        "model": wrapped(other),
        "ema": state,
        "opt": {"state": {0: {"step": torch.ones(()), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]},
        "args": TRAINED,
    },
}


def prediction(model: nn.Module, size: int = 8) -> Tensor:
    x = random((2, 4, size, size), 1)
    return model(x, timestep=torch.tensor([960, 3]), class_labels=torch.tensor([2, 10])).sample


def opened(path: Path, heads: int | None = None) -> DistributedDiT:
    return DistributedDiT.from_pretrained(open_transformer(path, heads)[0], Mesh.single(), torch.float64)


@pytest.mark.parametrize("kind", DIT_FILES)
def test_every_file_of_the_original_dit_reproduces_its_arithmetic(tmp_path: Path, kind: str) -> None:
    theirs = with_original_arithmetic(dit())
    state = original_state_dict(theirs)
    content = DIT_FILES[kind](state, {key: tensor + 1 for key, tensor in state.items()})
    path = tmp_path / ("dit.safetensors" if kind == "safetensors" else "dit.pt")
    save_file(content, path) if kind == "safetensors" else torch.save(content, path)
    truth = prediction(theirs)
    assert (prediction(opened(path, HEADS)) - truth).abs().max() < CLOSE
    # negative control: as many heads as the width alone suggested once
    assert (prediction(opened(path, 3)) - truth).abs().max() > 1e-3


# what training scripts state, --heads, and the heads or the error; train.py builds what args.model names
STATED: list[tuple[dict[str, Any], int | None, int | str]] = [
    ({"num_heads": HEADS, "results_dir": Path("results")}, None, HEADS),
    ({"num_heads": HEADS}, HEADS, HEADS),
    ({"num_heads": HEADS}, 3, "got a DiT with heads=3 by its files, but 4"),
    ({"num_heads": HEADS, "image_size": 512}, None, "got a DiT with image_size=512 by its files, but 64 by its ten"),
    ({"model": "DiT-tiny/2", "num_heads": HEADS}, HEADS, HEADS),
    ({"model": "DiT-tiny/2", "num_heads": HEADS}, 3, r"--heads is 3, but args\.model is DiT-tiny/2, a DiT of 4 heads"),
    ({"model": "DiT-tiny/2", "num_heads": 3}, None, r"args\.num_heads is 3, but args\.model is DiT-tiny/2"),
    ({"model": "DiT-tiny/4"}, None, "got a DiT with patch_size=4 by its files, but 2 by its tensors"),
    ({"model": "DiT-XL/2"}, None, r"got a DiT with (width=1152|layers=28) by its files, but (24|3) by"),
]


@pytest.mark.parametrize("as_dict", [True, False])
def test_arguments_of_training_state_the_heads_and_confirm_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_dict: bool
) -> None:
    for patch in (2, 4):
        tiny = dit_module.Config(HEADS, 6, 3, patch_size=patch)
        monkeypatch.setitem(dit_module.SIZES, f"dit-tiny/{patch}", tiny)
    state, path = original_state_dict(dit()), tmp_path / "dit.pt"
    for args, heads, outcome in STATED:
        torch.save({"ema": state, "args": args if as_dict else Namespace(**args)}, path)
        if isinstance(outcome, int):
            assert open_transformer(path, heads)[0].config.num_attention_heads == outcome
        else:
            with pytest.raises(ValueError, match=outcome):
                open_transformer(path, heads)


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
    truth, ours = prediction(theirs), opened(tmp_path / "dit.pt", HEADS)
    assert (prediction(ours) - truth).abs().max() < CLOSE
    torch.save(state | {"pos_embed": computed}, tmp_path / "computed.pt")
    plain_one = opened(tmp_path / "computed.pt", HEADS)
    assert (prediction(plain_one) - truth).abs().max() > 1e5 * CLOSE  # negative control
    assert [name for name, _ in plain_one.model.named_parameters() if "pos" in name] == []
    if table != "learned":
        assert torch.equal(*(each.model.positions(12, 12) for each in (ours, plain_one)))  # pyright: ignore
        return
    with pytest.raises(ValueError, match=r"got a latent of 12 x 12 .* expected 8 x 8, the only size that its pos_emb"):
        prediction(ours, 12)


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
        got = opened(path, 32)(x, timestep=t, class_labels=y).sample
        assert (got - truth).abs().max() < 1e-10 * truth.abs().max()
    if ranks > 1 and config.qk_norm:  # negative control: the norm over all heads is another one
        assert (plain(config)(x, t, y) - truth).abs().max() > 1e-5 * truth.abs().max()


def test_the_arguments_of_large_dits_training_confirm_and_complete(tmp_path: Path) -> None:
    save_consolidated(tmp_path, plain(TINY).state_dict(), 1)
    args = {"image_size": 512, "num_classes": 10, "qk_norm": True, "num_heads": 32, "vae": "ema"}
    torch.save(Namespace(**args), tmp_path / "model_args.pth")
    assert opened(tmp_path).config == replace(TINY, sample_size=64)
    for name, wrong in {"num_classes": 1000, "qk_norm": False, "model_parallel_size": 2}.items():
        torch.save(Namespace(**args | {name: wrong}), tmp_path / "model_args.pth")
        with pytest.raises(ValueError, match=name):
            opened(tmp_path)
    torch.save(Namespace(**args), tmp_path / "model_args.pth")
    with pytest.raises(ValueError, match="got a Large-DiT with heads=16 by its files, but 32"):
        opened(tmp_path, 16)


HEADS_OF = {"dit": 3, "large-dit": 32}
Spoil = Callable[[Path], object]

# Spoiled files --------------------------------------------------------------------------------------------------

ORIGINALS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "dit": lambda: original_state_dict(diffusers_dit(num_layers=2)),
    "large-dit": lambda: plain(replace(TINY, num_layers=1)).state_dict(),
    "uvit": lambda: original_state(2, 1, True),
}
SIGNATURES = {"blocks.0.attn.qkv.weight", "y_embedder.embedding_table.weight"}  # the keys by which a DiT is recognised


@pytest.mark.parametrize("name", HEADS_OF)
def test_an_original_file_that_lacks_any_key_is_refused_by_the_name_of_the_key(tmp_path: Path, name: str) -> None:
    state = ORIGINALS[name]()
    path = tmp_path / "whole.pt"
    torch.save(state, path)
    open_transformer(path, HEADS_OF[name])
    key = "y_embedder.embedding_table.weight"
    torch.save(state | {key: state[key][:1]}, path)
    with pytest.raises(ValueError, match=r"whole\.pt: .*embedding_table\.weight has 1 row, expected a row per class"):
        open_transformer(path, HEADS_OF[name])
    for lost in sorted(state.keys() - {"pos_embed"} - (SIGNATURES if name == "dit" else set())):
        torch.save({key: tensor for key, tensor in state.items() if key != lost}, path)
        with pytest.raises(ValueError, match=re.escape(lost)):
            open_transformer(path, HEADS_OF[name])


ODD: list[tuple[str, str, tuple[int, ...], str]] = [
    ("uvit", "decoder_pred.weight", (17, 128), r"of 17 rows, expected a multiple of 2 x 2"),
    ("uvit", "decoder_pred.weight", (20, 128), r"it has 16 rows, expected 20"),
    ("uvit", "patch_embed.proj.weight", (96, 4, 2, 2), r"a UniDiffuser of width 96 with 16 image tokens; expected"),
    ("dit", "x_embedder.proj.weight", (64, 16), r"x_embedder\.proj\.weight of shape \(64, 16\), expected 4 dims"),
    ("dit", "x_embedder.proj.weight", (25, 4, 2, 2), r"3 heads do not divide a DiT of width 25"),
    ("dit", "final_layer.linear.weight", (32,), r"final_layer\.linear\.weight of shape \(32,\), expected 2 dims"),
    ("dit", "final_layer.linear.weight", (33, 24), r"linear\.weight of 33 rows, expected a multiple of 2 x 2"),
    ("dit", "final_layer.linear.weight", (8, 24), r"a DiT with 2 output channels for 4 input channels, expected 4, or"),
    ("dit", "final_layer.linear.weight", (24, 24), r"with 6 output channels for 4 input .* or 8 with variances"),
    ("large-dit", "final_layer.linear.weight", (8, 64), r"a Large-DiT with 2 output channels for 4 input channels"),
    ("dit", "final_layer.linear.bias", (), r"linear\.bias of shape \(\), which cannot make final\.bias"),
    ("dit", "final_layer.linear.bias", (31,), r"linear\.bias of shape \(31,\), which .* 31 rows, expected 32"),
    ("dit", "final_layer.linear.bias", (36,), r"linear\.bias of shape \(36,\), which .* 36 rows, expected 32"),
    ("large-dit", "final_layer.linear.weight", (33, 64), r"of 33 rows, expected a multiple of 2 x 2"),
    ("dit", "pos_embed", (16, 64), r"pos_embed of shape \(16, 64\), expected 3 dims"),
    ("dit", "pos_embed", (1, 15, 24), r"pos_embed has shape \(1, 15, 24\), expected \(1, side x side, 24\)"),
    ("dit", "pos_embed", (1, 16, 32), r"pos_embed has shape \(1, 16, 32\), expected \(1, side x side, 24\)"),
    ("dit", "blocks.1.mlp.fc1.weight", (255, 24), r"blocks\.1\.mlp\.fc1\.weight of shape \(255, 24\)"),
    ("dit", "y_embedder.embedding_table.weight", (0, 64), r"embedding_table\.weight of shape \(0, 64\)"),
    ("dit", "blocks.3000000.attn.qkv.weight", (2, 2), r"with blocks\.3000000 that lacks all of blocks\.2"),
    ("large-dit", "x_embedder.weight", (64, 15), r"x_embedder\.weight of shape \(64, 15\), expected 4 x patch"),
    ("large-dit", "x_embedder.weight", (63, 16), r"32 heads do not divide a Large-DiT of width 63"),
    ("large-dit", "layers.0.attention.wk.weight", (64,), r"attention\.wk\.weight of shape \(64,\), expected 2"),
    ("large-dit", "layers.0.attention.wk.weight", (63, 64), r"queries are 64 and keys 63 wide"),
]


@pytest.mark.parametrize("name", ORIGINALS)
def test_an_original_file_of_odd_shapes_is_refused(tmp_path: Path, name: str) -> None:
    for key, shape, message in (row[1:] for row in ODD if row[0] == name):
        torch.save(ORIGINALS[name]() | {key: torch.zeros(shape)}, tmp_path / "odd.pt")
        with pytest.raises(ValueError, match=message):
            open_transformer(tmp_path / "odd.pt", HEADS_OF.get(name))


@pytest.mark.parametrize(
    ("name", "heads", "message"),
    [
        ("dit", None, r"attention heads of this DiT \(width 24, 2 layers\), .*; add --heads"),
        ("large-dit", None, r"attention heads of this Large-DiT \(width 64, 1 layers\)"),
        ("dit", 5, r"5 heads do not divide a DiT of width 24 into heads of equal, even width"),
    ],
)
def test_heads_are_asked_for_and_never_guessed(tmp_path: Path, name: str, heads: int | None, message: str) -> None:
    torch.save(ORIGINALS[name](), tmp_path / "ours.pt")
    with pytest.raises(ValueError, match=message):
        open_transformer(tmp_path / "ours.pt", heads)


# Parts of model-parallel ranks -----------------------------------------------------------------------------------


def change(rank: int, edit: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def apply(folder: Path) -> None:
        path = folder / f"consolidated_ema.{rank:02d}-of-02.pth"
        part = torch.load(path)
        edit(part)
        torch.save(part, path)

    return apply


PARTS: dict[str, tuple[Spoil, str]] = {
    "a part is missing": (
        lambda f: (f / "consolidated_ema.00-of-02.pth").unlink(),
        r"parts are missing: found consolidated_ema\.01-of-02\.pth",
    ),
    "two splits": (lambda f: save_consolidated(f, plain(TINY).state_dict(), 1), r"parts are missing: found .*00-of-01"),
    "a key is missing": (change(1, lambda p: p.pop("x_embedder.bias")), r"different keys: only one has x_embedder"),
    "another shape": (
        change(1, lambda p: p.update({"x_embedder.weight": torch.zeros(32, 4)})),
        r"x_embedder\.weight of shape \(32, 4\) and torch\.float32 does not fit",
    ),
    "fewer dims": (
        change(1, lambda p: p.update({"layers.0.attention.wo.weight": torch.zeros(64).double()})),
        r"attention\.wo\.weight of shape \(64,\) and torch\.float64 does not fit",
    ),
    "an unknown key": (
        lambda f: [change(rank, lambda p: p.update(lora=torch.ones(1)))(f) for rank in (0, 1)],
        r"has lora, which is no key of Large-DiT: how ranks split it is not known",
    ),
    "other norms": (
        change(1, lambda p: p.update({"layers.1.ffn_norm.weight": torch.zeros(64).double()})),
        r"01-of-02\.pth: layers\.1\.ffn_norm\.weight differs from that in",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path, case: str) -> None:
    """Tensors that must be equal are compared when they are read."""
    save_consolidated(tmp_path, plain(TINY).state_dict(), 2)
    spoil, message = PARTS[case]
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message):
        open_transformer(tmp_path, 32)[0].build(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["consolidated.00-of-00.pth", "consolidated.05-of-02.pth"])
def test_a_part_with_an_impossible_number_is_rejected(tmp_path: Path, name: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(ValueError, match=rf"parts are missing: found .*{name}"):
        open_transformer(tmp_path / name)
