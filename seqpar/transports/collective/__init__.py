"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs; see `transport.py`."""

from seqpar.transports.collective.transport import Transport, why_not

__all__ = ["Transport", "why_not"]
