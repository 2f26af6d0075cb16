"""Blocks of diffusers' transformers with fused kernels, one file a family of models, found by its name.

A file has `BLOCKS` (name of diffusers' class -> function, see `seqpar.types.fused.Fused`), `PRODUCTS` (name of the
class -> name of a matrix -> paths of the linear layers that it is made of, one below the other), `STREAMS` (name of the
class -> the streams that its attention joins, in the order in which the function passes them; a single one may have any
name), and `why_not(block)`, which returns why the function cannot compute a block that is as diffusers builds it, or
None. It may have `work(config)`, the planner's `Work` of the whole transformer, which says more than its modules do.
"""
