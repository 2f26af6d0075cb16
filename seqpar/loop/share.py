"""`Share`: this rank's share of the predictions of a model: its tokens of each stream, with what attends over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from seqpar.graphs.exchanges import Keeper
from seqpar.loop.interface import Condition, Encoded, SequenceModel
from seqpar.loop.streams import Split
from seqpar.types.protocols import Attend

Positions = Callable[[Split], Mapping[str, Tensor]]
"""Returns this rank's position rows of each stream that has positions, (l, ...) each."""
Inputs = tuple[Mapping[str, Tensor], Mapping[str, Tensor], Condition, Attend]
"""The arguments of a model's `forward_tokens`."""


@dataclass(frozen=True)
class Share:
    """What does not change between the predictions for one prompt, on this rank.

    constant: this rank's tokens of the streams that are not denoised, (B, l, ...) each. positions: its position rows.
    mask: the key mask of all ranks' tokens, (B, L) bool, or None. attend: the attention that serves them.
    """

    model: SequenceModel
    split: Split
    constant: Mapping[str, Tensor]
    positions: Mapping[str, Tensor]
    mask: Tensor | None
    attend: Attend

    @staticmethod
    def of(
        model: SequenceModel,
        keeper: Keeper,
        encoded: Encoded,
        lengths: Mapping[str, int],
        positions: Positions,
        batch: int,
        index_B: Tensor | None = None,
        user: object | None = None,
    ) -> Share:
        """Return the share of a batch. lengths: the number of tokens of each stream that `encoded` does not hold.

        index_B: the row of `encoded` for each row of the batch; None means that they are the same rows, which are then
        not copied. user: what needs the exchanges as long as it exists.
        """
        counts = {**lengths, **{name: x.shape[1] for name, x in encoded.streams.items()}}
        split = Split.of(model, counts, keeper.axis, keeper.plan.exact)
        constant, mask = rows_of(encoded, split, index_B)
        attend = keeper.attend(batch, split.tokens, user=user)
        return Share(model, split, constant, positions(split), mask, attend)

    def inputs(self, tokens: Mapping[str, Tensor], conditioning: Condition) -> Inputs:
        """Return the arguments of the model's `forward_tokens` for this rank's tokens of the denoised streams.

        conditioning: what the model's `modulate` returns, with a row for each row of the batch.
        """
        masked = conditioning if self.mask is None else {**conditioning, "mask": self.mask}
        return {**self.constant, **tokens}, self.positions, masked, self.attend


def rows_of(encoded: Encoded, split: Split, index_B: Tensor | None) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return this rank's tokens of the constant streams and the key mask, with a row for each row of a batch."""
    streams, mask = {name: split.mine(name, x) for name, x in encoded.streams.items()}, split.mask(encoded)
    if index_B is None:
        return streams, mask
    return {name: x[index_B].contiguous() for name, x in streams.items()}, None if mask is None else mask[index_B]
