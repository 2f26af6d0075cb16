"""Tests of norms and biases that wait for the function that follows them, and of channels-last memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor, nn

from seqpar.mesh import Axis, Mesh
from seqpar.planner.plan import load_transport
from seqpar.vae.cut import Cut
from seqpar.vae.exchanges import TransportExchanges
from seqpar.vae.later import Later
from seqpar.vae.mode import StripMode
from seqpar.vae.norms import SCALED, over_channels
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.place import Place
from seqpar.vae.rules import RULES
from tests.support import vaes
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool
from tests.vae.test_parallel import TOLERANCE

FP64 = 1e-12
EYE = torch.eye(6, dtype=torch.float64).view(6, 6, 1, 1)
UP = ("UpDecoderBlock2D",) * 2
KL = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": UP, "block_out_channels": (16, 32)}
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True]}
VAES: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "kl": (lambda: AutoencoderKL(**KL, layers_per_block=1, latent_channels=4, norm_num_groups=8), (1, 4, 8, 6)),
    "wan": (lambda: AutoencoderKLWan(**WAN), (1, 4, 3, 4, 6)),
    "qwen": (lambda: AutoencoderKLQwenImage(**WAN, attn_scales=[]), (1, 4, 1, 4, 6)),
}


def made(name: str) -> tuple[Any, Tensor]:
    """Return a tiny VAE in fp64 whose weights, also those of norms, are random; and a latent."""
    build, shape = VAES[name]
    torch.manual_seed(0)
    vae = build().double().eval().requires_grad_(False)
    for parameter in vae.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    return vae, random(shape, 1, "cpu", torch.float64)


def single(vae: Any, channels_last: bool = False) -> ParallelVAE:
    return ParallelVAE(vae, Mesh.single(), load_transport("collective"), channels_last)


def mode() -> tuple[StripMode, Place]:
    """Return a mode for a latent of 4 x 4 on one rank, and its place."""
    cut, axis = Cut.of(Axis("world"), 4, 4), Axis("world")
    assert cut is not None
    place = Place(cut, TransportExchanges(axis, load_transport("collective")), {})
    return StripMode(place), place


def picture(channels: int = 6, last: bool = False) -> Tensor:
    x = random((1, channels, 4, 4), channels, "cpu", torch.float64)
    return x if last else x.to(memory_format=torch.channels_last)


def memory(x: Tensor) -> int:
    """Return the bytes of a tensor's memory."""
    with torch._C.DisableTorchFunction():
        return x.untyped_storage().nbytes()


def close(got: Tensor, want: Tensor) -> None:
    """Compare without the mode, so that nothing is written first."""
    with torch._C.DisableTorchFunction():
        assert float((got - want).abs().max()) < FP64


@pytest.mark.parametrize("name", VAES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_one_rank_decodes_and_encodes_like_diffusers_and_gives_the_weights_back(name: str, channels_last: bool) -> None:
    vae, z = made(name)
    want = vae.decode(z, return_dict=False)[0]
    parallel = single(vae, channels_last)
    got = parallel.decode(z, return_dict=False)[0]
    assert got.is_contiguous()
    assert float((got - want).abs().max()) < FP64
    assert all("forward" not in vars(module) for module in vae.modules())
    latent = vae.encode(want, return_dict=False)[0].mode()
    assert float((parallel.encode(want, return_dict=False)[0].mode() - latent).abs().max()) < FP64
    kernels = [each for each in vae.parameters() if each.ndim > 3 and each[0, 0].numel() > 1 and each.shape[1] > 1]
    assert all(each.is_contiguous() != channels_last for each in kernels)
    parallel.release()
    assert all(each.is_contiguous() for each in vae.parameters())
    assert torch.equal(vae.decode(z, return_dict=False)[0], want)


def on_strips(rank: int, world: int, device: torch.device, names: list[str]) -> list[Tensor]:
    made = []
    for name in names:
        vae = vaes.tiny(name, torch.float64).to(device)
        parallel = ParallelVAE(vae, make_mesh(device), load_transport("collective"), channels_last=True)
        latents, extra = vaes.latents(name, 1, 5, 3, torch.float64), vaes.extra(name, 1, torch.float64)
        made.append(vaes.decoded(parallel, latents.to(device), *(each.to(device) for each in extra)))
        parallel.release()
    return made


def test_strips_in_channels_last_memory_are_exact(ranks: Pool) -> None:
    """Norms and biases wait on every rank, while the neighbours' rows travel."""
    names = [*vaes.CASES]
    for made in ranks.run(2, on_strips, names):
        for name, got in zip(names, made, strict=True):
            latents, extra = vaes.latents(name, 1, 5, 3, torch.float64), vaes.extra(name, 1, torch.float64)
            want = vaes.decoded(vaes.tiny(name, torch.float64), latents, *extra)
            assert float((got.cpu() - want).abs().max() / want.abs().max()) < TOLERANCE[name], name


def test_passes_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """No norm before SiLU and no sum is written twice; biases are added alone only where nothing else adds them."""
    vae, z = made("kl")
    alone: list[str] = []
    write = Later.write

    def counted(self: Later, x: Tensor, silu: bool = False) -> None:
        alone.append(type(self.how(x)).__name__)
        write(self, x, silu)

    monkeypatch.setattr(Later, "write", counted)
    single(vae).decode(z)
    assert alone == ["GroupNorm"]  # attention's
    alone.clear()
    single(vae, True).decode(z)
    # read by another convolution: the outputs of the first one and of the one after upsampling; and the picture
    assert sorted(alone) == ["Biased", "Biased", "Biased", "GroupNorm"]


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.view(6, 16).reshape(1, 6, 4, 4),
        lambda y: torch.cat([y, y], dim=1)[:, :6],
        lambda y: y.clone(),
        lambda y: y.permute(0, 1, 3, 2).transpose(2, 3),
        lambda y: torch.stack(y.unbind(1), 1),
        lambda y: y.add_(0.0),
        lambda y: F.conv2d(y, EYE),
        lambda y: 0.0 * y + y,
        lambda y: y / 1.0,
        lambda y: y.detach(),
    ],
)
@pytest.mark.parametrize("how", ["group", "channels", "bias"])
def test_whatever_reads_a_value_that_waits_gets_it(read: Callable[[Tensor], Tensor], how: str) -> None:
    x, weight, bias = picture(last=how == "group"), random((6,), 2, "cpu"), random((6,), 3, "cpu")
    weight, bias, kernel = weight.double(), bias.double(), random((6, 6, 3, 3), 4, "cpu", torch.float64)
    functions: dict[str, Callable[[], Tensor]] = {
        "group": lambda: F.group_norm(x, 3, weight, bias),
        "channels": lambda: over_channels(x, weight, bias),
        "bias": lambda: F.conv2d(x, kernel, bias, padding=1),
    }
    want = functions[how]()
    entered, place = mode()
    with torch.no_grad(), entered:
        y = functions[how]()
        assert len(place.later) == 1
        got = read(y)
        close(got, want)
        assert len(place.later) == 0


@pytest.mark.parametrize("inplace", [False, True])
def test_silu_takes_the_norm_whose_tensor_needs_no_memory_unless_it_is_read_later(inplace: bool) -> None:
    x, act = picture(), nn.SiLU(inplace)
    want, silu = F.group_norm(x, 3), F.silu(x)
    act_want = F.silu(want)
    entered, place = mode()
    with torch.no_grad(), entered:
        y = F.group_norm(x, 3)
        assert y.shape == want.shape
        z = act(y)
        close(z, act_want)
        assert (z is y) == inplace
        assert memory(y) == (memory(want) if inplace else 0)
        if not inplace:
            close(y + 0.0, want)
            close(act(x), silu)
        del y, z
        held = F.group_norm(x, 3)
        F.group_norm(x, 2)  # nobody keeps it
        assert len(place.later) == 1
    close(held, want)


@pytest.mark.parametrize("write", [lambda x: x.mul_(0.0), lambda x: F.silu(x, inplace=True), lambda x: x.__iadd__(1.0)])
def test_what_a_norm_waits_to_read_is_not_overwritten(write: Callable[[Tensor], Tensor]) -> None:
    x = picture()
    want = F.group_norm(x, 3)
    entered, _ = mode()
    with torch.no_grad(), entered:
        y = F.group_norm(x, 3)
        write(x)
        close(y.clone(), want)


@pytest.mark.parametrize("order", ["norm first", "convolution first", "silu first"])
def test_a_norm_of_a_convolution_that_lacks_its_bias_adds_it_once(order: str) -> None:
    x, bias = picture(), random((6,), 3, "cpu").double()
    kernel = random((6, 6, 3, 3), 4, "cpu", torch.float64)
    plain = F.conv2d(x, kernel, bias, padding=1)
    want = F.group_norm(plain, 3), plain, F.silu(F.group_norm(plain, 3))
    entered, _ = mode()
    with torch.no_grad(), entered:
        y = F.conv2d(x, kernel, bias, padding=1)
        norm = F.group_norm(y, 3)
        act = F.silu(norm) if order == "silu first" else None
        found = (norm.clone(), y.clone()) if order == "norm first" else (y.clone(), norm.clone())[::-1]
        act = F.silu(norm) if act is None else act
        for got, right in zip((*found, act), want, strict=True):
            close(got, right)


def test_all_that_waits_is_written_once_before_a_function_that_writes() -> None:
    """A norm reads the output of the convolution that waits for its bias: writing one of them writes both."""
    x, bias = picture(), random((6,), 3, "cpu").double()
    kernel = random((6, 6, 3, 3), 4, "cpu", torch.float64)
    plain = F.conv2d(x, kernel, bias, padding=1)
    entered, place = mode()
    with torch.no_grad(), entered:
        y = F.conv2d(x, kernel, bias, padding=1)
        norm = F.group_norm(y, 3)
        other = torch.zeros_like(x)
        assert len(place.later) == 2
        other.add_(1.0)
        assert len(place.later) == 0
    close(y, plain)
    close(norm, F.group_norm(plain, 3))


def test_sums_add_the_biases_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that nothing settles would lack a bias: this is a negative control."""
    x, bias = picture(), random((6,), 3, "cpu").double()
    kernel = random((6, 6, 1, 1), 4, "cpu", torch.float64)

    def both(read: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return read(F.conv2d(x, kernel, bias), F.conv2d(x, 2 * kernel, bias, 1, 0))

    reads = (torch.add, lambda y, z: y + z, lambda y, z: z + x, lambda y, z: y.add(z, alpha=2), torch.mul)
    for read in reads:
        with mode()[0]:
            got = both(read)
        close(got, both(read))
    monkeypatch.setattr(Later, "settle", lambda *args: None)
    with mode()[0]:
        got = both(torch.mul)
    assert float((got - both(torch.mul)).abs().max()) > 0.1


def test_division_by_one_copies_nothing_in_residual_blocks_and_copies_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vae, z = made("kl")
    same: list[bool] = []
    divide = RULES[Tensor.div]

    def counted(place: Place, function: Any, args: Any, kwargs: Any) -> Tensor:
        out = divide(place, function, args, kwargs)
        same.append(out is args[0])
        return out

    x, before = picture(), picture()
    with torch.no_grad(), mode()[0]:
        y = x / 1.0
        y.add_(1.0)
        close(x, before)
        close(y, before + 1.0)
        close(x / 2.0, 0.5 * x)
        assert (torch.zeros(2, dtype=torch.int64) / 1).dtype == torch.get_default_dtype()
    monkeypatch.setitem(RULES, Tensor.div, counted)  # type: ignore[misc]
    single(vae).decode(z)
    blocks = [module for module in vae.decoder.modules() if type(module).__name__ in SCALED]
    assert same == [True] * len(blocks)
