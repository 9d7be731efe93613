"""One output on its way through its grammar: its matcher, which threads move on, and the mask of its next token.

    admit          follow(tokens)            a thread of the filler                 the step that samples
    START ------>  BUSY: tokens are known -> matcher goes over them, mask filled -> READY, or FAILED with `error`
                   where masks are chains, and no tokens have come: -> forced ids, a mask each -> READY

A matcher may take long over one mask. The step thread never waits inside it: a row whose mask is not there yields
nothing in that step, and the others go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens, MaskWords
from radixmesh.daemons.runtime.guided.source import invalid_grammar
from radixmesh.daemons.worker.guided.chain import ChainSink
from radixmesh.daemons.worker.guided.mask_memory import HostSink, MaskSink

BoolArray = npt.NDArray[np.bool_]

SLOW_S = 0.005
"""An output whose last mask took a thread more CPU time is for the slow threads, and nobody waits for its next one.

CPU time, as waiting for the interpreter's lock or for a core would make every output of a busy worker a slow one."""
_MOST_GROWTH_S = SLOW_S / 2
"""CPU seconds that a chain grows at a time: only a mask that is slow by itself makes its output a slow one."""
_REPLAY_S = 0.05  # Going over a resumed output on a thread that others wait for; ambiguous grammars need minutes.


class Guide:
    """start: makes the matcher, and the tokens of its vocabulary; may take long, and raise INVALID_GRAMMAR.

    position: of the next token in prompt and output. output_ids: tokens that the output has already. max_drafts: forced
    tokens that are made ready as drafts, with their masks. has_mask: that of the next token is published already, and
    may be read at any time: it is not filled once more. Public methods are the step thread's, but `run`, and those
    of many guides.
    """

    # One for all guides: a step takes it once for all of its outputs.
    _lock = threading.Lock()
    num_failures = 0
    """Of all guides so far: while it stays the same, no other guide has an error."""
    num_begun = 0
    """Outputs in calls of begin() so far: while it stays the same, no tokens have come for any of them."""

    def __init__(
        self,
        start: Callable[[], tuple[GrammarMatcher, GreedyTokens]],
        vocab_size: int,
        *,
        position: int,
        output_ids: IntArray,
        sink: MaskSink | None = None,
        max_drafts: int = 0,
        has_mask: bool = False,
    ) -> None:
        self._start, self._vocab_size, self._max_drafts = start, vocab_size, max_drafts
        self._has_mask = has_mask
        self._sink = sink or HostSink(vocab_size)
        self._position = position
        self._matcher: GrammarMatcher | None = None
        self._tokens: GreedyTokens | None = None
        self._output_ids: IntArray = output_ids
        self._num_replayed = 0
        self._forced: Sequence[int] = ()
        self._masks: list[BoolArray | None] = []
        self._pending: list[int] = []
        self._has_begun = False
        self._grows_since = 0
        # run() is called for it in any case.
        self._is_busy = True
        self._is_closed = False
        self._is_over = False
        self._waiter: threading.Event | None = None
        self.alone_s = 0.0
        """CPU seconds, at most SLOW_S, of the last mask that it had a call of its own for; 0: has had none."""
        self.is_slow = False
        self.is_suspect = False
        self.error: MeshError | None = None
        self._shares_calls = False

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return -(-self._vocab_size // 32)

    @property
    def is_ready(self) -> bool:
        """The mask of the next token is there."""
        return not self._is_busy and self.error is None

    def wait(self, seconds: float) -> bool:
        """Waits at most so long until it is ready, or failed; True if it is."""
        with self._lock:
            if not self._is_busy:
                return True
            self._waiter = waiter = threading.Event()
        return waiter.wait(max(seconds, 0.0))

    @staticmethod
    def begin(moves: Iterable[tuple[Guide, Sequence[int]]]) -> tuple[list[tuple[Guide, int]], list[Guide]]:
        """Tokens were sampled for these outputs. Returns those that share the library's calls, with the one token of
        each, for `shared_calls.py`; and those whose run() has to be called. The others run already, and take them too,
        or have left. Any thread."""
        shared: list[tuple[Guide, int]] = []
        alone: list[Guide] = []
        with Guide._lock:
            for guide, tokens in moves:
                if guide._is_closed:
                    continue
                Guide.num_begun += 1
                if guide._is_busy:
                    guide._pending += tokens
                    continue
                guide._is_busy = True
                if guide._shares_calls and len(tokens) == 1:
                    shared.append((guide, tokens[0]))
                else:
                    guide._pending += tokens
                    alone.append(guide)
        return shared, alone

    @staticmethod
    def rest(guides: Iterable[Guide]) -> list[Guide]:
        """The guides are through with their tokens. Returns those for which more came since: run() has to be called."""
        busy: list[Guide] = []
        closed: list[Guide] = []
        with Guide._lock:
            for guide in guides:
                if not guide._is_busy:  # It failed meanwhile, and is through.
                    continue
                if guide._pending and not guide._is_closed:
                    busy.append(guide)
                    continue
                guide._is_busy = False
                if guide._waiter is not None:
                    guide._waiter.set()
                    guide._waiter = None
                if guide._is_closed:
                    closed.append(guide)
        for guide in closed:
            guide._sink.release()
        return busy

    @staticmethod
    def fail_all(guides: Iterable[Guide], error: Exception) -> None:
        """An error that nobody foresaw ends these outputs: none of them has a mask to wait for."""
        guides = list(guides)
        for guide in guides:
            guide._fail(error)
        with Guide._lock:
            for guide in guides:
                guide._pending = []
        Guide.rest(guides)

    def close(self) -> None:
        """The output has left its slot."""
        with self._lock:
            self._is_closed = True
            is_busy = self._is_busy
        if not is_busy:
            self._sink.release()

    def run(self) -> bool:
        """Goes over the tokens that came and fills the mask behind them, until none is left; then its chain grows. On a
        filler's thread.

        True if a slow thread is to call it again: it is still going over the output so far.
        """
        while True:
            with self._lock:
                tokens, self._pending = self._pending, []
                is_closed = self._is_closed
                if tokens or not self._has_begun:
                    self._grows_since = Guide.num_begun
            began: float | None = None
            if not is_closed and self.error is None:
                try:
                    if not self._is_at_the_end():
                        # Tokens come already where a process before has left the mask.
                        with self._lock:
                            self._pending[:0] = tokens
                        self.is_slow = True
                        return True
                    # Reading a grammar, once, says nothing of its masks.
                    began = time.thread_time()
                    if tokens or not self._has_begun:
                        self._has_begun = True
                        self._advance(tokens)
                    self._grow(began + _MOST_GROWTH_S)
                except Exception as error:
                    self._fail(error)
            took_s = 0.0 if began is None else time.thread_time() - began
            self.alone_s, self.is_slow, self.is_suspect = min(took_s, SLOW_S), took_s > SLOW_S, False
            self._shares_calls = self._can_share_calls()
            if not Guide.rest([self]):
                return False

    def forced_ids(self, most: int) -> Sequence[int]:
        """Tokens of the text that must follow, at most so many; () where the grammar has a choice.

        The output may cut that text at other positions: they are drafts, which sampling confirms or not.
        """
        return self._forced[: max(most, 0)]

    def allowed(self, drafts: Sequence[int] = ()) -> BoolArray | None:
        """Ids that may come behind the known tokens and these drafts, bool [vocabulary]; of a guide that is ready.

        None where nothing is to be masked: the output is over, or a draft does not follow the grammar, so that sampling
        ends before it.
        """
        if len(drafts) < len(self._masks) and list(drafts) == list(self._forced[: len(drafts)]):
            return self._masks[len(drafts)]
        return self._filled(drafts)

    @property
    def matcher(self) -> GrammarMatcher:
        """Of a guide that shares calls."""
        assert self._matcher is not None
        return self._matcher

    @property
    def sink(self) -> MaskSink:
        """Memory of its mask."""
        return self._sink

    @property
    def tokens(self) -> GreedyTokens:
        """Of the vocabulary; of a guide that shares calls."""
        assert self._tokens is not None
        return self._tokens

    def went_on(self) -> int:
        """A shared call went over its token: the position of the next one."""
        self._position += 1
        return self._position

    def may_grow(self) -> bool:
        """Behind a shared call: its chain may grow. run() has to be called then, and its tokens wait for that."""
        sink = self._sink
        if self.error is not None or self._is_over or not isinstance(sink, ChainSink) or not sink.may_grow():
            return False
        self._grows_since = Guide.num_begun
        return True

    def filled(self, words: MaskWords | None, error: Exception | None) -> None:
        """Behind went_on(). words: the mask, still to be published; None: the output is over, or ends with `error`."""
        try:
            if error is not None:
                raise error
            if words is not None:
                self._sink.words[:] = words
            self._publish(is_over=words is None)
        except Exception as failure:
            self._fail(failure)
        self._shares_calls = self._can_share_calls()

    def suspect(self) -> None:
        """The call that filled its mask beside others' was slow: its next one is timed alone."""
        self.is_suspect, self._shares_calls = True, False

    def _can_share_calls(self) -> bool:
        """Its next token may be gone over, and its mask filled, by a call for many outputs."""
        is_quick = not (self.is_slow or self.is_suspect)
        is_at_the_end = self._matcher is not None and self._num_replayed >= len(self._output_ids)
        return is_quick and is_at_the_end and not self._is_over and self.error is None

    def _fail(self, error: Exception) -> None:
        """Ends the output; a library's own error does not end the worker."""
        if not isinstance(error, MeshError):
            error = invalid_grammar(f"the grammar cannot be followed any further: {error}", "")
        if self.error is None:
            self.error = error
            with Guide._lock:
                Guide.num_failures += 1
            self._sink.failed(error)

    def _advance(self, tokens: Sequence[int]) -> None:
        assert self._matcher is not None
        for token in tokens:
            self._position += 1
            # Behind the end of an output come tokens that nobody reads. Anything else that is refused is a library that
            # met a bound of its own, or broken logits.
            if not self._matcher.accept(token) and not self._matcher.is_over:
                raise stuck()
        # A chain is written anew where nobody reads: it grows from there.
        has_mask = self._has_mask and not tokens and not isinstance(self._sink, ChainSink)
        self._has_mask = False
        is_over = self._matcher.is_over
        if has_mask:
            # Tokens behind the end are gone over alone: a shared call would refuse them.
            self._is_over = is_over
            return
        if isinstance(self._sink, ChainSink) and not is_over and tokens and self._sink.foresaw(tokens):
            self._sink.go_on(self._position, len(tokens))
            self._sink.memory.told([self._sink.row], [self._position])
            return
        if not is_over:
            self._matcher.fill(self._sink.words)
        self._publish(is_over=is_over)

    def _grow(self, ends_s: float) -> None:
        """Makes its chain longer, mask by mask, by what the grammar forces. Each mask asks a few times for the
        interpreter's lock, and a long chain may take longer than a step, so it gives way as soon as tokens come, of
        whatever output. ends_s: of the thread's time."""
        sink, matcher = self._sink, self._matcher
        if self._is_over or not isinstance(sink, ChainSink) or not sink.may_grow():
            return
        assert matcher is not None
        token, accepted = self.tokens.forced_by(sink.last_mask), 0
        if token is None:
            sink.is_whole = True
            return
        try:
            for known in sink.forced:
                is_accepted = matcher.accept(known)
                assert is_accepted, "it was accepted before"
                accepted += 1
            while sink.may_grow() and not self._pending and self._grows_since == Guide.num_begun:
                if token is None or not matcher.accept(token):
                    sink.is_whole = True
                    break
                accepted += 1
                words = sink.next_mask
                matcher.fill(words)
                if not words.any():  # Nothing may follow: the output is told when it is here.
                    sink.is_whole = True
                    break
                sink.grow(token)
                token = self.tokens.forced_by(words)
                if time.thread_time() > ends_s:
                    break
        finally:
            matcher.rollback(accepted)

    def _publish(self, *, is_over: bool) -> None:
        """The sink's words are the mask of the next token, unless the output is over."""
        assert self._matcher is not None
        self._forced, self._masks, self._is_over = (), [], is_over
        words = self._sink.words
        if is_over:
            words[:] = -1
            self._masks = [None]
        elif not words.any():
            raise stuck()
        elif isinstance(self._sink, HostSink):
            self._masks = [_bits(words, self._vocab_size)]
            self._draft(self._matcher)
        self._sink.publish(self._position)

    def _is_at_the_end(self) -> bool:
        """Goes over the tokens that the output has already; False: not over all of them within its time. Raises
        INVALID_GRAMMAR for one that the grammar forbids."""
        if self._matcher is None:
            self._matcher, self._tokens = self._start()
        ends = time.perf_counter() + _REPLAY_S
        while self._num_replayed < len(self._output_ids):
            token = int(self._output_ids[self._num_replayed])
            if not self._matcher.accept(token):
                if self._matcher.is_over:  # Nobody reads what comes behind the end.
                    self._num_replayed = len(self._output_ids)
                    break
                at = self._num_replayed
                message = f"token {at} of the output so far ({token}) does not follow the grammar: send it anew"
                raise invalid_grammar(message, "")
            self._num_replayed += 1
            if time.perf_counter() > ends:
                return False
        return True

    def _draft(self, matcher: GrammarMatcher) -> None:
        """Makes forced tokens ready as drafts, mask by mask: the whole text that a small grammar forces may have
        gigabytes, or no end."""
        assert self._tokens is not None
        forced: list[int] = []
        words = np.zeros_like(self._sink.words)
        try:
            while len(forced) < self._max_drafts:
                mask = self._masks[-1]
                assert mask is not None
                token = self._tokens.forced(mask)
                if token is None or not matcher.accept(token):
                    break
                forced.append(token)
                matcher.fill(words)
                self._masks.append(_bits(words, self._vocab_size))
        finally:
            matcher.rollback(len(forced))
        self._forced = forced

    def _filled(self, drafts: Sequence[int]) -> BoolArray | None:
        matcher, accepted = self._matcher, 0
        assert matcher is not None
        words = np.zeros_like(self._sink.words)
        try:
            for draft in drafts:
                if not matcher.accept(draft):
                    return None
                accepted += 1
            if matcher.is_over:
                return None
            matcher.fill(words)
        finally:
            matcher.rollback(accepted)
        return _bits(words, self._vocab_size)


def stuck() -> MeshError:
    """The error of an output that no token may follow, and that may not end either."""
    return invalid_grammar("the grammar allows no token here, not even the end: it can never be satisfied", "")


def _bits(words: MaskWords, vocab_size: int) -> BoolArray:
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)


def mask_row(row: FloatArray, allowed: BoolArray, suppressed_ids: IntArray) -> tuple[FloatArray, bool]:
    """Logits in which nothing but the allowed ids can be sampled, and whether the suppressed ids still count.

    Ids that min_tokens suppresses stay out as long as the grammar leaves another one: where only the end is left, the
    output ends. Broken logits (NaN, or -inf for all that is allowed) leave the lowest allowed id.
    """
    usable = allowed.copy()
    usable[suppressed_ids] = False
    keeps_suppression = bool(usable.any())
    if not keeps_suppression:
        usable = allowed
    masked: FloatArray = np.where(usable & ~np.isnan(row), row, np.float32(-np.inf)).astype(np.float32)
    if masked.max() == -np.inf:
        masked[int(np.argmax(usable))] = 0.0
    return masked, keeps_suppression
