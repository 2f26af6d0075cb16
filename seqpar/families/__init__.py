"""Blocks of diffusers' transformers with fused kernels, one file a family of models, found by its name.

A file has `BLOCKS` (name of diffusers' class -> function, see `seqpar.families._block.Fused`), `PRODUCTS` (name of the
class -> name of a matrix -> paths of the linear layers that it is made of, one below the other), `STREAMS` (name of the
class -> the streams that its attention joins, in the order in which the function passes them; a single one may have any
name), and `why_not(block)`, which returns why the function cannot compute a block that is as diffusers builds it, or
None. `work(config, text)` is the planner's `Work` of a whole transformer, whose class is named in `TRANSFORMERS`; text:
the number of its text tokens, that of a usual call unless given.

Users write the cuts of their own transformers with the names that this package exports.
"""

from seqpar.families._cuts import Boundary, Cuts, CutTokens, GatherTokens, Joint

__all__ = ["Boundary", "CutTokens", "Cuts", "GatherTokens", "Joint"]
