"""The detokenizers: which one has which output, and outputs that wait for one."""

from __future__ import annotations

import time
from collections.abc import Callable

from radixmesh.daemons.router.peers.detokenizer_link import DetokenizerLink
from radixmesh.daemons.router.peers.local_detokenizer import LocalDetokenizer
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.name_watch import PeerPool

# Seconds for which other entries pass over a replica that lost or refused one.
_BACKOFF_S = 0.2


class DetokenizerPool(PeerPool):
    """Spreads entries over replicas; an output is on one of them, or waits here.

    wait_s: how long an output waits. local: goes before all replicas, for what it takes. clock: monotonic seconds.
    """

    def __init__(
        self,
        make_link: Callable[[str], DetokenizerLink],
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        local: LocalDetokenizer | None = None,
    ) -> None:
        self.local = local
        self._make_link = make_link
        self._links: dict[str, DetokenizerLink] = {}
        self._wait_s = wait_s
        self._clock = clock
        self._waiting: dict[Output, float] = {}
        self._backoff_until: dict[DetokenizerLink, float] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def links(self) -> tuple[DetokenizerLink, ...]:
        return tuple(self._links.values())

    @property
    def all_links(self) -> tuple[DetokenizerLink, ...]:
        """With the one in this process."""
        return self.links if self.local is None else (*self.links, self.local)

    def add(self, address: str) -> None:
        if address not in self._links:
            link = self._links[address] = self._make_link(address)
            link.start()

    async def remove(self, address: str) -> None:
        link = self._links.pop(address)
        self._backoff_until.pop(link, None)
        await link.close()

    def can_remove(self, address: str) -> bool:
        return not self._links[address].is_connected

    async def close(self) -> None:
        self._waiting.clear()
        for link in self.all_links:
            await link.close()

    def open(self, output: Output) -> None:
        """Puts an output on the replica with the fewest entries, or lets it wait for one."""
        assert output.entry is None, f"{output.request.request_id}/{output.index} is on a detokenizer"
        link = self._pick(output)
        if link is None:
            self._waiting.setdefault(output, self._clock())
            return
        self._waiting.pop(output, None)
        link.open(output)
        if not output.is_open:
            self.push(output)

    def reopen(self, output: Output, link: DetokenizerLink | None) -> None:
        """Puts an output that link has lost on another replica, on the same one only if there is no other."""
        if link is not None:
            self._backoff_until[link] = self._clock() + _BACKOFF_S
        self.open(output)

    def push(self, output: Output) -> None:
        """The output has new ids, or has ended. The hot path: once per output and frame."""
        entry = output.entry
        if entry is not None:
            entry.link.mark(entry)

    def close_output(self, output: Output) -> None:
        """The output needs no more text. Idempotent."""
        self._waiting.pop(output, None)
        if output.entry is not None:
            output.entry.link.close_entry(output.entry)

    def place_waiting(self) -> None:
        """A replica may be there: tries again for all that wait."""
        for output in tuple(self._waiting):
            self.open(output)

    def tick(self, now: float) -> list[tuple[Output, MeshError]]:
        """Outputs that have waited too long, with the errors to end them with. Call every 0.1 s or so."""
        for link in self.all_links:
            link.flush_closes()
        if not self._waiting:
            return []
        self.place_waiting()
        late = [output for output, since in self._waiting.items() if now - since > self._wait_s]
        for output in late:
            del self._waiting[output]
        return [(output, self._nobody(output)) for output in late]

    def _pick(self, output: Output) -> DetokenizerLink | None:
        now, local = self._clock(), self.local
        if local is not None and self._backoff_until.get(local, 0.0) <= now and local.takes(output):
            return local
        identity = output.request.resolved.model_identity
        able = [link for link in self.links if link.is_connected and link.serves(identity)]
        liked = [link for link in able if self._backoff_until.get(link, 0.0) <= now]
        # With a single replica a lost entry waits for the next tick: no hot loop of opening and losing.
        return min(liked, key=lambda link: link.num_entries) if liked else None

    def _nobody(self, output: Output) -> MeshError:
        connected = [link for link in self.links if link.is_connected]
        if connected and not any(link.serves(output.request.resolved.model_identity) for link in connected):
            return MeshError(
                ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH,
                "no detokenizer has the vocabulary of this model: start one on the model's folder",
                {
                    "ours": connected[0].identity.tokenizer_fingerprint,
                    "theirs": output.request.resolved.model_identity.tokenizer_fingerprint,
                },
            )
        message = f"no detokenizer could be reached for {self._wait_s:g} s: retry, with resume to keep what there is"
        return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "detokenizer"})
