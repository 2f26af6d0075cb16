"""Writes docs/analysis.md, whose numbers are all computed: by `analysis_tables.py`, and here those of its sentences.

python -m docs.tools.analysis_page --write        # the plots: python -m docs.tools.analysis_plots
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

from docs.tools import analysis as a
from docs.tools import analysis_plots as plots
from docs.tools import analysis_tables as t
from seqpar.planner.predict import predict
from seqpar.planner.rates import H200
from seqpar.types.facts import Layout

AS_IT_IS: Any = {"break_long_words": False, "break_on_hyphens": False}
PAGE = Path(__file__).parents[1] / "analysis.md"


def beginning() -> str:
    """Return what the page is about, and its letters."""
    return """# What a step costs, and what each kind of parallelism sends

The notes with which this project began count the FLOPs and the memory accesses of each operation of a diffusion
transformer, and argue from the counts for splitting the sequence. This page does their arithmetic again with the GPUs
of today, and says where their crossings lie now. `python -m docs.tools.analysis_page --write` makes the page:
`docs/tools/analysis.py` computes its numbers by the [planner's](planner.md) formulas, and a test fails if the page
says others. `seqpar plan --model MODEL --gpus 4 --explain` prints the same for one model.

A multiply and an add are 2 FLOPs. Elements are those read and written, weights and results included, when every
operation runs once and alone; an element of bf16 has 2 bytes. b is the number of rows of the batch, s of tokens, d the
width, z the number of heads, c of text tokens, e their width, T of frames, P of patches of a frame (s = T P), L of
layers, N of GPUs. R is a GPU's rate of matrix products, M that of its memory.
"""


def operations() -> str:
    """Return the section on FLOPs and bytes."""
    rows = {row.name: row.cost for row in t.operations(t.B, t.T, t.P, t.D, t.Z, t.C, t.E)}
    whole, spatial = rows["self-attention"], rows["spatial attention"] + rows["temporal attention"]
    on_chip, in_memory, ridge = whole, rows["the same, scores in memory"], t.MEASURED.ridge
    return f"""## FLOPs and memory access

Worked for b = {t.B}, {t.T} frames of {t.P} patches (s = {t.S:,}), d = {t.D} in {t.Z} heads, c = {t.C} text tokens of
e = {t.E}. Attention includes its projections; q, k and v are one product. Scores stay on chip unless a row says
otherwise.

{t.operations_table()}

- Attention over all tokens takes {whole.flops / spatial.flops:.1f} times the FLOPs of spatial and temporal attention
  together.
- With scores in memory, {in_memory.elements / on_chip.elements:.0f} times as many elements move, and no size makes
  attention bound by arithmetic: of a long sequence it has {t.D // t.Z // 2} FLOPs a byte, half its head dim. On chip it
  has `s / 2`.
- Temporal attention without its projections has `T / 2` FLOPs a byte: memory bounds it up to {2 * ridge:.0f} latent
  frames on an H200.
- A denoiser has no KV cache: all tokens change in every step. The keys and values of a layer are what a ring or a
  gather sends, and of one token they are what a language model computes in a step of decoding.
"""


def crossings() -> str:
    """Return the section on the bounds of GPUs and the notes' claims."""
    rows, ridge = 2 * 256, t.MEASURED.ridge
    return f"""## Arithmetic or memory

The first columns are the makers' numbers, without sparsity; the last one is what the planner computes with: large
products, weights as products of few rows read them, and the largest exchange by peer memory
(`seqpar/planner/rates.py`). The notes' language model has 52 B parameters, 64 layers and a width of 8192.

{t.gpu_table()}

{t.notes_table()}

A product of sequence parallelism has `b s / N` rows. Large-DiT-7B with guidance has {rows} rows at 256 tokens: from
{rows / ridge:.1f} H200s on, its products are bound by reading weights, which every GPU reads whole.
That is the end of its scaling; at {t.TOKENS} tokens it comes at {2 * t.TOKENS / ridge:.0f} GPUs.
"""


def halves() -> str:
    """Return the section on attention's share."""
    slow, fast = (H200.attention[dim][-1][1] for dim in (72, 128))
    return f"""## Where attention is half of a step

{t.half_table()}

Time and FLOPs cross at different lengths, because attention and products run at different rates: DiT-XL/2 has heads of
72 values, at which attention runs at {slow:.0f} TFLOP/s instead of {fast:.0f} at 128.

![attention's share of a step against tokens](analysis-share.png)

The points are shares of the kernels' time, on one GPU or on one GPU for each branch of guidance:

{t.shares_table()}
"""


def traffic() -> str:
    """Return the section on what is sent."""
    work, load = plots.run_of(t.MODELS[0])
    ranks, tokens = t.N, t.TOKENS
    tensor = a.tensor_sent(2, tokens, work.width, ranks) * work.layers
    ratio = tensor / a.pipeline_sent(2, tokens, work.width)
    one = predict(work, load, Layout(1, 1, 1, 1, "ulysses", "peer"), H200).ms
    hidden = a.ring_hides(work, H200, t.MEASURED)
    stages = a.pipeline_parallel(work, load, ranks, H200, "peer").ms
    return f"""## Traffic

What a rank sends. The numbers are those of Large-DiT-7B (L = {work.layers}, d = {work.width}) for one guided
picture of {tokens} tokens (two rows) in bf16, with as many key-value heads as heads; with fewer, ring and gather send
that much less.

{t.traffic_table()}

- Ulysses sends `1 / N` of what tensor parallelism sends, ring and gather half: the notes are right at every size. On
  two GPUs Ulysses and gather send the same, and gather in one exchange instead of two; from three on Ulysses sends
  less.
- The notes say that pipeline stages send an order of magnitude less than tensor parallelism. It is
  `4 L (N - 1) / N` times less, here {ratio:.0f} times. A step of one picture is no faster for it: {stages:.1f} ms are
  predicted on {ranks} H200s, {one:.1f} on one, because one stage works at a time. Throughput is that of {ranks} GPUs
  only with pictures in flight in all stages.
- A ring can hide its transfers behind attention from {hidden:,.0f} tokens a GPU on. What it costs instead: attention
  in N calls, and merging their results, which rounds.
- Ulysses splits at most as many ways as there are key-value heads; further ranks would be idle in attention.

## When splitting the sequence beats splitting the model

Predicted ms a step, Ulysses / tensor parallelism, both on all GPUs with both branches of guidance in the batch, by peer
memory. Tensor parallelism is taken at its best: all its work is divided by N, the rows of elementwise kernels too.

{t.against_tensor_table()}

Few tokens are bound by reading weights, which only tensor parallelism divides; above a few hundred tokens less traffic
wins. Tensor parallelism is for models that one GPU cannot hold, and for the shortest sequences; the
planner offers none, and splits guidance first, which sends nothing in the layers.

## Memory

The notes split the sequence because long ones do not fit. That holds for training, which keeps the activations of every
layer. Inference keeps those of one layer, in proportion to the tokens, and is split to be faster. Tokens that fit by
Ulysses with all branches of guidance in the batch, by the planner's lower bound of memory:

{t.memory_table()}
"""


def times() -> str:
    """Return the section on a step's time against GPUs."""
    work, load = plots.run_of(t.MODELS[0])
    few = replace(load, tokens=256)
    planned, tensor = plots.times(t.MODELS[0], 256)["planned"][-1], a.tensor_parallel(work, few, 8, H200, "peer").ms
    return f"""## A step against GPUs

![ms a step against GPUs](analysis-gpus.png)

Predicted by the defaults of an H200 with peer memory, planned layouts with all strategies and the guidance axis; the
points are the fastest measured. At 256 tokens of the 7B eight GPUs bring nothing over four ({planned:.2f} ms; tensor
parallelism is predicted at {tensor:.2f}): the weights bound it.

{t.times_table()}
"""


def page() -> str:
    """Return the page as it is now."""
    sections = beginning(), operations(), crossings(), halves(), traffic(), times()
    return "\n\n".join(wrapped(block) for section in sections for block in section.strip().split("\n\n")) + "\n"


def wrapped(block: str) -> str:
    """Return a paragraph, or the items of a list, in lines of 120 characters; formulas in code stay in one line."""
    if block.startswith(("|", "#", "!")):
        return block
    items = re.split(r"\n(?=- )", block)
    kept = [re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(item.split())) for item in items]
    lines = [textwrap.fill(item, 120, subsequent_indent="  " * item.startswith("- "), **AS_IT_IS) for item in kept]
    return "\n".join(lines).replace("\0", " ")


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    print(page())
