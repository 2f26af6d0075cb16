"""Tests that a VAE decodes and encodes on all ranks what it does alone: ways, rows, graphs, tiling, sharing, errors."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from diffusers.hooks.layerwise_casting import apply_layerwise_casting
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0
from torch import Tensor, nn

import seqpar
from seqpar.mesh import exact
from seqpar.mesh.mesh import Axis, Mesh
from seqpar.vae import on_mesh
from seqpar.vae.known import why_unknown
from seqpar.vae.on_mesh import MeshVAE
from seqpar.vae.strips import spread_of
from tests.support import pipelines
from tests.support.calls import Captures
from tests.support.meshes import mesh as make_mesh
from tests.support.meshes import random
from tests.support.pool import Pool

CLOSE = 1e-11  # in fp64; strips add up the statistics of norms in another order
VISIBLE = 1e-3
SHAPE = (4, 9, 7)  # of a latent: rows that two and four ranks do not divide


def reason() -> str | None:
    return "it is small"


@pytest.mark.parametrize(
    ("count", "wish", "why", "told"),
    [
        (4, "auto", None, "whole images, some on each of 4 ranks"),
        (3, "auto", None, "strips on 4 ranks"),
        (9, "strips", None, "strips on 4 ranks"),
        (1, "pictures", None, "whole images, some on each of 4 ranks"),
        (3, "auto", reason, "whole images, some on each of 4 ranks, because it is small"),
        (1, "tiled", reason, "whole images, some on each of 4 ranks, in diffusers' tiles, which leave seams"),
    ],
)
def test_pictures_are_decoded_by_strips_where_they_are_fewer_than_ranks(
    count: int, wish: str, why: Callable[[], str | None] | None, told: str
) -> None:
    way = spread_of(count, wish, Axis("world", 1, 4), Axis("none"), why or (lambda: None))
    assert str(way) == told
    assert (way.explained is None) == (" because " not in told)


def test_the_way_follows_groups_one_rank_and_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = spread_of(3, "auto", Axis("world", 1, 4), Axis("data", 1, 2), lambda: None)
    assert str(groups) == "strips on 2 ranks, in each of 2 groups"
    assert (groups.axis.name, groups.shard(3).sizes) == ("data", (2, 1))
    assert spread_of(1, "strips", Axis("world"), Axis("none"), reason).name == "whole"
    monkeypatch.setattr(exact, "is_on", lambda: True)
    assert spread_of(1, "auto", Axis("world", 0, 4), Axis("none"), lambda: None).name == "pictures"


# Calls like those of diffusers -----------------------------------------------------------------------------------


@contextlib.contextmanager
def seen(module: nn.Module) -> Iterator[list[tuple[int, ...]]]:
    """Record the shapes of the inputs of a module's calls, in its class: a hook would keep the VAE whole."""
    shapes: list[tuple[int, ...]] = []
    kind, forward = type(module), type(module).forward

    def recording(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            shapes.append(tuple(x.shape))
        return forward(self, x, *args, **kwargs)

    with patch.object(kind, "forward", recording):
        yield shapes


def latents(rows: int, seed: int = 1) -> Tensor:
    return random((rows, *SHAPE), seed)


def counts(world: int) -> list[int]:
    """Return numbers of rows: one, which is decoded by strips, one for each rank, and one that few worlds divide."""
    return sorted({1, 3, world})


def calls(rank: int, world: int, device: torch.device, axes: dict[str, int], dtype: torch.dtype) -> list[Any]:
    """Return decoded and encoded tensors, of the counts of rows, and the shapes that decoder and encoder got.

    Ranks other than 0 pass other inputs, which must not count.
    """
    vae = pipelines.decoder(1).to(device, dtype)
    made, found = MeshVAE.of(vae, make_mesh(device, **axes), "collective", list), []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for rows in counts(world):
            given = (latents(rows) + rank).to(device, dtype)
            with seen(vae.decoder) as shapes:
                found.append((made.decode(given).sample, sorted(set(shapes))))
            with seen(vae.encoder) as shapes:
                found.append((made.encode(picture(rows).to(device, dtype) + rank)[0].mode(), sorted(set(shapes))))
            if rows == 1:
                assert (made.decode(given, return_dict=False)[0] - found[-2][0]).abs().max() < VISIBLE
        made.release()
        found.append((made.decode(latents(1).to(device, dtype)).sample, []))
    made.release()
    return found


def picture(rows: int) -> Tensor:
    return random((rows, 3, 2 * SHAPE[1], 2 * SHAPE[2]), 5)


@pytest.mark.parametrize(
    ("world", "axes", "dtype", "close"),
    [
        (2, {"cfg": 1}, torch.float64, CLOSE),
        (3, {"cfg": 1, "ring": 3}, torch.float32, 1e-4),
        (4, {"data": 2, "cfg": 2, "ulysses": 1}, torch.float64, CLOSE),
    ],
    ids=str,
)
def test_all_ranks_get_what_the_vae_alone_computes_of_rank_0s_input(
    ranks: Pool, world: int, axes: dict[str, int], dtype: torch.dtype, close: float
) -> None:
    vae = pipelines.decoder(1)
    decoded = [vae.decode(latents(rows)).sample for rows in counts(world)]
    encoded = [vae.encode(picture(rows)).latent_dist.mode() for rows in counts(world)]
    truth = [x for pair in zip(decoded, encoded, strict=True) for x in pair] + decoded[:1]
    assert (
        decoded[0] - vae.decode(latents(1) + 1).sample
    ).abs().max() > VISIBLE  # what another rank's input would make
    answers = ranks.run(world, calls, axes, dtype)
    for found in answers:
        assert all((got - wanted).abs().max() < close for (got, _), wanted in zip(found, truth, strict=True))
    sharing = world // axes.get("data", 1)
    heights = {shape[0][2] for found in answers for _, shape in [found[0]]}
    assert sum(found[0][1][0][2] for found in answers[:sharing]) == SHAPE[1], heights  # one row: strips
    each = 2 * counts(world).index(world)  # a row for each rank: whole, one by one
    assert all(found[each][1] == [(1, *SHAPE)] for found in answers)


def tiled(rank: int, world: int, device: torch.device) -> list[Tensor]:
    """Return what a parallelized pipeline's VAE decodes by each wish; its user has switched tiling on before two."""
    decoded, wishes = list[Tensor](), ("auto", False, "tiled")
    for wish in wishes:
        pipe = pipelines.flux().to(device)
        pipe.vae.use_tiling = before = wish != "tiled"
        pipe.vae.tile_latent_min_size, pipe.vae.tile_sample_min_size = 4, 8
        seqpar.parallelize(pipe, make_mesh(device, cfg=1), vae=wish)  # pyright: ignore[reportArgumentType]
        decoded += [pipe.vae.decode(latents(1).to(device) + rank).sample for _ in range(2)][1:]
        assert pipe.vae.use_tiling
        seqpar.release(pipe)
        assert pipe.vae.use_tiling == before
        assert not {"decode", "encode"} & set(vars(pipe.vae))
    return decoded


def test_strips_leave_no_seams_where_tiles_do(ranks: Pool) -> None:
    truth = pipelines.decoder(1).decode(latents(1)).sample
    for strips, theirs, wished in ranks.run(2, tiled):
        assert (strips - truth).abs().max() < CLOSE
        assert (theirs - truth).abs().max() > VISIBLE
        assert torch.equal(theirs, wished)


@pytest.mark.parametrize("kernels", [False, True])
def test_a_rank_alone_decodes_by_kernels_or_modules_and_in_the_tiles_of_its_user(kernels: bool) -> None:
    vae = pipelines.decoder(1)
    made, truth = MeshVAE(vae, Mesh.single(), "collective", kernels=kernels), vae.decode(latents(1)).sample
    assert (made.decode(latents(1)).sample - truth).abs().max() < CLOSE
    vae.enable_tiling()
    vae.tile_latent_min_size, vae.tile_sample_min_size = 4, 8
    assert torch.equal(made.decode(latents(1)).sample, vae.decode(latents(1)).sample)
    assert (made.decode(latents(1)).sample - truth).abs().max() > VISIBLE
    auto, made.mode = made.pictures(latents(2)), "tiled"
    tiles = made.pictures(latents(2))
    assert torch.equal(tiles, auto)
    vae.disable_tiling()
    assert torch.equal(tiles, made.pictures(latents(2)))
    made.mode = "auto"
    assert (tiles - made.pictures(latents(2))).abs().max() > VISIBLE
    assert not vae.use_tiling


@pytest.mark.parametrize("kind", ["flux", "sd3", "pixart", "wan", "qwen_image", "unidiffuser"])
def test_the_vaes_of_pipelines_are_known(kind: str) -> None:
    """So that the tests of pipelines on several ranks test strips."""
    assert why_unknown(getattr(pipelines, kind)().vae) is None


def refused(rank: int, world: int, device: torch.device) -> list[str]:
    """Return what ranks are told of inputs of unequal shapes, and of a VAE with a module that is not known."""
    pipe, told = pipelines.flux().to(device), []
    seqpar.parallelize(pipe, make_mesh(device, cfg=1))
    for method, x in ((pipe.vae.decode, latents(1 + rank)), (pipe.vae.encode, picture(1 + rank))):
        with pytest.raises(ValueError, match="got the VAE's input") as error:
            method(x.to(device))
        told.append(str(error.value))
    assert len(pipe.vae.decode(latents(1).to(device)).sample) == 1
    seqpar.release(pipe)
    pipe.vae.decoder.conv_act = nn.Mish()
    with pytest.raises(
        ValueError, match=r"AutoencoderKL does not support vae=True: .*decoder\.conv_act.*Mish"
    ) as error:
        seqpar.parallelize(pipe, make_mesh(device, cfg=1), vae=True)
    told.append(str(error.value))
    seqpar.parallelize(pipe, make_mesh(device, cfg=1))
    told.append("decode" in vars(pipe.vae) and "encode" not in vars(pipe.vae))
    sample = pipe.vae.decode(latents(1).to(device) + rank).sample
    seqpar.release(pipe)
    return [*told, (sample - pipe.vae.decode(latents(1).to(device)).sample).abs().max().item()]


def test_errors_are_the_same_on_every_rank_and_an_unknown_vae_decodes_whole(ranks: Pool) -> None:
    first, second = ranks.run(2, refused)
    assert first == second
    assert first[3:] == [True, 0.0]


def test_what_is_asked_of_a_vae_is_checked_before_anything_changes(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = pipelines.flux()
    with pytest.raises(ValueError, match="got vae='tiles', expected 'auto', 'tiled', True or False"):
        seqpar.parallelize(pipe, Mesh.single(), vae="tiles")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="vae=True requires a VAE, but FluxTransformer2DModel has none"):
        seqpar.parallelize(pipe.transformer, Mesh.single(), vae=True)
    with pytest.raises(ValueError, match="vae='tiled' requires a VAE, but FluxTransformer2DModel has none"):
        seqpar.parallelize(pipe.transformer, Mesh.single(), vae="tiled")
    attend(pipe.vae, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"AutoencoderKL does not support vae=True: .* has the attention processor"):
        seqpar.parallelize(pipe, Mesh.single(), vae=True)
    attend(pipe.vae, torch.device("cpu"), AttnProcessor2_0)
    assert why_unknown(pipe.vae) is None
    pipe.vae.decode = lambda z: None
    with pytest.raises(ValueError, match="its decode was replaced by another function"):
        seqpar.parallelize(pipe, Mesh.single(), vae=True)
    assert "forward" not in vars(pipe.transformer)
    assert capsys.readouterr().out == ""


def attend(vae: Any, device: torch.device, kind: type = AttnProcessor) -> None:
    """Let the VAE's attention compute by a processor of another type."""
    for module in vae.modules():
        if isinstance(module, Attention):
            module.set_processor(kind())


def offload(vae: Any, device: torch.device) -> None:
    """Let the modules of the decoder come to the device one by one."""
    apply_group_offloading(vae.decoder, device, torch.device("cpu"), offload_type="leaf_level")


CHANGES: dict[str, Callable[[Any, torch.device], Any]] = {
    "mid_block.attentions.0 has the attention processor diffusers": attend,
    "encoder.conv_in has a hook": lambda vae, device: apply_layerwise_casting(vae, torch.float32, torch.float64),
    "decoder.conv_in has a hook": offload,
    "decoder has a hook": lambda vae, device: setattr(vae.decoder, "_hf_hook", Offload()),  # as sequential offloading
    "decoder.mid_block has a hook": lambda vae, device: vae.decoder.mid_block.register_forward_hook(lambda *_: None),
}


class Offload:
    """A hook of accelerate that does nothing."""


def changed(rank: int, world: int, device: torch.device) -> list[tuple[str, set[int], float]]:
    """Return what is said of VAEs that change after they were shared, the heights they decode, and the errors."""
    found, x = [], latents(1).to(device)
    for change in (lambda vae, device: None, lambda vae, device: vae.fuse_qkv_projections(), *CHANGES.values()):
        vae = pipelines.decoder(1).to(device)
        made = MeshVAE(vae, make_mesh(device, cfg=1) if world > 1 else Mesh.single(device), "collective", kernels=True)
        change(vae, device)
        with seen(vae.decoder) as shapes:
            got = made.decode(x + rank).sample
        error = (got - type(vae).decode(vae, x).sample).abs().max().item()
        found.append((str(why_unknown(vae)), {shape[2] for shape in shapes}, error))
        assert str(made.unknown) == found[-1][0]
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_hooks_and_processors_that_strips_do_not_know_keep_a_vae_whole(ranks: Pool, world: int) -> None:
    for plain, fused, *others in ranks.run(world, changed):
        for told, heights, error in (plain, fused):
            assert told == "None"
            assert (max(heights) < SHAPE[1]) == (world > 1)
            assert error < CLOSE
        for (told, heights, error), name in zip(others, CHANGES, strict=True):
            assert name in told
            assert heights == {SHAPE[1]}
            assert error < CLOSE


def unlike(rank: int, world: int, device: torch.device) -> tuple[str, str]:
    """Return what differs between ranks: an error of their weights' memory, and what is said of captures that fail."""
    vae = pipelines.decoder(1).to(device)
    made = MeshVAE(vae, make_mesh(device, cfg=1), "collective", Captures(fails=True))
    if rank:
        vae.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="got channels-last weights of the VAE") as error:
        made.decode(latents(1).to(device))
    vae.to(memory_format=torch.contiguous_format)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for _ in range(2):
            made.decode(latents(2).to(device))
    return str(error.value), said.getvalue()


def test_ranks_that_differ_decide_alike_and_one_prints(ranks: Pool) -> None:
    first, second = ranks.run(2, unlike)
    assert first[0] == second[0]
    assert first[1].count("CUDA graph capture failed, running eagerly: operation not permitted") == 1
    assert second[1] == ""


def test_a_graph_of_other_arithmetic_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures()
    made = MeshVAE(pipelines.decoder(1), Mesh.single(), "collective", captures)
    settings = torch.backends.cudnn.flags(deterministic=True, allow_tf32=False), torch.backends.cudnn.flags()
    for number, setting in enumerate(settings, start=1):
        with setting:
            made.decode(latents(1))
            made.decode(latents(1))
        assert len(captures.made) == number
        assert [each.released for each in captures.made] == [True] * (number - 1) + [False]
    monkeypatch.setattr(exact, "is_on", lambda: True)
    made.decode(latents(1))
    assert len(captures.made) == 3


def two_pipelines(rank: int, world: int, device: torch.device) -> list[float]:
    """Return differences to the truth while two pipelines share a VAE, after one is released, and of its copy."""
    one, other = pipelines.flux().to(device), pipelines.flux().to(device)
    other.vae = one.vae
    truth, given = one.vae.decode(latents(1).to(device)).sample, latents(1).to(device) + rank
    for pipe, transport in ((one, "peer"), (other, "collective")):
        seqpar.parallelize(pipe, make_mesh(device, cfg=1), transport=transport)
    found = [one.vae.decode(given).sample, copy.deepcopy(one.vae).decode(given - rank).sample]
    seqpar.release(one)
    found.append(other.vae.decode(z=given).sample)
    seqpar.release(other)
    found.append(one.vae.decode(given - rank).sample)
    return [(x - truth).abs().max().item() for x in found]


def test_pipelines_share_a_vae_until_the_last_is_released(ranks: Pool) -> None:
    for found in ranks.run(2, two_pipelines):
        assert max(found) < CLOSE


# Pictures of our own pipelines -----------------------------------------------------------------------------------


def ours(rank: int, world: int, device: torch.device, axes: dict[str, int], transport: str) -> list[tuple[Any, ...]]:
    """Return pictures of latents by every way, with the numbers of pictures that this rank counted.

    The second pictures of a size are captured, by each rank alone where it has whole ones.
    """
    vae, found = pipelines.decoder(1).to(device), []
    made = MeshVAE(vae, make_mesh(device, **axes), transport, Captures())
    for count, wish in ((1, "auto"), (3, "strips"), (3, "pictures"), (4, "auto")):
        counted, made.mode = list[int](), wish
        images = made.pictures(latents(count).to(device) + rank, counted.append)
        way = made.spread(count, SHAPE, wish)
        found.append((images, str(way), counted == list(range(way.shard(count).sizes[way.axis.rank]))))
    made.release()
    return found


@pytest.mark.parametrize(
    ("world", "axes", "transport"),
    [
        (1, {}, "collective"),
        (2, {"cfg": 2}, "collective"),
        (3, {"cfg": 1}, "peer"),
        (4, {"data": 2, "cfg": 1}, "collective"),
    ],
    ids=str,
)
def test_our_pictures_are_those_of_one_rank_by_every_way(
    ranks: Pool, world: int, axes: dict[str, int], transport: str
) -> None:
    vae, truth = pipelines.decoder(1), []
    for count in (1, 3, 3, 4):
        decoded = [vae.decode(x[None] / vae.config.scaling_factor + vae.config.shift_factor) for x in latents(count)]
        truth.append((torch.cat([x.sample for x in decoded]).float() / 2 + 0.5).clamp(0, 1))
    for found in ranks.run(world, ours, axes, transport):
        for (images, way, counted), wanted in zip(found, truth, strict=True):
            assert counted
            assert images.dtype == torch.float32
            error = (images - wanted).abs().max()
            assert error == 0 if "pictures" in way and ranks.device == "cpu" else error < 1e-6


# Graphs ----------------------------------------------------------------------------------------------------------


def graphed(rank: int, world: int, device: torch.device) -> list[list[Any]]:
    """Return (replays, released) of all graphs after calls of several sizes, and the largest error so far."""
    vae, captures, found = pipelines.decoder(1).to(device), Captures(), list[list[Any]]()
    made = MeshVAE(vae, make_mesh(device, cfg=1) if world > 1 else Mesh.single(device), "collective", captures)

    def call(height: int, times: int = 1, **named: Any) -> None:
        worst = 0.0
        for seed in range(times):
            x = random((1, 4, height, 7), seed, device)
            got = made.decode(x + rank, **named)
            worst = max(worst, (got[0] - type(vae).decode(vae, x).sample).abs().max().item())
        found.append([*((each.replays, each.released) for each in captures.made), worst])

    call(8, 3)  # eager, captured, replayed
    call(8, 1, return_dict=False)  # the same graph
    call(9, 2)
    call(10, 2)  # the third graph takes the place of the first
    vae.decoder.conv_in.weight.data = vae.decoder.conv_in.weight.data * 2  # weights that moved
    call(10, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_mesh, "PIXELS", 10 * 7 * 4 // world - 1)
        call(10)  # too large
    made.release()
    call(8)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_second_call_of_a_kind_is_captured_and_two_graphs_are_kept(ranks: Pool, world: int) -> None:
    for found in ranks.run(world, graphed):
        graphs = [each[:-1] for each in found]
        assert graphs[:2] == [[(2, False)], [(3, False)]]
        assert graphs[2] == [(3, False), (1, False)]
        assert graphs[3] == [(3, True), (1, False), (1, False)]
        assert graphs[4] == graphs[5] == [(3, True), (1, False), (1, True), (2, False)]
        assert graphs[6] == [(3, True), (1, True), (1, True), (2, True)]
        assert max(each[-1] for each in found) < CLOSE


def test_vaes_that_are_not_known_are_never_captured() -> None:
    captures, vae = Captures(), pipelines.decoder(1)
    vae.decoder.conv_act = nn.Mish()
    made = MeshVAE(vae, Mesh.single(), "collective", captures)
    for _ in range(3):
        made.decode(latents(1))
    assert captures.made == []
    assert made.unknown is not None


def replayed(rank: int, world: int, device: torch.device) -> float:
    """Return the largest error of strips that a GPU replays, by the transport of the plan."""
    pipe, worst = pipelines.flux().to(device), 0.0
    truth = [pipe.vae.decode(latents(1, seed).to(device)).sample for seed in range(4)]
    seqpar.parallelize(pipe, make_mesh(device, cfg=1))
    for seed, wanted in enumerate(truth):
        worst = max(worst, (pipe.vae.decode(latents(1, seed).to(device) + rank).sample - wanted).abs().max().item())
    seqpar.release(pipe)
    return worst


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_gpus_replay_whole_pictures_and_strips(ranks: Pool, world: int) -> None:
    assert max(ranks.run(world, replayed)) < CLOSE
