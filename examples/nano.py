"""Sequence parallelism in one file: pictures, denoised by several processes at once, each of which holds some tokens.

    python examples/nano.py                                                       # one process
    torchrun --nproc_per_node=2 examples/nano.py                                  # two, which exchange heads (Ulysses)
    torchrun --nproc_per_node=4 examples/nano.py cat rocket --attention ring      # four, in a ring

It samples the model of classes that comes with seqpar (48 emoji, 64 x 64 pixels) by torch alone; seqpar is not
imported. Read it from top to bottom: split, meet in attention, compute, sample, decode. The engine does the same, fast
and for many models; in fp64 both agree to 1e-11 on any number of ranks (`tests/examples/test_nano.py`).

The idea: in a transformer a token meets other tokens in attention, and nowhere else. Norms, projections and the MLP
treat each token alone. So each rank takes some tokens of the picture, keeps them from the first noise to the last step,
and talks to other ranks inside attention only.

Names of tensors carry their shapes: B rows of the batch, L all tokens, l tokens of this rank, m tokens of a block of
keys, E width of the model, H all heads, h heads of this rank, D width of a head, C channels, Y x X size of a latent.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

MODEL = Path(__file__).parents[1] / "seqpar_demo" / "emoji-dit"
HEADS, LAYERS, PATCH, CHANNELS, SIDE, NO_CLASS = 5, 7, 2, 4, 16, 1000  # as its config.json says
SCALING = 0.6488577859882092  # as that of its decoder says
GUIDANCE = 4.0

Weights = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# 1. Split ------------------------------------------------------------------------------------------------------------
# All ranks know one rule by which things are split. So no rank ever has to ask how much another one has.


def shares(total: int, world: int) -> list[int]:
    """Return how many of `total` things each rank has; the first ones take the rest: shares(64, 3) = [22, 21, 21]."""
    return [total // world + (rank < total % world) for rank in range(world)]


@dataclass(frozen=True)
class Ranks:
    """This rank's number, the number of all ranks, and the two ways in which they talk."""

    rank: int
    world: int

    def mine(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's share of a tensor that every rank has whole."""
        return x.split(shares(x.shape[dim], self.world), dim)[self.rank]

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Send parts[j] to rank j, for all j at once, and return what each rank sent to this one: an all-to-all."""
        if self.world == 1:
            return list(parts)
        sent, counts = torch.cat([part.flatten() for part in parts]), [math.prod(shape) for shape in shapes]
        received = sent.new_empty(sum(counts))
        dist.all_to_all_single(received, sent, counts, [part.numel() for part in parts])
        return [part.view(shape) for part, shape in zip(received.split(counts), shapes, strict=True)]

    def pass_on(self, block: Tensor, following: Tensor) -> list[dist.Work]:
        """Start to send a block to the next rank and to receive that of the rank before; wait for what is returned."""
        right, left = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        ends = [dist.P2POp(dist.isend, block, right), dist.P2POp(dist.irecv, following, left)]
        return dist.batch_isend_irecv(ends)


# 2. Meet in attention ------------------------------------------------------------------------------------------------


def attention(q_BlHD: Tensor, k_BmHD: Tensor, v_BmHD: Tensor) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(D)) v, and the logarithm of the denominator of its softmax, (B, l, H, 1)."""
    scores_BlHm = torch.einsum("blhd,bmhd->blhm", q_BlHD, k_BmHD) / math.sqrt(q_BlHD.shape[-1])
    lse_BlH1 = scores_BlHm.logsumexp(-1, keepdim=True)
    return torch.einsum("blhm,bmhd->blhd", (scores_BlHm - lse_BlH1).exp(), v_BmHD), lse_BlH1


def ulysses(q_BlHD: Tensor, k_BlHD: Tensor, v_BlHD: Tensor, ranks: Ranks, total: int) -> Tensor:
    """Attend by exchanging heads (DeepSpeed-Ulysses, arXiv 2309.14509). total: the number of all tokens.

    Heads never meet each other. So ranks swap "all heads of some tokens" for "some heads of all tokens", attend with
    these heads as if they were alone, and swap back. Data moves, no arithmetic changes. The more ranks, the less each
    one sends; but no more ranks can work than there are heads.
    """
    batch, mine, heads, dim = q_BlHD.shape
    tokens, heads_of = shares(total, ranks.world), shares(heads, ranks.world)
    qkv_3BlHD, h = torch.stack((q_BlHD, k_BlHD, v_BlHD)), heads_of[ranks.rank]  # one exchange for all three
    received = ranks.exchange(qkv_3BlHD.split(heads_of, dim=3), [(3, batch, count, h, dim) for count in tokens])
    out_BLhD, _ = attention(*torch.cat(received, dim=2))  # all tokens, some heads
    received = ranks.exchange(out_BLhD.split(tokens, dim=1), [(batch, mine, count, dim) for count in heads_of])
    return torch.cat(received, dim=2)  # some tokens, all heads


def ring(q_BlHD: Tensor, k_BlHD: Tensor, v_BlHD: Tensor, ranks: Ranks, total: int) -> Tensor:
    """Attend by passing keys and values around (Ring Attention, arXiv 2310.01889). total: the number of all tokens.

    Queries stay. Each rank attends to the block of keys and values that it holds, while it passes that block on; after
    N - 1 turns every block has been everywhere. No rank holds more than two blocks; the number of heads is free.

    Softmax divides by a sum over all keys, which no rank has. But results over two sets of keys are easily merged: with
    denominators exp(a) and exp(b), that of both is exp(a) + exp(b), and each result counts by its share of it. This
    "online softmax" is exact but for rounding.
    """
    batch, _, heads, dim = q_BlHD.shape
    block_2BmHD, sizes = torch.stack((k_BlHD, v_BlHD)), shares(total, ranks.world)
    out_BlHD, lse = torch.zeros_like(q_BlHD), q_BlHD.new_tensor(-math.inf)  # nothing seen yet: a denominator of 0
    for turn in range(ranks.world):
        owner = (ranks.rank - turn - 1) % ranks.world  # of the block that comes next
        following = q_BlHD.new_empty(2, batch, sizes[owner], heads, dim)
        travelling = ranks.pass_on(block_2BmHD, following) if turn + 1 < ranks.world else []
        part_BlHD, part_lse = attention(q_BlHD, *block_2BmHD)  # meanwhile
        both = torch.logaddexp(lse, part_lse)
        out_BlHD = out_BlHD * (lse - both).exp() + part_BlHD * (part_lse - both).exp()
        for transfer in travelling:
            transfer.wait()
        block_2BmHD, lse = following, both
    return out_BlHD


STRATEGIES = {"ulysses": ulysses, "ring": ring}


# 3. Compute: a DiT (arXiv 2212.09748) on some of its tokens ----------------------------------------------------------
# Nothing here knows about ranks. `attend` stands for one of the two functions above.


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Apply a linear layer."""
    return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])


def modulate(x_BlE: Tensor, shift_BE: Tensor, scale_BE: Tensor, eps: float = 1e-6) -> Tensor:
    """Normalise each token, then shift and scale it as timestep and class demand (adaLN)."""
    return F.layer_norm(x_BlE, x_BlE.shape[-1:], eps=eps) * (1 + scale_BE[:, None]) + shift_BE[:, None]


def block(x_BlE: Tensor, condition_BE: Tensor, weights: Weights, name: str, attend: Attend) -> Tensor:
    """Return the tokens after one block: attention, then an MLP, each with a gate, added to its input."""
    rows = linear(F.silu(condition_BE), weights, f"{name}.norm1.linear").chunk(6, dim=-1)
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = rows
    h = modulate(x_BlE, shift, scale)
    q, k, v = (linear(h, weights, f"{name}.attn1.to_{each}").unflatten(-1, (HEADS, -1)) for each in "qkv")
    out_BlHD = attend(q, k, v)  # the one line in which tokens of other ranks come in
    x = x_BlE + gate[:, None] * linear(out_BlHD.flatten(2), weights, f"{name}.attn1.to_out.0")
    h = linear(modulate(x, mlp_shift, mlp_scale, eps=1e-5), weights, f"{name}.ff.net.0.proj")
    return x + mlp_gate[:, None] * linear(F.gelu(h, approximate="tanh"), weights, f"{name}.ff.net.2")


def predict(x_BlC: Tensor, positions_lE: Tensor, t: int, classes_B: Tensor, weights: Weights, attend: Attend) -> Tensor:
    """Return the noise that the model sees in these tokens at timestep t, for each row's class."""
    emb, embed = "transformer_blocks.0.norm1.emb", weights["pos_embed.proj.weight"].flatten(1)
    x = F.linear(x_BlC, embed, weights["pos_embed.proj.bias"]) + positions_lE
    angles = t * torch.exp(-math.log(10000) * torch.arange(128) / 127)
    waves = torch.cat((angles.cos(), angles.sin())).to(x)
    condition = linear(waves, weights, f"{emb}.timestep_embedder.linear_1")
    condition = linear(F.silu(condition), weights, f"{emb}.timestep_embedder.linear_2")
    condition_BE = condition + weights[f"{emb}.class_embedder.embedding_table.weight"][classes_B]
    for layer in range(LAYERS):
        x = block(x, condition_BE, weights, f"transformer_blocks.{layer}", attend)
    shift, scale = linear(F.silu(condition_BE), weights, "proj_out_1").chunk(2, dim=-1)
    noise = linear(modulate(x, shift, scale), weights, "proj_out_2").unflatten(-1, (PATCH, PATCH, CHANNELS))
    return noise.movedim(-1, -3).flatten(-3)  # in the order of `patchify`, as the state


def positions(side: int, width: int) -> Tensor:
    """Return a vector for the place of each token, (side * side, width): sines and cosines of its column and row."""
    waves = 10000 ** (-torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    angles = torch.arange(side, dtype=torch.float64)[:, None] * waves
    place = torch.cat((angles.sin(), angles.cos()), dim=-1)
    columns, rows = place[None].expand(side, -1, -1), place[:, None].expand(-1, side, -1)
    return torch.cat((columns, rows), dim=-1).flatten(0, 1).float()


def patchify(x_BCYX: Tensor) -> Tensor:
    """Cut latents into patches of 2 x 2. The numbers of a patch are a token; tokens follow row after row."""
    x = x_BCYX.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # B C rows PATCH columns PATCH
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpatchify(x_BLC: Tensor) -> Tensor:
    """Put the patches of latents together again."""
    x = x_BLC.unflatten(2, (CHANNELS, PATCH, PATCH)).unflatten(1, (SIDE // PATCH, SIDE // PATCH))
    return x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


# 4. Sample: noise becomes a latent -----------------------------------------------------------------------------------


def sample(classes: Sequence[int], steps: int, seed: int, weights: Weights, ranks: Ranks, strategy: str) -> Tensor:
    """Return latents (B, C, Y, X) of these classes, complete on every rank: DDIM (arXiv 2010.02502) with guidance."""
    like, rows, total = weights["proj_out_1.weight"], len(classes), (SIDE // PATCH) ** 2
    # every rank draws the whole noise from the same seed, and keeps its own tokens
    noise = torch.randn(rows, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).to(like)
    x_BlC = ranks.mine(patchify(noise), dim=1)
    positions_lE = ranks.mine(positions(SIDE // PATCH, like.shape[1]), dim=0).to(like)
    attend = partial(STRATEGIES[strategy], ranks=ranks, total=total)
    # guidance (arXiv 2207.12598): the model sees each picture twice, with its class and without one
    twice = torch.tensor([*classes, *[NO_CLASS] * rows], device=like.device)
    stride, alphas = 1000 // steps, torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0).tolist()
    for t in reversed(range(0, steps * stride, stride)):
        with_class, without = predict(torch.cat((x_BlC, x_BlC)), positions_lE, t, twice, weights, attend).chunk(2)
        noise_BlC = without + GUIDANCE * (with_class - without)
        # the noise is known, so is the picture without it; go back to a state with less noise
        alpha, following = alphas[t], alphas[t - stride] if t >= stride else 1.0
        clean_BlC = (x_BlC - (1 - alpha) ** 0.5 * noise_BlC) / alpha**0.5
        x_BlC = following**0.5 * clean_BlC + (1 - following) ** 0.5 * noise_BlC
    # the first time that tokens leave their rank outside of attention: everyone gets everything
    shapes = [(rows, count, x_BlC.shape[2]) for count in shares(total, ranks.world)]
    return unpatchify(torch.cat(ranks.exchange([x_BlC] * ranks.world, shapes), dim=1))


# 5. Decode: a latent becomes a picture -------------------------------------------------------------------------------
# A small convolutional network makes 64 x 64 pixels of 16 x 16. The engine splits it, too; here each rank decodes all.


def conv(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Apply a convolution of 3 x 3, or one of 1 x 1."""
    kernel = weights[f"{name}.weight"]
    return F.conv2d(x, kernel, weights[f"{name}.bias"], padding=kernel.shape[-1] // 2)


def norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Normalise groups of channels, then apply SiLU."""
    return F.silu(F.group_norm(x, 8, weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-6))


def resnet(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Add two convolutions to their input."""
    h = conv(norm(x, weights, f"{name}.norm1"), weights, f"{name}.conv1")
    h = conv(norm(h, weights, f"{name}.norm2"), weights, f"{name}.conv2")
    return h + (conv(x, weights, f"{name}.conv_shortcut") if f"{name}.conv_shortcut.weight" in weights else x)


def decode(latents_BCYX: Tensor, weights: Weights) -> Tensor:
    """Return pictures (B, 3, 4 Y, 4 X) in [0, 1]."""
    x = conv(conv(latents_BCYX / SCALING, weights, "post_quant_conv"), weights, "decoder.conv_in")
    for part in ("mid_block", "up_blocks.0", "up_blocks.1", "up_blocks.2"):
        for index in range(2):
            x = resnet(x, weights, f"decoder.{part}.resnets.{index}")
        if part in ("up_blocks.0", "up_blocks.1"):  # twice as many pixels along each side
            x = conv(F.interpolate(x, scale_factor=2.0), weights, f"decoder.{part}.upsamplers.0.conv")
    x = conv(norm(x, weights, "decoder.conv_norm_out"), weights, "decoder.conv_out")
    return (x / 2 + 0.5).clamp(0, 1)


# All together --------------------------------------------------------------------------------------------------------


def read(part: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> Weights:
    """Return the weights of a part of the model. Every rank has all of them: it is the tokens that are many."""
    weights = load_file(MODEL / part / "diffusion_pytorch_model.safetensors", device=device)
    return {name: weight.to(dtype) for name, weight in weights.items()}


@torch.inference_mode()
def main() -> None:
    """Generate an image of each class and write them side by side."""
    names = list(json.loads((MODEL / "model_index.json").read_text())["id2label"].values())
    parser = argparse.ArgumentParser(description="Generates images of classes; their tokens are split over all ranks.")
    parser.add_argument("classes", nargs="*", default=["cat", "rocket", "frog", "whale"])
    parser.add_argument("--attention", choices=STRATEGIES, default="ulysses")
    for name, default in {"--steps": 25, "--seed": 0, "--out": "nano.png"}.items():
        parser.add_argument(name, type=type(default), default=default)
    args = parser.parse_args()
    if not {*args.classes} <= {*names} or not 1 <= args.steps <= 1000:
        parser.error(f"got {args.classes}, {args.steps} steps; expected 1 to 1000 steps, classes of {', '.join(names)}")
    # torchrun starts the processes and tells each its number
    ranks = Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    device = f"cuda:{ranks.rank}" if torch.cuda.device_count() >= ranks.world else "cpu"
    if device != "cpu":
        torch.cuda.set_device(device)
    if ranks.world > 1:
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    classes = [names.index(name) for name in args.classes]
    latents = sample(classes, args.steps, args.seed, read("transformer", device), ranks, args.attention)
    pictures_B3YX = decode(latents, read("vae", device))
    if ranks.rank == 0:
        row_YX3 = torch.cat(list(pictures_B3YX), dim=2).permute(1, 2, 0)
        Image.fromarray((255 * row_YX3).round().byte().cpu().numpy()).save(args.out)
        print(f"{args.out}: {', '.join(args.classes)}, by {ranks.world} rank(s)")
    if ranks.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
