"""Tokens that a grammar forces behind an output, and the mask of each: what a device drafts and verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens, MaskWords


class Chain(NamedTuple):
    """masks: of the next token, and behind each of the forced ones; one more than those."""

    forced: Sequence[int]
    masks: Sequence[MaskWords]


NO_CHAIN = Chain((), ())


def chain_behind(
    matcher: GrammarMatcher,
    vocabulary: GreedyTokens,
    tokens: Sequence[int],
    before: Chain,
    most: int,
    num_words: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Chain:
    """Forced tokens behind `tokens`, over which the matcher has gone. before: the chain ahead of them, of which stays
    what they have not used up. most: tokens up to which more are looked for, as long as it goes_on()."""
    num = len(tokens)
    if before.masks and list(tokens) == list(before.forced[:num]):
        forced, masks = list(before.forced[num:]), list(before.masks[num:])
    else:
        forced, masks = [], [_filled(matcher, num_words)]
    if len(forced) >= most:
        return Chain(forced, masks)
    accepted = 0
    try:
        for known in forced:
            is_accepted = matcher.accept(known)
            assert is_accepted, "it was accepted before"
            accepted += 1
        while len(forced) < most and goes_on():
            token = vocabulary.forced_by(masks[-1])
            if token is None or not matcher.accept(token):
                break
            accepted += 1
            forced.append(token)
            masks.append(_filled(matcher, num_words))
    finally:
        matcher.rollback(accepted)
    return Chain(forced, masks)


def _filled(matcher: GrammarMatcher, num_words: int) -> MaskWords:
    words: MaskWords = np.zeros(num_words, np.int32)
    matcher.fill(words)
    return words
