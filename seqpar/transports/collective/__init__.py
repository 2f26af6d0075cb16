"""Collectives of torch.distributed: NCCL between GPUs, gloo between CPUs; see `transport.py`."""

from seqpar.transports.collective.transport import FACTS, Transport, why_not, why_not_tried

__all__ = ["FACTS", "Transport", "why_not", "why_not_tried"]
