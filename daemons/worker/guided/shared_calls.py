"""Masks of several outputs by one call of the library.

A call a mask hands the interpreter's lock to another thread each time; with hundreds of outputs a step that takes
longer than the masks do. An output that was slow, or may have been, has calls of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarMatcher
from radixmesh.daemons.worker.guided.guide import SLOW_S, Guide, stuck


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
    began = time.perf_counter()
    matchers = [matcher for _, matcher, _ in taken]
    errors: list[Exception | None] = [None] * len(taken)
    try:
        for index, is_accepted in enumerate(matchers[0].accept_all(matchers, [token for _, _, token in taken])):
            errors[index] = None if is_accepted else stuck()
    except Exception as error:  # Matchers may be anywhere now: none of them goes on.
        errors = [error] * len(taken)
    chosen = [index for index, matcher in enumerate(matchers) if errors[index] is None and not matcher.is_over]
    rows = np.empty((len(chosen), taken[0][0].num_words), np.int32)
    try:
        if chosen:
            matchers[0].fill_all([matchers[index] for index in chosen], rows)
    except Exception:  # One output's: its own call tells which one's.
        for index, words in zip(chosen, rows, strict=True):
            try:
                matchers[index].fill(words)
            except Exception as error:
                errors[index] = error
    masks = dict(zip(chosen, rows, strict=True))
    is_suspect = time.perf_counter() - began > SLOW_S
    ended = [
        guide.finish_one(masks.get(index), errors[index], is_suspect=is_suspect)
        for index, (guide, _, _) in enumerate(taken)
    ]
    return [guide for (guide, _, _), is_again in zip(taken, ended, strict=True) if is_again]
