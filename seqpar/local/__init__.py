"""Attention on one device. Each implementation is one file with four functions.

attend: a `Core` (`seqpar.types.protocols`).
why_not(device, dtype, head_dim, mask): None where `attend` takes such inputs, or the reason why not.
invariant, with the same arguments: None if a query's bits depend on that query alone, or the reason why they may not.
preference(major, head_dim): "auto" chooses the highest that works; None for one that is lossy, so that it must be
named. major: of the GPU's compute capability, 0 on a CPU.
"""
