"""Output of one request that its client has not been sent yet: at most one pending delta per output.

Nothing is queued: ids are read from the journal and text is merged when the client's stream is writable, so that a slow
reader gets bigger deltas, never a longer queue. A message ends at about MAX_MESSAGE_BYTES, and the next one goes on
there: of an output all ids come first, then the text, since a client that resumes may have less text than its ids make,
and never more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from radixmesh.daemons.router.requests.journal import Output, OutputState, Request
from radixmesh.daemons.router.requests.updates import Delta, Finished, Update
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.errors import MeshError

MAX_MESSAGE_BYTES = 4 << 20
# Of a delta without its content.
_DELTA_BYTES = 64
_FINISHED = OutputState.FINISHED

if TYPE_CHECKING:
    from radixmesh.daemons.router.requests.journal import Journal
    from radixmesh.daemons.router.requests.request_times import RequestTimes


class Delivery:
    """The client's side of a request. One consumer: `while (update := await delivery.take()) is not None`, or push().

    The consumer calls take() only when the client can be written to; the time it spends elsewhere is a stall of its
    client.
    """

    def __init__(
        self,
        journal: Journal,
        pacer: WakeupPacer,
        times: RequestTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._journal = journal
        self._times = times
        self._opened_s = self._clock()
        self._pacer = pacer
        self._is_waiting_turn = False
        self._request: Request | None = None
        self._dirty: dict[int, Output] = {}
        self._has_news = asyncio.Event()
        self._error: Exception | None = None
        self._sink: Callable[[Update], bool] | None = None
        self._is_full = False
        self._is_resolved_told = False
        self._num_unfinished = 0
        self.num_messages = 0
        self.writing_since: float | None = None
        self.news_since: float | None = None

    def begin(self, request: Request) -> None:
        """From now on there is a request to tell of. Outputs whose finish the client knows are not mentioned again."""
        self._request = request
        self._num_unfinished = sum(not output.is_finish_delivered for output in request.outputs)
        self._has_news.set()

    def mark(self, output: Output) -> None:
        """Something about output is new. The hot path: once per output and frame."""
        self._dirty[output.index] = output
        if self._is_waiting_turn:
            return
        self._is_waiting_turn = True
        if self.news_since is None:
            self.news_since = self._clock()
        self._pacer.enter(self._take_turn)

    def fail(self, error: MeshError) -> None:
        """Ends the client's stream with error, in place of whatever is still untold."""
        if self._error is None:
            self._error = error
        self._has_news.set()

    def start_writing(self) -> None:
        """A message is being written to the client: from now on what it does not take is a stall. take() does so."""
        self.writing_since = self._clock()

    def progressed(self) -> None:
        """The client has taken a part of the message that is being written."""
        if self.writing_since is not None:
            self.writing_since = self._clock()

    def stop_writing(self) -> None:
        """The message is written, or waits for something that is not the client."""
        self.writing_since = None

    async def push(self, sink: Callable[[Update], bool]) -> None:
        """Hands everything new to sink as soon as it is its turn, with no task to be woken; returns after the last.

        sink: writes an update; False if the client takes no more for now: the next one comes after resume(). Raises
        what sink raises, and MeshError after fail().
        """
        self.writing_since = None
        self._sink = sink
        try:
            self._take_turn()
            while not self._is_over:
                self._raise_failure()
                await self._has_news.wait()
                self._has_news.clear()
            self._raise_failure()
        finally:
            self._sink = None

    def resume(self) -> None:
        """The client takes more again, after sink said that it does not."""
        if self._is_full:
            self._is_full = self._is_waiting_turn = False
            self.writing_since = None
            self._take_turn()

    async def take(self) -> Update | None:
        """Everything new, once there is something; None after the last finish. Raises MeshError after fail()."""
        self.writing_since = None
        while True:
            self._raise_failure()
            if self._is_over:
                return None
            await self._has_news.wait()
            self._has_news.clear()
            self._raise_failure()
            update = self._update()
            if update is not None:
                self.num_messages += 1
                self.writing_since = self._clock()
                return update

    @property
    def _is_over(self) -> bool:
        return self._is_resolved_told and self._num_unfinished == 0

    def _take_turn(self) -> None:
        if self._sink is None:
            self._has_news.set()
            return
        if self._is_full:
            return
        try:
            while self._error is None and (update := self._update()) is not None:
                self.num_messages += 1
                if not self._sink(update):
                    # Until resume() nothing takes a turn: what comes up merges.
                    self._is_full = self._is_waiting_turn = True
                    self.writing_since = self._clock()
                    break
                if not self._dirty:
                    break
        except Exception as error:
            # Of the writer, or an output's own failure: the consumer raises it, and the pacer's other turns go on.
            self._error = self._error or error
        if self._error is not None or not self._num_unfinished:
            self._has_news.set()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _update(self) -> Update | None:
        request = self._request
        if request is None:
            return None
        self.news_since = None
        self._is_waiting_turn = False
        if not self._is_resolved_told:
            # Alone and at once: from here on the client can resume.
            self._is_resolved_told = True
            if self._dirty:
                self._has_news.set()
            return Update(resolved=request.resolved)
        update = Update()
        num_freed = 0
        if request.prompt_logprobs is not None and not request.are_prompt_logprobs_due:
            num_freed = _add_prompt_logprobs(update, request)
        room = MAX_MESSAGE_BYTES - num_freed
        dirty, self._dirty = self._dirty, {}
        for output in dirty.values():
            is_behind_prompt = output.index == 0 and request.prompt_logprobs is not None
            if is_behind_prompt and request.are_prompt_logprobs_due and output.is_open:
                continue  # Marked again when they are complete.
            if room <= 0 or (is_behind_prompt and not request.are_prompt_logprobs_due):
                self._dirty[output.index] = output
                continue
            before = output.num_delivered
            size, freed = _add_delta(update, output, room)
            room -= size
            num_freed += freed
            if output.num_delivered > before and self._times is not None:
                self._times.delivered(output, self._opened_s, is_first=not before)
            if output.num_delivered < output.num_seen or output.text:
                self._dirty[output.index] = output
            elif output.state is _FINISHED and not output.is_finish_delivered:
                output.is_finish_delivered = True
                self._num_unfinished -= 1
                update.finished.append(_finished_of(output))
        self._journal.charge(request, -num_freed)
        if self._dirty and self._sink is None:
            self._has_news.set()
        is_empty = not (update.deltas or update.finished or update.prompt_logprobs is not None)
        return None if is_empty else update


def _add_prompt_logprobs(update: Update, request: Request) -> int:
    """Adds the next part of them, the last one too; the bytes that the journal need no longer keep."""
    track = request.prompt_logprobs
    assert track is not None
    before, start = track.num_bytes, track.start
    end = min(request.num_prompt, start + max(1, MAX_MESSAGE_BYTES // track.token_bytes))
    update.prompt_logprobs = track.take(end)
    update.prompt_logprobs_start = start
    if end >= request.num_prompt:
        request.prompt_logprobs = None
        return before
    return before - track.num_bytes


def _add_delta(update: Update, output: Output, room: int) -> tuple[int, int]:
    """Adds what is new of output, as far as there is room.

    Returns the delta's size, and the bytes that the journal need no longer keep.
    """
    first, end = output.num_delivered, output.num_seen
    if end <= first and not output.text and not output.vector:
        return 0, 0
    track = output.logprobs
    token_bytes = 4 if track is None else 4 + track.token_bytes
    last = max(first, min(end, first + max(1, room // token_bytes)))
    num_text = output.text_bytes - output.text_offset
    text = ""
    if last >= end and output.text:
        text = output.text[0] if len(output.text) == 1 else "".join(output.text)
        output.text.clear()
        if num_text > room:
            num_chars = max(1, room // 4)  # No character has more bytes.
            output.text.append(text[num_chars:])
            text = text[:num_chars]
            num_text = len(text.encode())
    else:
        num_text = 0
    num_freed = num_text + len(output.vector)
    logprobs = None
    if track is not None:
        before = track.num_bytes
        logprobs = track.take(last)
        num_freed += before - track.num_bytes
    update.deltas.append(
        Delta(
            output.index,
            first,
            output.text_offset,
            output.ids[first:last].tobytes(),
            text,
            output.weights_version,
            output.vector,
            logprobs,
        )
    )
    output.num_delivered = last
    output.vector = b""
    output.text_offset += num_text
    return _DELTA_BYTES + 4 * (last - first) + num_freed, num_freed


def _finished_of(output: Output) -> Finished:
    ending = output.ending
    assert ending is not None, f"{output.request.request_id}/{output.index} finished without an ending"
    return Finished(
        index=output.index,
        reason=ending.reason,
        num_output=ending.num_output,
        text_bytes=output.text_bytes,
        stop_id=ending.stop_id,
        stop=ending.stop,
        prompt_tokens=output.request.num_prompt,
        cached_tokens=ending.cached_tokens,
        accepted_predictions=min(ending.accepted_predictions, ending.num_output),
        rejected_predictions=ending.rejected_predictions,
        error=ending.error,
    )
