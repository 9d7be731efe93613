"""Tokens that a grammar forces, as they are kept from one token to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens, MaskWords
from radixmesh.daemons.worker.guided.chain import NO_CHAIN, chain_behind
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_memory import ChainSink


class _Counting(GrammarMatcher):
    """Allows nothing but one text, and counts calls."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._num, self.num_accepts, self.num_fills = ids, 0, 0, 0

    @property
    def is_over(self) -> bool:
        return self._num == len(self._ids)

    def fill(self, words: MaskWords) -> None:
        self.num_fills += 1
        words[:] = 0
        if not self.is_over:
            words[0] = 1 << self._ids[self._num]

    def accept(self, token: int) -> bool:
        self.num_accepts += 1
        is_right = not self.is_over and token == self._ids[self._num]
        self._num += is_right
        return is_right

    def rollback(self, num_tokens: int) -> None:
        self._num -= num_tokens


class _Forced(GreedyTokens):
    def __init__(self) -> None:
        pass

    def forced_by(self, words: MaskWords) -> int | None:
        bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return int(bits[0]) if len(bits) == 1 else None


def test_masks_that_are_known_are_not_made_again() -> None:
    matcher = _Counting([1, 2, 3, 4, 5, 6])
    chain = chain_behind(matcher, _Forced(), (), NO_CHAIN, 3, 1)
    assert list(chain.forced) == [1, 2, 3] and [int(mask[0]) for mask in chain.masks] == [2, 4, 8, 16]
    assert (matcher.num_fills, matcher._num) == (4, 0), "it stands where it stood"
    matcher.accept(1), matcher.accept(2)
    before = matcher.num_accepts
    left = chain_behind(matcher, _Forced(), (1, 2), chain, 0, 1)
    assert list(left.forced) == [3] and [int(mask[0]) for mask in left.masks] == [8, 16]
    assert (matcher.num_fills, matcher.num_accepts) == (4, before), "the library is not asked at all"
    more = chain_behind(matcher, _Forced(), (), left, 3, 1)
    assert list(more.forced) == [3, 4, 5] and matcher.num_fills == 6 and matcher._num == 2
    matcher.accept(3)
    assert list(chain_behind(matcher, _Forced(), (9,), more, 0, 1).forced) == [], "another token than was forced"


class _Noting(ChainSink):
    """Notes what is published: position, and number of forced tokens."""

    max_forced = 12

    def __init__(self) -> None:
        self.words = np.zeros(1, np.int32)
        self.published: list[tuple[int, int]] = []

    def publish(self, position: int) -> None:
        self.publish_chain(position, self.words[None], ())

    def publish_chain(self, position: int, words: MaskWords, forced: Sequence[int]) -> None:
        assert len(words) == len(forced) + 1
        self.published.append((position, len(forced)))

    def release(self) -> None:
        return


def test_tokens_that_come_while_a_chain_grows_have_their_masks_first() -> None:
    """A long chain would make the known masks of the next step late, and with them all that follow."""
    matcher, sink = _Counting(range(1, 30)), _Noting()
    guide = Guide(lambda: (matcher, _Forced()), 32, position=5, output_ids=np.zeros(0, np.int32), sink=sink)
    fill = matcher.fill

    def fill_and_sample(words: MaskWords) -> None:
        fill(words)
        if matcher.num_fills == 4:
            assert Guide.begin([(guide, [1])]) == ([], []), "it runs already, and takes them too"

    matcher.fill = fill_and_sample  # type: ignore[method-assign]
    guide.run()
    assert sink.published[:2] == [(5, 0), (6, 2)], "masks of three forced tokens were there by then"
    assert sink.published[2:] == [(6, 12)] and matcher.num_fills == 1 + 3 + 10
    guide.close()
