"""Masks of several outputs by one call of the library.

A call a mask hands the interpreter's lock to another thread each time; with hundreds of outputs a step that takes
longer than the masks do. An output that was slow, or may have been, has calls of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, MaskWords
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.guide import SLOW_S, Guide, stuck
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory

log = get_logger(__name__)

_HEAD_WORDS = 64
# Kept by each thread: memory of this size, given back and taken anew, costs more page faults than the masks cost time.
_own = threading.local()


def run_together(shared: Sequence[tuple[Guide, int]], alone: Sequence[Guide], told_s: float = 0.0) -> list[Guide]:
    """Runs what `Guide.begin` returned, of outputs of one backend. told_s: when the tokens were known, for the log.

    Returns those that a slow thread is to run again.
    """
    more = _step_together(shared, told_s) if shared else ()
    return [guide for guide in (*alone, *more) if guide.run()]


def _step_together(shared: Sequence[tuple[Guide, int]], told_s: float) -> list[Guide]:
    """Returns outputs whose next tokens have come meanwhile."""
    began, began_s = time.thread_time(), time.perf_counter()
    guides = [guide for guide, _ in shared]
    matchers = [guide.matcher for guide in guides]
    chosen, errors = _go_over(matchers, [token for _, token in shared])
    memory, words, rows = _where_to_fill([guides[index] for index in chosen])
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
    positions = [guide.went_on() for guide in guides]
    published = _publish_together(memory, rows, chosen, positions, errors)
    published_s = time.perf_counter()
    if len(published) < len(guides):
        row_of = dict(zip(chosen, rows, strict=True))
        for index, guide in enumerate(guides):
            if index not in published:
                guide.filled(words[row_of[index]] if index in row_of else None, errors.get(index))
    more = Guide.rest(guides)
    times_s = began_s, since_s, filled_s, published_s, time.perf_counter()
    log.debug("masks_filled", rows=len(shared), until_ms=[round((at_s - told_s) * 1e3, 3) for at_s in times_s])
    return more


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


def _where_to_fill(guides: Sequence[Guide]) -> tuple[MaskMemory | None, MaskWords, Sequence[int]]:
    """The memory of all of these guides, None: they have none together; words to be filled, and the row of each."""
    sinks = [guide.sink for guide in guides]
    memory = sinks[0].memory if sinks else None
    if memory is not None and all(sink.memory is memory for sink in sinks):
        return memory, memory.words, [sink.row for sink in sinks]
    return None, _own_words(len(guides), guides[0].num_words if guides else 0), range(len(guides))


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
    rows: Sequence[int],
    errors: dict[int, Exception],
) -> None:
    """Masks of the chosen matchers into these rows of `words`, an error where there is none."""
    try:
        among = matchers if len(chosen) == len(matchers) else [matchers[index] for index in chosen]
        matchers[0].fill_all(among, words, rows)
    except Exception:  # One output's: its own call tells which one's.
        for index, row in zip(chosen, rows, strict=True):
            try:
                matchers[index].fill(words[row])
            except Exception as error:
                errors[index] = error


def _publish_together(
    memory: MaskMemory | None,
    rows: Sequence[int],
    chosen: Sequence[int],
    positions: Sequence[int],
    errors: Mapping[int, Exception],
) -> Collection[int]:
    """Publishes the chosen masks that allow something, which are in these rows; returns their indexes. The others are
    left to their outputs, and so are all where they have no memory together."""
    if memory is None:
        return ()
    # Nearly every mask has a token among the first ids, where the single bytes are; a look at all words takes long.
    is_good = np.bitwise_or.reduce(memory.words[rows, :_HEAD_WORDS], axis=1) != 0
    if errors:
        is_good &= np.array([index not in errors for index in chosen])
    if is_good.all():
        memory.publish(rows, [positions[index] for index in chosen])
        return chosen if isinstance(chosen, range) else frozenset(chosen)
    good = np.flatnonzero(is_good).tolist()
    published = [chosen[number] for number in good]
    if good:
        memory.publish([rows[number] for number in good], [positions[index] for index in published])
    return frozenset(published)
