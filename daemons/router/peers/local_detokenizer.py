"""A detokenizer in this process, for few outputs at a time: frames as for a daemon, applied in a turn of the loop.

CONNECTING --the vocabulary is there--> CONNECTED --a frame failed--> CONNECTING (its outputs go to daemons)
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import identity_from_proto
from radixmesh.daemons.router.peers.detokenizer_link import DetokenizerEvents, DetokenizerLink, Entry
from radixmesh.daemons.router.peers.frame_stream import FrameStream
from radixmesh.daemons.router.peers.local_text import LocalText, is_cheap
from radixmesh.daemons.router.peers.peer_link import LinkState
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable
from radixmesh.daemons.runtime.detokenize.frames import read_opens, read_tokens, write_response
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, Pending, TextDelta
from radixmesh.daemons.runtime.rpc.hello import identity_to_proto
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.detokenizer.v1 import detokenizer_pb2

log = get_logger(__name__)

_ADDRESS = "in this process"
# After a failure, which would come again with the same output.
_REST_S = 60.0


class LocalDetokenizer(DetokenizerLink):
    """The same frames as a daemon's, and none of their waits. max_outputs: at a time; more are for the daemons."""

    def __init__(
        self,
        text: LocalText,
        max_outputs: int,
        events: DetokenizerEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(_ADDRESS, _no_dial, math.inf, common_pb2.Hello(), events, clock)
        self.can_share = True
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

    def _take_turn(self) -> None:
        """Behind what has brought tokens, which is in the middle of its own frame."""
        self._has_turn = False
        if self._table is None or self.state is LinkState.CLOSED:
            return
        try:
            frame = self.next_frame()
            if frame is not None:
                self._on_frame(write_response(_apply(self._table, frame)))
        # A panic of the library is no Exception.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            log.exception("local_detokenizer_failed")
            self._rests_until_s = self._clock() + _REST_S
            self._table = None
            self._enter(LinkState.CONNECTING)
            self._on_lost()


def _apply(table: DecoderTable, frame: detokenizer_pb2.DetokenizeRequest) -> Pending:
    """As the daemon's service does, closes first: outputs that came in the place of others find room."""
    table.close(unpack_ints(frame.close_handles, "close_handles").tolist())
    deltas: list[TextDelta] = []
    failures: list[EntryFailure] = []
    for entry in read_opens(frame.opens):
        outcome = table.open(entry)
        if isinstance(outcome, TextDelta):
            deltas.append(outcome)
        elif outcome is not None:
            failures.append(outcome)
    if frame.HasField("tokens"):
        new_deltas, new_failures = table.push(read_tokens(frame.tokens))
        deltas += new_deltas
        failures += new_failures
    return Pending(deltas, failures)


def _no_dial(address: str) -> FrameStream[detokenizer_pb2.DetokenizeRequest, detokenizer_pb2.DetokenizeResponse]:
    raise AssertionError(f"{address} is dialled")
