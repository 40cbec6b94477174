"""Ray Serve's request router for engines: a prompt goes to the replica whose prefix cache has most of it.

Ray calls its interface for routers alpha; this file is all of pagedcore that depends on it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pagedcore_ray.prefix_table import PrefixTable


class PrefixAffinityRouter(RequestRouter):
    """Routes calls whose first argument is an ``EngineCall`` by ``PrefixTable``, and all others by load.

    Every handle has a router of its own. Its table and its counts are about the calls that passed through it; several
    ingresses agree after each has seen a prefix once.

    Invariant: ``_num_in_flight`` counts the calls that were sent to each replica and have not ended.
    """

    def initialize_state(self, *, block_size: int = 16, max_imbalance: int = 8) -> None:
        """Take the keywords of ``request_router_kwargs``: tokens of a block, and how far apart loads may be."""
        self._table = PrefixTable[ReplicaID](block_size, max_imbalance=max_imbalance)
        self._num_in_flight: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas for a call, groups from the most preferred to the least."""
        by_id = {one.replica_id: one for one in candidate_replicas}
        loads = {one: self._num_in_flight[one] for one in by_id}
        ranks = self._table.rank(self._hashes_of(pending_request), loads)
        return [[by_id[one] for one in group] for group in ranks]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count the call and remember where its prefixes are."""
        self._num_in_flight[replica_id] += 1
        self._table.remember(self._hashes_of(pending_request), replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the call no longer."""
        self._num_in_flight[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget what is known of replicas that have gone."""
        super().update_replicas(replicas)
        present = {one.replica_id for one in replicas}
        self._table.forget_others(present)
        for gone in self._num_in_flight.keys() - present:
            del self._num_in_flight[gone]

    def _hashes_of(self, pending_request: PendingRequest | None) -> list[bytes]:
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        token_ids, salt = getattr(call, "token_ids", ()), getattr(call, "salt", b"")
        return self._table.hashes_of(token_ids, salt)
