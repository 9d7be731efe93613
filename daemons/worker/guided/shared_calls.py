"""Masks of several outputs by one call of the library.

A call a mask hands the interpreter's lock to another thread each time; with hundreds of outputs a step that takes
longer than the masks do. An output that was slow, or may have been, has calls of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, MaskWords
from radixmesh.daemons.worker.guided.guide import SLOW_S, Guide, stuck
from radixmesh.daemons.worker.guided.mask_memory import MaskMemory

_HEAD_WORDS = 64
# Kept by each thread: memory of this size, given back and taken anew, costs more page faults than the masks cost time.
_own = threading.local()


def run_together(guides: Sequence[Guide]) -> list[Guide]:
    """run() of several outputs of one backend; those that have one new token each share the library's calls.

    Returns those that a slow thread is to run again.
    """
    taken: list[tuple[Guide, GrammarMatcher, int]] = []
    alone: list[Guide] = []
    for guide in guides:
        one = guide.take_one()
        if one is None:
            alone.append(guide)
        else:
            taken.append((guide, *one))
    if taken:
        alone += _step_together(taken)
    return [guide for guide in alone if guide.run()]


def _step_together(taken: Sequence[tuple[Guide, GrammarMatcher, int]]) -> list[Guide]:
    """Returns outputs whose next tokens have come meanwhile."""
    began = time.thread_time()
    guides = [guide for guide, _, _ in taken]
    matchers = [matcher for _, matcher, _ in taken]
    errors: list[Exception | None] = [None] * len(taken)
    try:
        for index, is_accepted in enumerate(matchers[0].accept_all(matchers, [token for _, _, token in taken])):
            if not is_accepted:
                errors[index] = stuck()
    except Exception as error:  # Matchers may be anywhere now: none of them goes on.
        errors = [error] * len(taken)
    chosen = [index for index, matcher in enumerate(matchers) if errors[index] is None and not matcher.is_over]
    locations = [guides[index].mask_location() for index in chosen]
    memory = locations[0][0] if locations else None
    is_direct = memory is not None and all(location[0] is memory for location in locations)
    words = _own_words(len(chosen), guides[0].num_words)
    since_s = time.perf_counter()
    if chosen:
        _fill_together(matchers, chosen, words, errors)
    took_s = time.thread_time() - began
    if matchers[0].fill_threads > 1:  # CPU time of other threads: nobody tells it.
        took_s = max(took_s, time.perf_counter() - since_s)
    is_suspect = took_s > SLOW_S + 2 * sum(guide.alone_s for guide in guides)
    published: set[int] = set()
    if memory is not None and is_direct:
        published = _publish_together(memory, words, chosen, locations, errors)
    masks = dict(zip(chosen, words, strict=True))
    again: list[Guide] = []
    for index, guide in enumerate(guides):
        mask = None if index in published else masks.get(index)
        if guide.finish_one(mask, errors[index], is_suspect=is_suspect, is_published=index in published):
            again.append(guide)
    return again


def _own_words(num: int, num_words: int) -> MaskWords:
    """This thread's memory for so many masks."""
    words: MaskWords | None = getattr(_own, "words", None)
    if words is None or len(words) < num or words.shape[1] != num_words:
        words = _own.words = np.zeros((num, num_words), np.int32)
    return words[:num]


def _fill_together(
    matchers: Sequence[GrammarMatcher], chosen: Sequence[int], words: MaskWords, errors: list[Exception | None]
) -> None:
    """Masks of the chosen matchers into the rows of `words`, an error where there is none."""
    try:
        matchers[0].fill_all([matchers[index] for index in chosen], words, range(len(chosen)))
    except Exception:  # One output's: its own call tells which one's.
        for index, mask in zip(chosen, words, strict=True):
            try:
                matchers[index].fill(mask)
            except Exception as error:
                errors[index] = error


def _publish_together(
    memory: MaskMemory,
    words: MaskWords,
    chosen: Sequence[int],
    locations: Sequence[tuple[MaskMemory | None, int, int]],
    errors: Sequence[Exception | None],
) -> set[int]:
    """Publishes the masks that allow something; returns their indexes. The others are left to their outputs."""
    # Nearly every mask has a token among the first ids, where the single bytes are; a look at all words takes long.
    heads: MaskWords = np.bitwise_or.reduce(words[:, :_HEAD_WORDS], axis=1)
    good = [
        number
        for number, (index, is_allowing) in enumerate(zip(chosen, heads.tolist(), strict=True))
        if is_allowing and errors[index] is None
    ]
    if len(good) < len(chosen):
        words = words[good]
    memory.publish(words, [locations[number][1] for number in good], [locations[number][2] for number in good])
    return {chosen[number] for number in good}
