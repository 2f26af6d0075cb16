"""Tests that a VAE on strips makes diffusers' picture, for every class and block, on any number of ranks."""

from __future__ import annotations

import contextlib
import io
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.kernels import group_norm
from seqpar.transports import collective
from seqpar.transports._contract import load
from seqpar.vae import rules
from seqpar.vae.known import MODULES
from seqpar.vae.parallel import ParallelVAE
from seqpar.vae.strips import Exchanges, Strip
from tests.support import vaes
from tests.support.meshes import TRANSPORTS
from tests.support.meshes import mesh as make_mesh
from tests.support.pool import Pool

# (batch, rows, columns) of latents: uneven strips of rows, one row a rank; and of columns, where rows are fewer
SIZES = ((1, 7, 2), (2, 5, 3), (1, 1, 6))
BY_WORLD = {2: SIZES[1], 3: SIZES[2], 4: SIZES[0]}  # one rank: tests/vae/test_blocks.py
# diffusers' RMSNorm of LTX takes the mean of squares in fp32 at any dtype
TOLERANCE = {name: 2e-6 if name.startswith("ltx") else 1e-9 for name in vaes.CASES}


Task = tuple[str, bool, tuple[int, int, int]]


@cache
def truth(name: str, encode: bool, size: tuple[int, int, int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return what one process makes with diffusers alone."""
    return made(vaes.tiny(name, dtype), (name, encode, size), dtype, torch.device("cpu"))


def made(vae: Any, task: Task, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what a VAE, or one on strips, makes for a task."""
    name, encode, size = task
    if encode:
        return vaes.encoded(vae, vaes.pictures(name, *size, dtype).to(device))
    extra = (one.to(device) for one in vaes.extra(name, size[0], dtype))
    return vaes.decoded(vae, vaes.latents(name, *size, dtype).to(device), *extra)


def on_strips(
    rank: int,
    world: int,
    device: torch.device,
    tasks: list[Task],
    dtype: torch.dtype,
    transport: str,
    channels_last: bool = False,
) -> list[Tensor]:
    """Return what strips make for tasks, of which those of one VAE are neighbours."""
    mesh, results = make_mesh(device), []
    for name in dict.fromkeys(name for name, _, _ in tasks):
        parallel = ParallelVAE(vaes.tiny(name, dtype).to(device), mesh, load(transport).Transport(), channels_last)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            results += [made(parallel, task, dtype, device) for task in tasks if task[0] == name]
        parallel.release()
    return results


def in_narrow_dtypes(rank: int, world: int, device: torch.device, tasks: list[Task]) -> tuple[list[Tensor], ...]:
    """Return what strips make in fp32 and in bf16, and what rank 0 makes alone of the decodings in bf16."""
    decodings = [task for task in tasks if not task[1]]
    fp32 = on_strips(rank, world, device, tasks, torch.float32, "collective")
    bf16 = on_strips(rank, world, device, decodings, torch.bfloat16, "collective")
    mine = decodings if rank == 0 else []
    return (
        fp32,
        bf16,
        [made(vaes.tiny(task[0], torch.bfloat16).to(device), task, torch.bfloat16, device) for task in mine],
    )


def largest(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, as a part of the largest value."""
    return ((found.cpu() - expected).abs().max() / expected.abs().max()).item()


# every VAE on strips of rows, and one way on strips of columns; four ranks compute one of each kind
NAMES = {3: [*vaes.CASES], 2: [*vaes.CASES], 4: ["kl", "wan 2.2", "ltx"]}


@pytest.mark.parametrize("world", BY_WORLD)
def test_every_vae_decodes_and_encodes_as_one_process(ranks: Pool, world: int) -> None:
    ways = [(name, encode) for name in NAMES[world] for encode in (False, True)]
    columns = [(name, index % 2 == 1) for index, name in enumerate(NAMES[world])]
    tasks: list[Task] = [(*way, BY_WORLD[world]) for way in (columns if world == 3 else ways)]
    for results in ranks.run(world, on_strips, tasks, torch.float64, "collective"):
        for task, result in zip(tasks, results, strict=True):
            assert largest(result, truth(*task)) <= TOLERANCE[task[0]], task


def test_fp32_is_close_and_bf16_is_as_exact_as_one_process(ranks: Pool) -> None:
    """In bf16 the error against fp64 is at most 1.25 times that of diffusers on one process."""
    names = ("kl", "wan 2.2", "ltx 0.9.5")
    tasks: list[Task] = [(name, encode, SIZES[0]) for name in names for encode in (False, True)]
    answers = ranks.run(3, in_narrow_dtypes, tasks)
    for fp32, _, _ in answers:
        for task, result in zip(tasks, fp32, strict=True):
            assert (result.cpu() - truth(*task, torch.float32)).abs().max() <= 1e-4, task
    _, bf16, alone = answers[0]
    for task, *both in zip([task for task in tasks if not task[1]], bf16, alone, strict=True):
        ours, theirs = ((one.cpu().double() - truth(*task)).square().mean().sqrt() for one in both)
        assert ours <= 1.25 * theirs, task


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "collective"])  # which is above
def test_every_transport_moves_the_edges(ranks: Pool, transport: str) -> None:
    if ranks.device == "cuda":
        pytest.skip("the peer transport of a CPU is tested here")
    tasks: list[Task] = [("kl", False, SIZES[1]), ("wan", True, SIZES[0])]
    for results in ranks.run(2, on_strips, tasks, torch.float64, transport):
        for task, result in zip(tasks, results, strict=True):
            assert largest(result, truth(*task)) <= 1e-9, task


def test_every_known_type_of_module_is_tested() -> None:
    kinds = {type(module) for name in vaes.CASES for module in vaes.tiny(name).modules()}
    assert {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds} == MODULES


def _zeros(self: Any, first: Any, last: Any, before: Tensor | None, after: Tensor | None) -> None:
    for rows in (before, after):
        if rows is not None:
            rows.zero_()


# what a rule of strips must not do: each of these, alone, changes the image
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "no edges arrive": (Exchanges, "swap", _zeros),
    "statistics of one strip": (group_norm, "combine", lambda moments_RNG3: moments_RNG3[0]),
    "keys of one strip": (rules, "_gathered", lambda strip, k_BHlD, v_BHlD, sizes: (k_BHlD, v_BHlD)),
}


def faulty(rank: int, world: int, device: torch.device) -> list[Tensor]:
    """Return the picture that each fault makes."""
    pictures = []
    for where, name, other in FAULTS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, other)
            pictures += on_strips(rank, world, device, [("kl", False, SIZES[1])], torch.float64, "collective")
    return pictures


def test_negative_control_a_fault_changes_the_picture(ranks: Pool) -> None:
    for pictures in ranks.run(2, faulty):
        for fault, picture in zip(FAULTS, pictures, strict=True):
            assert largest(picture, truth("kl", False, SIZES[1])) > 1e-3, fault


def settings(rank: int, world: int, device: torch.device) -> list[tuple[bool, Any]]:
    """Return whether each of some ways to call gives the same as the VAE alone, and what was printed."""
    vae, mesh = vaes.tiny("kl").to(device), make_mesh(device)
    parallel = ParallelVAE(vae, mesh, collective.Transport())
    z, x = vaes.latents("kl", 2, 5, 3).to(device), vaes.pictures("kl", 1, 5, 3).to(device)
    whole, seen = vaes.decoded(vae, z), []
    vae.use_tiling, vae.tile_latent_min_size = True, 2

    def same(found: Tensor, expected: Tensor) -> None:
        printed = said.getvalue()
        said.truncate(0)
        said.seek(0)
        seen.append((torch.allclose(found, expected, rtol=0, atol=1e-9) and vae.use_tiling, printed))

    with contextlib.redirect_stdout(io.StringIO()) as said, torch.inference_mode():
        same(parallel.decode(z).sample, whole)
        vae.use_slicing = True
        same(parallel.decode(z, return_dict=False)[0], whole)
        vae.use_slicing = False
        same(parallel.decode(z[..., :1, :1]).sample, vae.decode(z[..., :1, :1]).sample)
        same(parallel.encode(x[..., 1:, :]).latent_dist.mean, vae.encode(x[..., 1:, :]).latent_dist.mean)
        posterior = parallel.encode(x, return_dict=False)[0]
        vae.use_tiling = False
        alone = vae.encode(x, return_dict=False)[0]
        vae.use_tiling = True
        drawn = [one.sample(torch.Generator(device).manual_seed(1)) for one in (posterior, alone)]
        same(*drawn)
    return seen


def test_settings_of_the_vae_and_what_is_said(ranks: Pool) -> None:
    first, second = ranks.run(2, settings)
    assert [right for right, _ in first + second] == [True] * 10
    told = [text for _, text in first]
    assert "tiling is off" in told[0]
    assert told[1] == told[4] == ""
    assert "decodes whole images on every rank, because 1 x 1 latent pixels are fewer than 2 ranks" in told[2]
    assert "encodes whole images on every rank, because 19 x 12 pixels are no multiples of the VAE's 4" in told[3]
    assert [text for _, text in second] == [""] * 5


def layouts(rank: int, world: int, device: torch.device, size: tuple[int, int, int]) -> tuple[bool, float]:
    """Return whether every 3 x 3 convolution of a channels-last decoder sees such an input, and the picture's error."""
    dtype, seen = torch.float32, list[bool]()  # cuDNN has no channels-last convolutions in fp64
    vae, convolve = vaes.tiny("kl", dtype).to(device, memory_format=torch.channels_last), rules.RULES[F.conv2d]
    parallel = ParallelVAE(vae, make_mesh(device), collective.Transport())

    def looking(strip: Strip, function: Any, x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
        out = convolve(strip, function, x, weight, *settings)
        if weight.shape[-1] > 1:
            seen.append(last(x) and last(out))
        return out

    z = vaes.latents("kl", *size, dtype).to(device).contiguous(memory_format=torch.channels_last)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False), pytest.MonkeyPatch.context() as patch:
        patch.setitem(rules.RULES, F.conv2d, looking)  # pyright: ignore[reportArgumentType]
        picture = vaes.decoded(parallel, z)
        return all(seen) and len(seen) > 10, largest(picture, vaes.decoded(vae, z).cpu())


def last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_stays(ranks: Pool) -> None:
    for kept, error in ranks.run(2, layouts, (1, 5, 3)):
        assert kept
        assert error <= 1e-5


class Offload:
    """The hook of `enable_model_cpu_offload`, as far as `decode` and `encode` call it: weights arrive with a call."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.calls = device, 0

    def pre_forward(self, module: torch.nn.Module) -> None:
        """Move the weights, with functions that have no rule for strips."""
        self.calls += 1
        module.to(torch.device(self.device))


def offloaded(rank: int, world: int, device: torch.device, tasks: list[Task]) -> list[tuple[Tensor, int]]:
    vae = vaes.tiny("kl")
    hook = Offload(device)
    vae._hf_hook = hook
    parallel = ParallelVAE(vae, make_mesh(device), collective.Transport())
    return [(made(parallel, task, torch.float64, device), hook.calls) for task in tasks]


def test_an_offloaded_vae_arrives_before_its_strips(ranks: Pool) -> None:
    tasks: list[Task] = [("kl", False, SIZES[1]), ("kl", True, SIZES[1])]
    for results in ranks.run(2, offloaded, tasks):
        for number, (task, (result, called)) in enumerate(zip(tasks, results, strict=True), start=1):
            assert largest(result, truth(*task)) <= 1e-9, task
            assert called == number
