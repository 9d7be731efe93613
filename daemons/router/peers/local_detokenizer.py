"""A detokenizer in this process, for few outputs at a time: entries as at a daemon, decoded in a turn of the loop.

CONNECTING --the vocabulary is there--> CONNECTED --a frame failed--> CONNECTING (its outputs go to daemons)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import identity_from_proto
from radixmesh.daemons.router.peers.detokenizer_link import PROMPT_TAIL, DetokenizerEvents, DetokenizerLink, Entry
from radixmesh.daemons.router.peers.frame_stream import FrameStream
from radixmesh.daemons.router.peers.local_text import LocalText, is_cheap
from radixmesh.daemons.router.peers.peer_link import LinkState
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.arrays import unpack_list
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, OpenEntry, Pending, TextDelta, TokenBatch
from radixmesh.daemons.runtime.rpc.hello import identity_to_proto
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.detokenizer.v1 import detokenizer_pb2

log = get_logger(__name__)

_ADDRESS = "in this process"
# After a failure, which would come again with the same output.
_REST_S = 60.0


class LocalDetokenizer(DetokenizerLink):
    """The same entries as at a daemon, without frames and waits. max_outputs: at a time; more are for the daemons."""

    def __init__(
        self,
        text: LocalText,
        max_outputs: int,
        events: DetokenizerEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(_ADDRESS, _no_dial, math.inf, common_pb2.Hello(), events, clock)
        self._text = text
        self._max_outputs = max_outputs
        self._table: DecoderTable | None = None
        self._has_turn = False
        self._rests_until_s = 0.0

    def takes(self, output: Output) -> bool:
        """True if an output is to be opened here."""
        if (self._table is None and not self._starts()) or self.num_entries >= self._max_outputs:
            return False
        resolved = output.request.resolved
        return self.serves(resolved.model_identity) and is_cheap(len(output.ids), resolved.stop.stop)

    def start(self) -> None:
        """Nobody is dialled."""

    async def close(self) -> None:
        self._enter(LinkState.CLOSED)

    def wake(self) -> None:
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def mark(self, entry: Entry) -> None:
        self._dirty[entry.handle] = entry
        if not self._has_turn:
            self.wake()

    def _starts(self) -> bool:
        vocabulary = self._text.vocabulary
        if vocabulary is None or self._clock() < self._rests_until_s:
            return False
        self._table = self._text.new_table(self._max_outputs)
        self.identity = identity_from_proto(
            identity_to_proto(vocabulary.identity, tokenizer_fingerprint=vocabulary.fingerprint)
        )
        self._enter(LinkState.CONNECTED)
        return True

    def close_entry(self, entry: Entry) -> None:
        if self._forget(entry) and self._table is not None:
            self._table.close((entry.handle,))

    def _take_turn(self) -> None:
        """Behind what has brought tokens, which is in the middle of its own frame."""
        self._has_turn = False
        if self._table is None or self.state is LinkState.CLOSED:
            return
        since_s = self._clock()
        try:
            pending = self._decode(self._table)
            if pending.deltas:
                self._events.on_answered(self._clock() - since_s)
            self._tell(pending)
        # A panic of the library is no Exception.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            log.exception("local_detokenizer_failed")
            self._rests_until_s = self._clock() + _REST_S
            self._table = None
            self._enter(LinkState.CONNECTING)
            self._on_lost()

    def _decode(self, table: DecoderTable) -> Pending:
        """As the daemon does with a frame, without its arrays and messages."""
        deltas: list[TextDelta] = []
        failures: list[EntryFailure] = []
        opens, self._opens = self._opens, {}
        for entry in opens.values():
            entry.num_sent = len(entry.output.ids)
            outcome = table.open(_open_of(entry))
            if isinstance(outcome, TextDelta):
                deltas.append(outcome)
            elif outcome is not None:
                failures.append(outcome)
        batch = self._next_rows()
        if batch is None:
            return Pending(deltas, failures)
        new_deltas, new_failures = table.push(batch)
        return Pending(deltas + new_deltas, failures + new_failures)

    def _next_rows(self) -> TokenBatch | None:
        """Ids of marked entries that are not decoded yet. The hot path: once per frame."""
        handles: list[int] = []
        firsts: list[int] = []
        counts: list[int] = []
        finals: list[int] = []
        all_ids: list[int] = []
        dirty, self._dirty = self._dirty, {}
        for handle, entry in dirty.items():
            output, first = entry.output, entry.num_sent
            ids = output.ids
            count = len(ids) - first
            is_final = not output.is_open and not entry.is_final_sent
            if not count and not is_final:
                continue
            handles.append(handle)
            firsts.append(first)
            counts.append(count)
            finals.append(is_final)
            all_ids += ids[first:]
            entry.num_sent = first + count
            entry.is_final_sent = entry.is_final_sent or is_final
        if not handles:
            return None
        return TokenBatch(
            handles=handles,
            first_indexes=firsts,
            counts=counts,
            finals=finals,
            ids=all_ids,
            min_id=min(all_ids, default=0),
            max_id=max(all_ids, default=0),
        )

    def _tell(self, pending: Pending) -> None:
        """As _on_frame(), of rows that need no check: they were made here."""
        entries, on_text = self._entries, self._events.on_text
        for handle, offset, text, num_tokens, stop, is_final in pending.deltas:
            entry = entries.get(handle)
            if entry is None:
                continue
            output = entry.output
            if offset != output.text_bytes:
                self._drop_misplaced(entry, offset)
            elif not is_final:
                on_text(output, text, num_tokens, False)
            elif stop is None:
                self._end_text(entry, text, num_tokens, "", num_tokens)
            else:
                self._end_text(entry, text, num_tokens, stop.stop, stop.num_tokens)
        for handle, is_lost, error in pending.failures:
            entry = entries.get(handle)
            if entry is not None:
                self._fail_entry(entry, error, is_lost=is_lost)


def _open_of(entry: Entry) -> OpenEntry:
    output, resolved = entry.output, entry.output.request.resolved
    return OpenEntry(
        handle=entry.handle,
        request_id=resolved.request_id,
        prompt_tail_ids=unpack_list(resolved.prompt_ids[-4 * PROMPT_TAIL :], "prompt_ids"),
        output_ids=output.ids.tolist(),
        emitted_text_bytes=output.text_bytes,
        stops=resolved.stop.stop,
        include_stop=resolved.stop.include_stop,
        skip_special_tokens=resolved.stop.skip_special_tokens,
        eos_ids=output.request.end_ids,
    )


def _no_dial(address: str) -> FrameStream[detokenizer_pb2.DetokenizeRequest, detokenizer_pb2.DetokenizeResponse]:
    raise AssertionError(f"{address} is dialled")
