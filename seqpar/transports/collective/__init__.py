"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs; see `transport.py`."""

from seqpar.transports.collective.transport import Transport, supports

__all__ = ["Transport", "supports"]
