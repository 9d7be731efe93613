"""Masks of several outputs by one call of the library.

A call a mask hands the interpreter's lock to another thread each time; with hundreds of outputs a step that takes
longer than the masks do. An output that was slow, or may have been, has calls of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, MaskWords
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.chain import ChainMemory, ChainSink
from radixmesh.daemons.worker.guided.guide import SLOW_S, Guide, stuck
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory, Rows

log = get_logger(__name__)

_HEAD_WORDS = 64
# Kept by each thread: memory of this size, given back and taken anew, costs more page faults than the masks cost time.
_own = threading.local()


class Left(NamedTuple):
    """Outputs whose run() is to be called once more: slow ones on a slow thread; and those whose chains may grow, where
    nobody waits for it."""

    slow: Sequence[Guide]
    growing: Sequence[Guide]


def run_together(shared: Sequence[tuple[Guide, int]], alone: Sequence[Guide], told_s: float = 0.0) -> Left:
    """Runs what `Guide.begin` returned, of outputs of one backend. told_s: when the tokens were known, for the log."""
    more, growing = _step_together(shared, told_s) if shared else ((), ())
    return Left([guide for guide in (*alone, *more) if guide.run()], growing)


def _step_together(shared: Sequence[tuple[Guide, int]], told_s: float) -> tuple[Sequence[Guide], Sequence[Guide]]:
    """Returns outputs whose next tokens have come meanwhile, and those whose chains may grow."""
    began, began_s = time.thread_time(), time.perf_counter()
    guides = [guide for guide, _ in shared]
    matchers, memory = [guide.matcher for guide in guides], _memory_of(guides)
    accepted, errors = _go_over(matchers, [token for _, token in shared])
    positions = [guide.went_on() for guide in guides]
    chosen = accepted
    if isinstance(memory, ChainMemory):
        chosen = _without_foreseen(memory, shared, accepted, positions)
    among = [guides[index] for index in chosen]
    words, rows = _where_to_fill(memory, among)
    since_s = time.perf_counter()
    if chosen:
        _fill_together(matchers, chosen, words, rows, errors)
    filled_s = time.perf_counter()
    took_s = time.thread_time() - began
    if matchers[0].fill_threads > 1:  # CPU time of other threads: nobody tells it.
        took_s = max(took_s, filled_s - since_s)
    if took_s > SLOW_S and took_s > SLOW_S + 2 * sum(guide.alone_s for guide in guides):
        for guide in guides:
            guide.suspect()
    published = _publish_together(memory, rows, chosen, among, positions, errors)
    published_s = time.perf_counter()
    if len(published) < len(chosen) or len(accepted) < len(guides):
        row_of = dict(zip(chosen, rows, strict=True))
        foreseen = set(accepted).difference(chosen)
        for index, guide in enumerate(guides):
            if index not in published and index not in foreseen:
                guide.filled(words[row_of[index]] if index in row_of else None, errors.get(index))
    growing = frozenset(_growing(memory, guides, chosen, rows)) if isinstance(memory, ChainMemory) else frozenset()
    more = Guide.rest(guides if not growing else [guide for guide in guides if guide not in growing])
    times_s = began_s, since_s, filled_s, published_s, time.perf_counter()
    log.debug("masks_filled", rows=len(shared), until_ms=[round((at_s - told_s) * 1e3, 3) for at_s in times_s])
    return more, list(growing)


def _memory_of(guides: Sequence[Guide]) -> MaskMemory | None:
    """The memory of all of these guides, None: they have none together."""
    memory = guides[0].sink.memory
    return memory if all(guide.sink.memory is memory for guide in guides) else None


def _without_foreseen(
    memory: ChainMemory, shared: Sequence[tuple[Guide, int]], accepted: Sequence[int], positions: Sequence[int]
) -> Sequence[int]:
    """Publishes what chains have behind the tokens that they foresaw. Returns the indexes of the other outputs that go
    on."""
    others: list[int] = []
    foreseen: list[int] = []
    for index in accepted:
        guide, token = shared[index]
        sink = guide.sink
        if isinstance(sink, ChainSink) and sink.foresaw((token,)):
            sink.go_on(positions[index], 1)
            foreseen.append(index)
        else:
            others.append(index)
    if foreseen:
        memory.told([shared[index][0].sink.row for index in foreseen], [positions[index] for index in foreseen])
    return others


def _growing(memory: ChainMemory, guides: Sequence[Guide], chosen: Sequence[int], rows: Rows) -> Sequence[Guide]:
    """Outputs whose chains may grow. chosen, rows: those of new masks, and where these are in the memory."""
    if not memory.max_forced:
        return ()
    new = [
        index for index, may_be in zip(chosen, guides[0].tokens.may_force(memory.words, rows), strict=True) if may_be
    ]
    foreseen = set(range(len(guides))).difference(chosen)
    return [guide for guide in (guides[index] for index in (*new, *foreseen)) if guide.may_grow()]


def _go_over(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> tuple[Sequence[int], dict[int, Exception]]:
    """Indexes of the matchers that go on behind their tokens, and the errors of those that cannot."""
    everyone = range(len(matchers))
    try:
        are_accepted = matchers[0].accept_all(matchers, tokens)
        left = set(matchers[0].over_among(matchers, tokens))
    except Exception as error:  # Matchers may be anywhere now: none of them goes on.
        return (), dict.fromkeys(everyone, error)
    errors: dict[int, Exception] = {}
    if not all(are_accepted):
        errors = {index: stuck() for index in everyone if not are_accepted[index]}
    left.update(errors)
    return [index for index in everyone if index not in left] if left else everyone, errors


def _where_to_fill(memory: MaskMemory | None, guides: Sequence[Guide]) -> tuple[MaskWords, Rows]:
    """Words to be filled, and the index of each of these guides' in them."""
    if memory is not None:
        return memory.words, memory.begin([guide.sink.row for guide in guides])
    return _own_words(len(guides), guides[0].num_words if guides else 0), range(len(guides))


def _own_words(num: int, num_words: int) -> MaskWords:
    """This thread's memory for so many masks."""
    words: MaskWords | None = getattr(_own, "words", None)
    if words is None or len(words) < num or words.shape[1] != num_words:
        words = _own.words = np.zeros((num, num_words), np.int32)
    return words[:num]


def _fill_together(
    matchers: Sequence[GrammarMatcher],
    chosen: Sequence[int],
    words: MaskWords,
    rows: Rows,
    errors: dict[int, Exception],
) -> None:
    """Masks of the chosen matchers into these rows of `words`, an error where there is none."""
    try:
        among = matchers if len(chosen) == len(matchers) else [matchers[index] for index in chosen]
        matchers[0].fill_all(among, words, rows if isinstance(rows, Sequence) else rows.tolist())
    except Exception:  # One output's: its own call tells which one's.
        for index, row in zip(chosen, rows, strict=True):
            try:
                matchers[index].fill(words[row])
            except Exception as error:
                errors[index] = error


def _publish_together(
    memory: MaskMemory | None,
    rows: Rows,
    chosen: Sequence[int],
    guides: Sequence[Guide],
    positions: Sequence[int],
    errors: Mapping[int, Exception],
) -> Collection[int]:
    """Publishes the masks of the chosen guides that allow something, which are in these rows; returns their indexes.
    The others are left to their outputs, and so are all where they have no memory together."""
    if memory is None or not chosen:
        return ()
    # Nearly every mask has a token among the first ids, where the single bytes are; a look at all words takes long.
    is_good = np.bitwise_or.reduce(memory.words[rows, :_HEAD_WORDS], axis=1) != 0
    if errors:
        is_good &= np.array([index not in errors for index in chosen])
    if not is_good.all():
        good = np.flatnonzero(is_good).tolist()
        chosen, guides = [chosen[number] for number in good], [guides[number] for number in good]
    if chosen:
        sinks = [guide.sink for guide in guides]
        memory.publish([sink.row for sink in sinks], [positions[index] for index in chosen])
        if isinstance(memory, ChainMemory):
            for sink in sinks:
                if isinstance(sink, ChainSink):
                    sink.published()
    return chosen if isinstance(chosen, range) else frozenset(chosen)
