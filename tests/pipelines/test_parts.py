"""Tests that the parts of a pipeline folder load as diffusers loads them, each byte of their files once a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_hunyuan_video15
from safetensors.torch import save_file

from seqpar.loading import reading
from seqpar.loading.checkpoint import Fitted, open_checkpoint
from seqpar.loading.folder import check_model
from seqpar.loading.pipeline import Weights, why_not
from seqpar.loading.placing import Team
from seqpar.loading.reading import Reader
from seqpar.mesh.mesh import Mesh
from tests.support import pipelines
from tests.support.diffusers_tiny import MODELS, narrow

THEIRS: Any = diffusers  # pyright does not see what it imports lazily
# models with buffers that no file holds, modules that stay in fp32, and others
CLASSES = {tiny.kind: tiny for tiny in MODELS.values()}


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a model by name: parameters, buffers, and those that its modules hold as attributes."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, part in module.named_modules():
        named |= {f"{name}.{key}": x for key, x in vars(part).items() if isinstance(x, torch.Tensor)}
    return named


def same(one: Any, other: Any) -> None:
    """Fail if two models differ in anything that can be seen of their tensors or config."""
    assert one.config == other.config
    assert one.training is other.training is False
    mine, theirs = tensors(one), tensors(other)
    assert [*mine] == [*theirs]
    for name, x in mine.items():
        y = theirs[name]
        assert (type(x), x.dtype, x.device, x.requires_grad) == (type(y), y.dtype, y.device, y.requires_grad), name
        assert torch.equal(x, y), name


def reason(kind: Any, folder: Path) -> str | None:
    return why_not(kind, check_model(folder, "diffusers", kind.__name__))


def compare(module: Any, folder: Path, safe: bool = True) -> None:
    kind = type(module)
    size = "40KB" if safe else "1GB"  # an index and several files, which diffusers reads of safetensors alone
    module.float().save_pretrained(folder, max_shard_size=size, safe_serialization=safe)
    assert reason(kind, folder) is None
    theirs = kind.from_pretrained(str(folder), torch_dtype=torch.bfloat16)
    mesh, fitted = Mesh.single(), check_model(folder, "diffusers", kind.__name__)
    assert fitted is not None
    weights = Weights.of(fitted, torch.bfloat16)
    for small in (0, reading.SMALL):  # each tensor by itself, and all together
        ours = weights.empty(torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch, Reader(mesh.device) as reader:
            patch.setattr(reading, "SMALL", small)
            placing = weights.begin(reader, Team(), ())
            reader.start()
            weights.finish(ours, placing, mesh)
        same(ours, theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_a_transformer_is_that_of_diffusers_bit_for_bit(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformer_hunyuan_video15, "HunyuanVideo15ByT5TextProjection", narrow)  # as built
    compare(CLASSES[name].build(), tmp_path)


VAES = {
    "AutoencoderKL": lambda: pipelines.decoder(1),
    "AutoencoderKLQwenImage": lambda: pipelines.qwen_image().vae,
    "AutoencoderKLFlux2": lambda: pipelines.random_weights(  # counts the batches of its training in whole numbers
        THEIRS.AutoencoderKLFlux2(
            block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=4, layers_per_block=1
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", VAES)
def test_a_vae_is_that_of_diffusers_bit_for_bit(tmp_path: Path, name: str) -> None:
    compare(VAES[name](), tmp_path / "safetensors")
    compare(VAES[name](), tmp_path / "bin", safe=False)


def test_what_ranks_do_not_read_together_has_a_reason(tmp_path: Path) -> None:
    vae = pipelines.decoder(1)
    kind, file = type(vae), tmp_path / "diffusion_pytorch_model.safetensors"
    vae.save_pretrained(tmp_path)
    assert reason(kind, tmp_path) is None  # negative control
    (tmp_path / "evil.py").touch()
    assert reason(kind, tmp_path) == "evil.py lies beside it"
    (tmp_path / "evil.py").unlink()
    save_file({"a": torch.ones(2).to(torch.float8_e4m3fn)}, file)
    assert why_not(kind, Fitted(tmp_path, kind, {}, open_checkpoint(file), vae)) == "a is of type float8_e4m3fn"
    assert "its own loader" in str(why_not(THEIRS.Transformer2DModel, None))
    assert why_not(kind, None) == "it has no folder with its own config.json"
