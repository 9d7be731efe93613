"""Decides which replica gets an output, and keeps what the decision needs: loads, views of caches, what was sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.router.placement.cache_view import CacheChange, CacheView
from radixmesh.daemons.router.placement.policies import Candidates, PlacementPolicy
from radixmesh.daemons.router.placement.prefix_index import PrefixIndex, matched_tokens
from radixmesh.daemons.router.placement.prompt_keys import BLOCK, PromptKeys
from radixmesh.daemons.router.placement.replicas import IntColumn, ReplicaLoad, Replicas
from radixmesh.daemons.router.placement.sent_prompts import SentPrompts
from radixmesh.daemons.router.placement.tree_summary import TreeSummary

# A prompt is in the reported cache once its prefill is done; until then it counts as sent.
_SENT_S = 10.0
# Of a replica whose cache is not reported and whose KV memory is not known.
_SENT_TOKENS = 1 << 20
# Of the bytes of all views, what lies in stores takes a half at most: the rest is worth more.
_STORE_SHARE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRequest:
    """A request as placement sees it. prompt_ids: i32 array, not empty. namespace: see cache_namespace.py.

    session: equal for requests of one conversation, 0 = of none.
    """

    prompt_ids: bytes
    namespace: str = ""
    session: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) // 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """row: of the one chosen. matched_tokens: cached there. best_tokens: the most that any of those asked about has."""

    row: int
    num_tokens: int
    matched_tokens: int
    best_tokens: int
    keys: Sequence[int]

    @property
    def reason(self) -> str:
        """cached: the longest match was chosen; spread: another has a longer one; new: nobody has any of it."""
        if not self.best_tokens:
            return "new"
        return "cached" if self.matched_tokens == self.best_tokens else "spread"


class _Replica:
    """One replica's views. kv_tokens: what its cache can hold at most; 0 = not known."""

    def __init__(self, view: CacheView, sent: SentPrompts) -> None:
        self.view = view
        self.sent = sent
        self.is_reported = False
        self.kv_tokens = 0


class Placement:
    """All replicas of a router. Rows are numbers that add() gives out. Not for several threads."""

    def __init__(
        self,
        policy: PlacementPolicy,
        *,
        view_bytes: int = 512 << 20,
        now: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        """view_bytes: of all views together; a replica that would take more is guessed at by what was sent there."""
        self.policy = policy
        self.replicas = Replicas()
        self._view_bytes = view_bytes
        self._now = now
        self._keys = PromptKeys(seed)
        self.index, self.host_index, self.store_index = PrefixIndex(), PrefixIndex(), PrefixIndex()
        self._sent_index = PrefixIndex()
        self._rows: dict[int, _Replica] = {}
        self._versions: tuple[int, ...] = (0,)

    def add(self, address: str) -> int:
        """A new replica's row."""
        row = self.replicas.add(address)
        lower = (self.host_index, self.store_index)
        view = CacheView(row, self.index, self._keys, max_bytes=self._view_bytes, lower=lower)
        sent = SentPrompts(row, self._sent_index, max_keys=_SENT_TOKENS // BLOCK)
        self._rows[row] = _Replica(view, sent)
        return row

    def remove(self, row: int) -> None:
        """The replica is gone."""
        replica = self._rows.pop(row)
        replica.view.clear()
        for _ in replica.view.clear_index():
            pass
        replica.sent.clear()
        self.replicas.remove(row)
        self._note_versions()

    def restart(self, row: int, kv_tokens: int) -> None:
        """A new stream to the replica, which may be another process: its cache is told anew, or guessed at."""
        replica = self._rows[row]
        replica.kv_tokens = kv_tokens
        replica.sent.resize((kv_tokens or _SENT_TOKENS) // BLOCK)
        self.replicas.restart(row)

    def take_load(self, row: int, load: ReplicaLoad) -> None:
        """The replica's own figures."""
        self.replicas.take_load(row, load)

    def apply(self, row: int, change: CacheChange) -> None:
        """The replica's cache has changed. Raises ViewError or ViewTooLargeError; lose_view() then."""
        replica = self._rows[row]
        view = replica.view
        others = sum(other.view.num_bytes for other in self._rows.values()) - view.num_bytes
        view.max_bytes = self._view_bytes - others
        of_stores = sum(other.view.num_store_bytes for other in self._rows.values()) - view.num_store_bytes
        view.max_store_bytes = self._view_bytes // _STORE_SHARE - of_stores
        version = view.weights_version
        if change.store_id:
            self.replicas.shares_store(row, change.store_id)
        view.apply(change)
        replica.is_reported = True
        if view.weights_version != version:
            self._note_versions()

    def lose_view(self, row: int, *, keeps_store: bool = False) -> Iterator[None]:
        """The replica's cache is not known any more. Iterate to the end, with pauses, before the next apply().
        keeps_store: its store is the same."""
        replica = self._rows[row]
        replica.is_reported = False
        if not keeps_store:
            self.replicas.shares_store(row, "")
        replica.view.clear()
        yield from replica.view.clear_index()

    def choose(
        self, request: PlacedRequest, rows: Sequence[int] | IntColumn, *, surplus: float | None = 0.0
    ) -> Decision | None:
        """The replica of `rows`, not empty, that gets the output; None if all are full.

        surplus: a replica is full with so many more outputs, as a share of its bound; None: full ones count too.
        """
        chosen = np.asarray(rows, dtype=np.intp)
        if surplus is not None:
            has_room = self.has_room(chosen, surplus)
            if not has_room.all():
                chosen = chosen[has_room]
                if not len(chosen):
                    return None
        num_tokens = request.num_tokens
        keys = self._keys.of_prompt(request.prompt_ids, self._keys.root(request.namespace, self._versions[0]))
        table = self.replicas
        matched, load_tokens = np.zeros(len(chosen), dtype=np.int64), None
        if self.policy.needs_matches:
            # The last token is always computed.
            on_device = np.minimum(self._matched(self.index, request, keys)[chosen], num_tokens - 1)
            matched = on_device
            if len(self.host_index):
                on_host = np.minimum(self._matched(self.host_index, request, keys)[chosen], num_tokens - 1)
                matched = np.maximum(on_device, on_host)
                load_tokens = (matched - on_device) * table.host_load_costs[chosen]
            stored = self._stored(request, keys)
            if stored is not None:
                nearer, matched = matched, np.maximum(matched, np.minimum(stored[chosen], num_tokens - 1))
                fetch_tokens = (matched - nearer) * table.store_load_costs[chosen]
                load_tokens = fetch_tokens if load_tokens is None else load_tokens + fetch_tokens
        candidates = Candidates(
            names=table.addresses,
            rows=chosen,
            matched_tokens=matched,
            num_outputs=table.num_outputs[chosen],
            queued_tokens=table.queued_tokens[chosen],
            free_tokens=table.free_tokens[chosen],
            cached_tokens=table.cached_tokens[chosen],
            load_tokens=load_tokens,
            slowness=table.slowness(chosen) if self.policy.needs_matches else None,
        )
        first = keys[0] if keys else int.from_bytes(request.prompt_ids[:8].ljust(8, b"\0"), "little")
        index = self.policy.pick(num_tokens, first, candidates, request.session)
        return Decision(
            row=int(chosen[index]),
            num_tokens=num_tokens,
            matched_tokens=int(matched[index]),
            best_tokens=int(matched.max()),
            keys=keys,
        )

    def has_room(self, rows: Sequence[int] | IntColumn, surplus: float = 0.0) -> npt.NDArray[np.bool_]:
        """By row: True for a replica that is not full. surplus: see choose()."""
        chosen, table = np.asarray(rows, dtype=np.intp), self.replicas
        most = table.max_outputs[chosen]
        return table.num_outputs[chosen] < (most + (most * surplus).astype(np.int64) if surplus else most)

    def matched_tokens(self, request: PlacedRequest, row: int) -> int:
        """Tokens of the request that the replica has cached, as far as is known; 0 where no policy asks for that."""
        if not self.policy.needs_matches:
            return 0
        keys = self._keys.of_prompt(request.prompt_ids, self._keys.root(request.namespace, self._versions[0]))
        matched = max(int(self._matched(index, request, keys)[row]) for index in (self.index, self.host_index))
        stored = self._stored(request, keys)
        return min(matched if stored is None else max(matched, int(stored[row])), request.num_tokens - 1)

    def take_sent(self, decision: Decision, sequence: int) -> None:
        """The output of a decision was sent, as that submit."""
        uncached = decision.num_tokens - decision.matched_tokens
        self.replicas.take_sent(decision.row, sequence, decision.num_tokens, uncached)
        if self.policy.needs_matches:
            self._rows[decision.row].sent.add(decision.keys, self._now())

    def tick(self) -> None:
        """Call every second or so: what was sent is by now in the caches that are reported, and speeds have changed."""
        self.replicas.compare_speeds()
        before = self._now() - _SENT_S
        for replica in self._rows.values():
            if replica.is_reported:
                replica.sent.forget_before(before)

    def num_cached_tokens(self, row: int) -> int | None:
        """Tokens in the replica's view; None where its cache is guessed at."""
        replica = self._rows[row]
        return replica.view.num_tokens if replica.is_reported else None

    def tree(self, row: int, *, max_nodes: int, max_visited: int) -> TreeSummary | None:
        """A picture of the replica's prefix tree; None where its cache is guessed at."""
        replica = self._rows[row]
        return replica.view.summary(max_nodes=max_nodes, max_visited=max_visited) if replica.is_reported else None

    @property
    def view_bytes(self) -> int:
        """About the bytes of all views together."""
        return sum(replica.view.num_bytes for replica in self._rows.values())

    def _matched(self, index: PrefixIndex, request: PlacedRequest, keys: list[int]) -> npt.NDArray[np.int64]:
        """By row, tokens of the request in device memory or in host memory; what was sent counts as in both."""
        matched = self._held(index, request, keys)
        if len(self._sent_index):
            np.maximum(matched, matched_tokens(self._sent_index.match(keys), len(self.replicas)), out=matched)
        return matched

    def _stored(self, request: PlacedRequest, keys: list[int]) -> npt.NDArray[np.int64] | None:
        """By row, tokens of the request that the replica's store probably has; None where no store is known to have
        anything. What one replica has saved to a store that others share can be fetched by all of them."""
        shared_by = self.replicas.shared_by
        if shared_by is None:
            return self._held(self.store_index, request, keys) if len(self.store_index) else None
        # Host memory is saved to the store as soon as to itself.
        saved = self._held(self.host_index, request, keys)
        np.maximum(saved, self._held(self.store_index, request, keys), out=saved)
        most = np.zeros_like(saved)
        np.maximum.at(most, shared_by, saved)
        return most[shared_by]

    def _held(self, index: PrefixIndex, request: PlacedRequest, keys: list[int]) -> npt.NDArray[np.int64]:
        """By row, tokens of the request that are reported in a tier."""
        count = len(self.replicas)
        matched = matched_tokens(index.match(keys), count)
        for version in self._versions[1:]:
            # Replicas with other weights: rare, while an update goes round.
            other = self._keys.of_prompt(request.prompt_ids, self._keys.root(request.namespace, version))
            np.maximum(matched, matched_tokens(index.match(other), count), out=matched)
        return matched

    def _note_versions(self) -> None:
        versions = {replica.view.weights_version for replica in self._rows.values() if replica.is_reported}
        self._versions = tuple(sorted(versions, reverse=True)) or (0,)
