"""The stream to one detokenizer: entries, and who has seen how much of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import identity_from_proto
from radixmesh.daemons.router.peers.frame_stream import Dial
from radixmesh.daemons.router.peers.peer_link import PeerLink
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.frames import MAX_OPEN_BYTES, FrameBudget, too_large
from radixmesh.daemons.runtime.rpc.hello import SHARING_VERSION, check_hello
from radixmesh.daemons.runtime.sampling import stop_to_proto
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.detokenizer.v1 import detokenizer_pb2

log = get_logger(__name__)

_Request = detokenizer_pb2.DetokenizeRequest
_Response = detokenizer_pb2.DetokenizeResponse
# Context for tokenizers whose decoding of a token depends on those before it.
PROMPT_TAIL = 16
# No token of a vocabulary has so much text.
_MAX_TOKEN_CHARS = 4096


@dataclass(slots=True, eq=False)
class Entry:
    """An output on a detokenizer. num_sent: ids sent to it. num_owed: ids (and a final) that it has not answered."""

    output: Output
    link: DetokenizerLink
    handle: int
    num_sent: int = 0
    num_owed: int = 0
    is_final_sent: bool = False


class DetokenizerEvents(Protocol):
    """Receiver of the text."""

    def on_text(self, output: Output, text: str, num_tokens: int, is_final: bool) -> None:
        """New text; num_tokens of the output have been seen by now. After a final one comes on_text_done."""

    def on_text_done(self, output: Output, stop: str, num_tokens: int) -> None:
        """All text is out; the entry is closed. stop: what ended it after num_tokens tokens, empty = no stop string."""

    def on_entry_lost(self, output: Output, link: DetokenizerLink) -> None:
        """The entry has to be opened again, elsewhere if that can be."""

    def on_entry_failed(self, output: Output, error: MeshError) -> None:
        """The entry cannot be opened anywhere."""

    def on_answered(self, seconds: float) -> None:
        """The replica took that long for the tokens of a frame: one frame at a time is watched."""

    def on_detokenizer_ready(self) -> None:
        """A detokenizer can take entries now."""


class DetokenizerLink(PeerLink[_Request, _Response]):
    """One replica. Tokens are read from the journal when a frame is made: what came up meanwhile is one row."""

    def __init__(
        self,
        address: str,
        dial: Dial[_Request, _Response],
        peer_timeout_s: float,
        hello: common_pb2.Hello,
        events: DetokenizerEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, dial, peer_timeout_s, clock)
        self._hello = hello
        self._events = events
        self.identity = ServedIdentity()
        self.can_share = False
        self._last_handle = 0
        self._entries: dict[int, Entry] = {}
        self._opens: dict[int, Entry] = {}
        self._dirty: dict[int, Entry] = {}
        self._closes: list[int] = []
        self._num_owed = 0
        self._watched: tuple[Entry, int, float] | None = None
        """An entry, the tokens of it that are awaited, since when."""

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def num_owed(self) -> int:
        """Ids and finals that the replica has not answered."""
        return self._num_owed

    def serves(self, identity: ServedIdentity) -> bool:
        """True if this replica decodes the ids of that model."""
        ours, theirs = self.identity.tokenizer_fingerprint, identity.tokenizer_fingerprint
        return not ours or not theirs or ours == theirs

    def open(self, output: Output) -> None:
        """Takes an output; all of its ids are (re)played. Without any it goes out with its first ones, in one frame."""
        # A handle is never used twice on a link: what is still on its way for an old entry finds nobody.
        self._last_handle += 1
        entry = Entry(output, self, self._last_handle)
        output.entry = entry
        self._entries[entry.handle] = entry
        self._opens[entry.handle] = entry
        if output.ids:
            self.wake()

    def mark(self, entry: Entry) -> None:
        """The output has new ids, or no more will come. The hot path: once per output and frame."""
        self._dirty[entry.handle] = entry
        self._has_news.set()

    def close_entry(self, entry: Entry) -> None:
        """The output needs no more text. The replica is told with the next frame, or by flush_closes()."""
        if self._forget(entry):
            self._closes.append(entry.handle)

    def flush_closes(self) -> None:
        """Call every 0.1 s or so: a frame of its own for every entry that ends would cost as much as its tokens."""
        if self._closes:
            self.wake()

    def _forget(self, entry: Entry) -> bool:
        """Drops an entry on this side; whether the other side knows it."""
        entry.output.entry = None
        if self._watched is not None and self._watched[0] is entry:
            self._watched = None
        self._num_owed -= entry.num_owed
        entry.num_owed = 0
        self._dirty.pop(entry.handle, None)
        is_unsent = self._opens.pop(entry.handle, None) is not None
        return self._entries.pop(entry.handle, None) is not None and not is_unsent

    def _hello_frame(self) -> _Request:
        return _Request(hello=self._hello)

    def _welcome(self, frame: _Response) -> str:
        self.can_share = check_hello(frame.hello, self._hello) >= SHARING_VERSION
        self.identity = identity_from_proto(frame.hello.model)
        return frame.hello.instance_id

    def _on_connected(self) -> None:
        self._events.on_detokenizer_ready()

    def _on_lost(self) -> None:
        outputs = [entry.output for entry in self._entries.values()]
        for entry in tuple(self._entries.values()):
            self._forget(entry)
        self._closes.clear()
        for output in outputs:
            self._events.on_entry_lost(output, self)

    def _is_answer_owed(self) -> bool:
        return self._num_owed > 0

    def next_frame(self) -> _Request | None:
        frame, budget = _Request(), FrameBudget()
        if self._closes and budget.take(4 * len(self._closes)):
            frame.close_handles = pack_ints(self._closes)
            self._closes.clear()
        refused = self._add_opens(frame, budget)
        self._add_rows(frame, budget)
        if self._opens or self._dirty:
            self.wake()
        for entry, error in refused:
            self._forget(entry)
            self._events.on_entry_failed(entry.output, error)
        return frame if frame.opens or frame.HasField("tokens") or frame.close_handles else None

    def _add_opens(self, frame: _Request, budget: FrameBudget) -> list[tuple[Entry, MeshError]]:
        """Entries whose Open no frame can carry, and why."""
        refused: list[tuple[Entry, MeshError]] = []
        shared: dict[Request, int] = {}
        while self._opens:
            entry = next(iter(self._opens.values()))
            message = _open_of(entry, shared.get(entry.output.request) if self.can_share else None)
            size = message.ByteSize()
            if size > MAX_OPEN_BYTES:
                refused.append((entry, too_large(f"output {entry.output.index} of the request", size, MAX_OPEN_BYTES)))
            elif budget.take(size):
                frame.opens.append(message)
                shared.setdefault(entry.output.request, entry.handle)
                entry.num_sent = len(entry.output.ids)
                self._owe(entry, entry.num_sent)
            else:
                break
            del self._opens[entry.handle]
        return refused

    def _add_rows(self, frame: _Request, budget: FrameBudget) -> None:
        handles: list[int] = []
        firsts: list[int] = []
        counts: list[int] = []
        ids: list[bytes] = []
        finals = bytearray()
        for handle in tuple(self._dirty):
            if handle in self._opens:
                continue  # Opened by a later frame, with all ids.
            entry = self._dirty[handle]
            output, first = entry.output, entry.num_sent
            count = len(output.ids) - first
            is_final = not output.is_open and not entry.is_final_sent
            if (count or is_final) and not budget.take(4 * count + 13):
                break
            del self._dirty[handle]
            if not count and not is_final:
                continue
            handles.append(handle)
            firsts.append(first)
            counts.append(count)
            ids.append(output.ids[first:].tobytes())
            finals.append(is_final)
            entry.num_sent += count
            entry.is_final_sent = entry.is_final_sent or is_final
            self._owe(entry, count + is_final)
        if handles:
            self._watch_one(handles[0])
            frame.tokens.handles = pack_ints(handles)
            frame.tokens.first_output_indexes = pack_ints(firsts)
            frame.tokens.counts = pack_ints(counts)
            frame.tokens.ids = b"".join(ids)
            frame.tokens.finals = bytes(finals) if any(finals) else b""

    def _watch_one(self, handle: int) -> None:
        if self._watched is None:
            entry = self._entries[handle]
            self._watched = (entry, entry.num_sent, self._clock())

    def _owe(self, entry: Entry, num: int) -> None:
        entry.num_owed += num
        self._num_owed += num

    def _on_frame(self, frame: _Response) -> None:
        entries, events, on_text = self._entries, self._events, self._events.on_text
        for row in frame.rows:
            entry = entries.get(row.handle)
            if entry is None:
                continue
            output, num_tokens = entry.output, row.num_tokens
            if row.text_offset != output.text_bytes:
                self._drop_misplaced(entry, row.text_offset)
                continue
            text = row.text
            self._check_row(entry, row, num_tokens, len(text))
            owed = entry.num_sent - num_tokens + entry.is_final_sent
            self._num_owed += owed - entry.num_owed
            entry.num_owed = owed
            watched = self._watched
            if watched is not None and watched[0] is entry and num_tokens >= watched[1]:
                events.on_answered(self._clock() - watched[2])
                self._watched = None
            if not row.is_final:
                on_text(output, text, num_tokens, False)
                continue
            stop, num_stop = (row.stop.stop, row.stop.num_tokens) if row.HasField("stop") else ("", num_tokens)
            self._end_text(entry, text, num_tokens, stop, num_stop)
        for failure in frame.failures:
            entry = entries.get(failure.handle)
            if entry is not None:
                self._fail_entry(entry, MeshError.from_proto(failure.error), is_lost=failure.is_lost)

    def _end_text(self, entry: Entry, text: str, num_tokens: int, stop: str, num_stop: int) -> None:
        """The last text of an output. stop: what ended it after num_stop tokens, empty = no stop string."""
        self.close_entry(entry)
        self._events.on_text(entry.output, text, min(num_tokens, num_stop), True)
        self._events.on_text_done(entry.output, stop, num_stop)

    def _fail_entry(self, entry: Entry, error: MeshError, *, is_lost: bool) -> None:
        """The replica has the entry no more. is_lost: it can be opened again."""
        self._forget(entry)
        log.info("entry_failed", request_id=entry.output.request.request_id, error=str(error))
        if is_lost:
            self._events.on_entry_lost(entry.output, self)
        else:
            self._events.on_entry_failed(entry.output, error)

    def _check_row(self, entry: Entry, row: detokenizer_pb2.TextRow, num_tokens: int, num_chars: int) -> None:
        """Raises PROTOCOL_VIOLATION: an output must not end, or go on, for what its tokens do not say."""
        output = entry.output
        is_wrong = num_tokens > entry.num_sent or num_chars > _MAX_TOKEN_CHARS * max(1, len(output.ids))
        if row.HasField("stop"):
            is_wrong |= row.stop.stop not in output.request.resolved.stop.stop or row.stop.num_tokens > entry.num_sent
        elif row.is_final and not entry.is_final_sent:
            # Its own end: only an id that ends the output makes one.
            is_wrong |= output.request.end_ids.isdisjoint(output.ids[max(0, num_tokens - 1) : num_tokens])
        if is_wrong:
            message = f"a text row that its tokens cannot have: {num_tokens} of {entry.num_sent} tokens"
            raise MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message, {"daemon": self.address})

    def _drop_misplaced(self, entry: Entry, offset: int) -> None:
        output = entry.output
        log.warning("text_misplaced", request_id=output.request.request_id, got=offset, expected=output.text_bytes)
        self.close_entry(entry)
        self._events.on_entry_lost(output, self)


def _open_of(entry: Entry, shares_with: int | None) -> detokenizer_pb2.Open:
    """shares_with: handle of an open of the same request in the same frame, None = there is none."""
    output, resolved = entry.output, entry.output.request.resolved
    message = detokenizer_pb2.Open(
        handle=entry.handle,
        output_ids=output.ids.tobytes(),
        emitted_text_bytes=output.text_bytes,
        shares_with=shares_with,
    )
    if shares_with is None:
        message.request_id = resolved.request_id
        message.prompt_tail_ids = resolved.prompt_ids[-4 * PROMPT_TAIL :]
        message.stop.CopyFrom(stop_to_proto(resolved.stop))
        message.eos_ids = pack_ints(sorted(output.request.end_ids))
        message.trace_context = output.request.trace_context
    return message
