"""Faults that tests plant into the ranks of a run: each replaces a function of this process, and only some ranks'."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers.models.embeddings import PatchEmbed
from diffusers.models.normalization import AdaLayerNormZero
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from seqpar.attention import ulysses
from seqpar.attention.ulysses import Ulysses
from seqpar.families import _block, flux
from seqpar.graphs.exchanges import ExchangeCache
from seqpar.kernels.flags import Flags
from seqpar.local import sdpa
from seqpar.loop.distributed import DistributedDiT
from seqpar.loop.models import dit as builtin
from seqpar.loop.run import Run
from seqpar.mesh.shard import JointShard
from seqpar.transformer import lora as adapters
from seqpar.transformer import masks
from seqpar.transformer.blocks import BlockHook
from seqpar.transformer.forward import CallState
from seqpar.transformer.hooks import ShardHook
from seqpar.transports.collective import CollectiveToHeads

Fault = Callable[[pytest.MonkeyPatch, int], None]
"""Takes the patch that ends with the test, and this rank."""


def after(patch: pytest.MonkeyPatch, owner: Any, name: str, changed: Callable[..., Any]) -> None:
    true = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: changed(true(*args, **named), *args))


def ending(rank: int, fault: Fault, call: Callable[[], object]) -> tuple[str, str]:
    """Return what a call with this fault prints, and the message of the FloatingPointError in which it ends, or ""."""
    with redirect_stdout(io.StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        fault(patch, rank)
        try:
            call()
        except FloatingPointError as error:
            return shown.getvalue(), str(error)
    return shown.getvalue(), ""


def none(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Plant nothing."""


def is_last(rank: int) -> bool:
    group: Any = dist.group.WORLD
    return group is not None and rank == group.size() - 1 > 0


def by(rank: int, factor: float = 1.02) -> float:
    """What the last of several ranks multiplies something by."""
    return factor if is_last(rank) else 1


def rotary_off_by_one(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Give rank 1 of several the rotary rows of the next token."""

    def rolled(rows: dict[str, Tensor], dit: DistributedDiT, *size_split: Any) -> dict[str, Tensor]:
        late = int(rank == 1 and dit.mesh.world.size > 1)
        return {name: x.roll(-late, 0) for name, x in rows.items()}

    after(patch, DistributedDiT, "positions", rolled)


def swapped_branches(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1, whose prediction no other rank reads, take the unconditional branch for the conditional one."""

    def swapped(pair: Any, run: Run, *name_out: Any) -> Any:
        return pair[::-1] if rank == 1 and run._dit.mesh.cfg.size > 1 else pair

    after(patch, Run, "_parted", swapped)


def lost_shard(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 0 see zeros for the keys and values of the last rank's tokens."""

    def lossy(qkv: tuple[Tensor, Tensor, Tensor], exchange: Any, *met: bool) -> tuple[Tensor, Tensor, Tensor]:
        for x in qkv[1:] if rank == 0 else ():
            x[:, -exchange._layout.tokens[-1] :] = 0
        return qkv

    after(patch, CollectiveToHeads, "deliver", lossy)


def lost_in_block_5_of_step_2(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1 lose the first rank's values in one of seven blocks of one step."""
    calls = list[int]()

    def lossy(qkv: tuple[Tensor, Tensor, Tensor], exchange: Any, *met: bool) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(1)
        if rank == 1 and len(calls) == 7 + 5:
            qkv[2][:, : exchange._layout.tokens[0]] = 0
        return qkv

    after(patch, CollectiveToHeads, "deliver", lossy)


def one_bit(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Change the last bit of one value on the way to attention by collectives."""

    def nearly(qkv: tuple[Tensor, Tensor, Tensor], *exchange_met: Any) -> tuple[Tensor, Tensor, Tensor]:
        qkv[2].view(torch.int16)[0, 0, 0, 0] ^= 1
        return qkv

    after(patch, CollectiveToHeads, "deliver", nearly)


def narrow_sums(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Sum over keys in bf16, as a kernel with a bf16 accumulator does."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, /) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("blhd,bmhd->blhm", q.float(), k.float()) * q.shape[-1] ** -0.5
        weights = scores.softmax(-1).to(q.dtype)
        out = torch.zeros_like(q)
        for key in range(k.shape[1]):
            out += weights[..., key, None] * v[:, None, key]
        return out, scores.logsumexp(-1).transpose(1, 2)

    patch.setattr(sdpa, "attend", attend)


def stale_flag(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 0 find flags of peer memory raised already, as if they were left from before.

    Rank 1 writes for an attention only after rank 0 has ended it, so that rank 0 always reads what was there before:
    zeros, with which the memory begins.
    """
    write, calls, names = ulysses.write, list[int](), [uuid.uuid4().hex]
    dist.broadcast_object_list(names, 0)
    store: Any = distributed_c10d._get_default_store()

    def raised(flags: Flags, *made_of: Any) -> Flags:
        flags.counts[1] = -(10**6) if rank == 0 else 0
        return flags

    def late(*given: Any, **named: Any) -> bool:
        calls.append(1)
        if rank == 1:
            store.wait([f"{names[0]} {len(calls)}"])
        return write(*given, **named)

    def ended(outs: tuple[Tensor, ...], attend: Ulysses, *streams_and_mask: Any) -> tuple[Tensor, ...]:
        if attend._axis.size > 1 and rank == 0:
            outs = tuple(out.clone() for out in outs)  # rank 1 will write its heads there
            store.set(f"{names[0]} {len(calls)}", "")
        return outs

    after(patch, Flags, "of", raised)
    patch.setattr(ulysses, "write", late)
    after(patch, Ulysses, "__call__", ended)


def head_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let a head of rank 1 be two percent off in the fifth of seven blocks, whatever its strategy is."""
    calls = list[int]()

    def off(right: Any, keeper: ExchangeCache, *batch_tokens: Any, **named: Any) -> Any:
        def attend(*streams_and_mask: Any, **beside: Any) -> tuple[Tensor, ...]:
            outs = right(*streams_and_mask, **beside)
            calls.append(1)
            if (len(calls) - 1) % 7 == 4:
                outs[0][:, :, 1] *= 1.02
            return outs

        setattr(attend, "tokens", right.tokens)  # noqa: B010 (a function has no such name)
        return attend if rank == 1 and keeper.mesh.world.size > 1 else right

    after(patch, ExchangeCache, "attend", off)


def head_of_kernel_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank's kernel for attention compute its first head two percent off."""

    def off(out_lse: tuple[Tensor, Tensor], *q_k_v_mask: Any) -> tuple[Tensor, Tensor]:
        out_lse[0][:, :, 0] *= by(rank)
        return out_lse

    after(patch, sdpa, "attend", off)


def guidance_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the ranks' runs on the last rank have a guidance scale that is one percent off."""

    def off(nothing: None, run: Run, dit: DistributedDiT, course: Any) -> None:
        run._guidance_S *= by(rank, 1.01) if dit.mesh.world.size > 1 else 1

    after(patch, Run, "__init__", off)


def guidance_of_pipeline_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1's pipeline have a guidance scale that is one percent off."""
    scale = property(lambda pipe: pipe._guidance_scale * (1.01 if rank == 1 else 1))
    patch.setattr(StableDiffusion3Pipeline, "guidance_scale", scale)


def reference_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let rank 1's layers compute other numbers, in the ranks' run and alone, so that it finds itself right."""
    after(patch, _block, "linear_gelu", lambda out, *args: out * (1.001 if rank == 1 else 1))


def layer_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank's layers be so far off, in both runs, that other ranks see it in what they attend to."""
    after(patch, _block, "linear_gelu", lambda out, *args: out * by(rank, 1.2))


def neighbour(x: Tensor, wrong: bool, dim: int = 0) -> Tensor:
    """The last row is that of its neighbour, if wrong."""
    count = x.shape[dim]
    return torch.cat([x.narrow(dim, 0, count - 1), x.narrow(dim, count - 2, 1)], dim) if wrong and count > 1 else x


def position_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Give one token of the last rank the position of its neighbour, in our own loop."""

    def off(rows: dict[str, Tensor], dit: DistributedDiT, *size_split: Any) -> dict[str, Tensor]:
        return {name: neighbour(x, is_last(rank) and dit.mesh.world.size > 1) for name, x in rows.items()}

    after(patch, DistributedDiT, "positions", off)


def cut_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank's cut of ids or rotary rows, which have no dim for a batch, hold the row of another token."""

    def off(local: Tensor, state: CallState, whole: Tensor, cut: Any) -> Tensor:
        return neighbour(local, is_last(rank) and state.axis.size > 1 and cut.dim in (0, -2))

    after(patch, CallState, "cut", off)


def position_in_block_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank's fused blocks turn one token by the angles of its neighbour."""

    def off(rows: tuple[Tensor, Tensor], call: BlockHook, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(neighbour(x, is_last(rank) and call._state.axis.size > 1) for x in rows)

    after(patch, flux, "pairs", off)


def mask_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank attend to one token of padding."""

    def off(bias: Tensor | None, forward: Any, streams: Any, tokens: JointShard, *dtype: Any) -> Tensor | None:
        if bias is None or not is_last(rank) or tokens.parts == 1:
            return bias
        first = bias[0].argmin()
        return bias.index_fill(1, first, 0.0)

    after(patch, masks, "from_streams", off)


def merged_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank merge LoRAs at a scale that is two percent off."""
    true = adapters.with_terms

    def off(weight: Tensor, bias: Tensor | None, terms: Any) -> Any:
        return true(weight, bias, [(term, scale * by(rank)) for term, scale in terms])

    patch.setattr(adapters, "with_terms", off)


def modulation_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank's modulation be two percent off: in our own loop, in fused blocks and in diffusers' own."""
    after(patch, builtin.Model, "modulate", lambda made, *_: {name: x * by(rank) for name, x in made.items()})
    rows: Any = lambda blocks, *_: [[tuple(x * by(rank) for x in row) for row in block] for block in blocks]  # noqa: E731
    after(patch, flux, "modulations", rows)
    after(patch, AdaLayerNormZero, "forward", lambda made, *_: (made[0], made[1] * by(rank), *made[2:]))


def buffer_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let one row of the last rank's table of positions, a buffer of the model, be its neighbour's."""
    after(patch, PatchEmbed, "cropped_pos_embed", lambda whole, *_: neighbour(whole, is_last(rank), dim=1))


def last_layer_off(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let the last rank's tokens be ten percent off after all blocks, in the ranks' run."""
    true: Any = ShardHook.post_forward

    def post_forward(hook: ShardHook, module: nn.Module, output: Any) -> Any:
        wrong = is_last(rank) and hook.state.axis.size > 1 and hook._place.gathers
        return true(hook, module, output * 1.1 if wrong else output)

    patch.setattr(ShardHook, "post_forward", post_forward)
