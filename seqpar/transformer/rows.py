"""Splits the rows of a call's batch over mesh axes, and gathers the rows of its results.

Pipelines of SD3, LTX and PixArt double their batch for guidance instead of calling twice: each half of a `cfg` axis
computes its rows. Rows of diffusers' transformers do not depend on each other; where something that others have put
onto one may couple them (`foreign.py`), they are not split.
When it wins: whenever the batch has as many rows as there are ranks on the axes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seqpar.graphs.signature import Form, form_of
from seqpar.mesh.mesh import Axis
from seqpar.mesh.shard import Shard
from seqpar.transports.collective.point_to_point import gather

Split = tuple[Axis, tuple[int, ...]]
"""An axis and the number of rows of each of its ranks."""
STATE = ("hidden_states", "x")  # the names that transformers give their latents, whose rows are those of the batch
ROW_LISTS = ("x", "cap_feats", "img_shapes", "txt_seq_lens")  # arguments that are a list with an entry for each row

# arguments with an entry for each token, pair of rotary values or layer, even if there happen to be as many as rows
_WHOLE = re.compile(r"rotary|rope|indices|skip_layers|^(img|txt)_ids$|^control_hidden_states_scale$")


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument or a result with the floating-point tensors in it in another dtype."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)


def rows_of(arguments: dict[str, Any]) -> int:
    """Return the number of rows of a call's batch, or 0 if its latents have none."""
    state = next((arguments[name] for name in STATE if name in arguments), None)
    if isinstance(state, Tensor):
        return len(state) if state.dim() else 0
    if not isinstance(state, list) or len({(x.shape, x.dtype) for x in state}) != 1:
        return 0  # results of unequal shapes could not be gathered
    return len(state)


def split_over(axes: Sequence[Axis], rows: int) -> tuple[Axis, ...]:
    """Return the axes, in their order, whose ranks can have rows of their own."""
    taken, parts = [], 1
    for axis in axes:
        if axis.size > 1 and parts * axis.size <= rows:
            taken.append(axis)
            parts *= axis.size
    return tuple(taken)


def cut_rows(whole: dict[str, Any], axes: Sequence[Axis]) -> tuple[Form, list[Split]]:
    """Return the call that this rank computes, and how the rows were split. axes: those of `split_over`."""
    splits = []
    for axis in axes:
        rows = rows_of(whole)
        shard = Shard(rows, axis.size)
        whole = {name: _cut(name, value, rows, shard.slice(axis.rank)) for name, value in whole.items()}
        splits.append((axis, shard.sizes))
    return form_of(whole), splits


def joined_rows(results: Form, splits: Sequence[Split]) -> Form:
    """Return the results of all rows on every rank."""
    for axis, sizes in reversed(splits):
        results = form_of(_joined(results.whole, axis, sizes))
    return results


def _cut(name: str, value: Any, rows: int, part: slice) -> Any:
    """Return the part of an argument that belongs to some rows: all of it, if it has no entry for each row."""
    if isinstance(value, list) and name in ROW_LISTS and len(value) == rows:
        return value[part]
    if _WHOLE.search(name) and not (isinstance(value, Tensor) and value.dim() > 2):
        return value
    return pytree.tree_map_only(Tensor, lambda x: x[part] if x.dim() and len(x) == rows else x, value)


def _joined(results: Any, axis: Axis, sizes: tuple[int, ...]) -> Any:
    """Gather the rows of nested results; a list of tensors has an entry for each row."""
    if isinstance(results, Tensor):
        return gather(results, axis, sizes)
    if isinstance(results, list):
        return list(gather(torch.stack(results), axis, sizes).unbind())
    return tuple(_joined(each, axis, sizes) for each in results)
