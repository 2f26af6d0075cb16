"""Writing into each other's memory on one machine; see `transport.py`."""

from seqpar.transports.peer.transport import TRIAL_S, Transport, why_not, why_not_tried

__all__ = ["TRIAL_S", "Transport", "why_not", "why_not_tried"]
