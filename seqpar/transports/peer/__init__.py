"""Peer memory: ranks of one machine write into each other's memory."""

from seqpar.transports.peer.transport import FACTS, Transport, why_not, why_not_tried

__all__ = ["FACTS", "Transport", "why_not", "why_not_tried"]
