"""Which replica gets a request: the one with the fewest, and among near ones one that has the request's LoRAs."""

from __future__ import annotations

import asyncio

from ray.serve.request_router import MultiplexMixin, PendingRequest, RequestRouter, RunningReplica

SLACK = 1  # requests that a replica may have more than another one, before a switch of LoRAs is better than waiting
PROBE_S = 1.0  # for a replica to tell how many requests it has


class LoraRouter(MultiplexMixin, RequestRouter):
    """Ranks replicas for a request. Serve takes the one with the fewest of the first rank, or else of the next."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return those that had the same LoRAs last, then those that had none yet, and then all; the busy ones last."""
        loras = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        if not loras:
            return [candidate_replicas]
        lengths = await asyncio.gather(*map(self._length, candidate_replicas), return_exceptions=True)
        known = [(n, each) for n, each in zip(lengths, candidate_replicas, strict=True) if isinstance(n, int)]
        least = min((length for length, _ in known), default=0)
        near = [each for length, each in known if length <= least + SLACK]
        same = [each for each in near if loras in each.multiplexed_model_ids]
        new = [each for each in near if not each.multiplexed_model_ids]
        return [rank for rank in (same, new, candidate_replicas) if rank]

    async def _length(self, replica: RunningReplica) -> int:
        """Return how many requests a replica has, with those that were just sent to it; an error if it is dead."""
        length = self.replica_queue_len_cache.get(replica.replica_id)
        if length is None:
            length = await replica.get_queue_len(deadline_s=PROBE_S)
            self.on_new_queue_len_info(replica.replica_id, length)
        return length
