"""Tokens that a grammar forces, as they are kept from one token to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens, GuidedVocabulary, MaskWords
from radixmesh.daemons.worker.guided import guide as guide_module
from radixmesh.daemons.worker.guided.chain import ChainMemory, ChainShape, ChainSink
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.mask_memory import Rows
from radixmesh.daemons.worker.guided.shared_calls import run_together


class _Counting(GrammarMatcher):
    """Allows nothing but one text, and counts calls."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self.num_taken, self.num_fills = ids, 0, 0

    @property
    def is_over(self) -> bool:
        return self.num_taken == len(self._ids)

    def fill(self, words: MaskWords) -> None:
        self.num_fills += 1
        words[:] = 0
        if not self.is_over:
            words[0] = 1 << self._ids[self.num_taken]

    def accept(self, token: int) -> bool:
        is_right = not self.is_over and token == self._ids[self.num_taken]
        self.num_taken += is_right
        return is_right

    def rollback(self, num_tokens: int) -> None:
        self.num_taken -= num_tokens


class _Forced(GreedyTokens):
    def __init__(self) -> None:
        pass

    def may_force(self, words: npt.NDArray[np.int32], rows: Sequence[int] | IntArray) -> list[bool]:
        return [True] * len(rows)

    def forced_by(self, words: MaskWords) -> int | None:
        bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return int(bits[0]) if len(bits) == 1 else None


class _Noting(ChainMemory):
    """Notes what is published of its one output: position, and number of forced ids."""

    def __init__(self, max_forced: int) -> None:
        shape = ChainShape(num_rows=1, max_forced=max_forced, num_words=1)
        super().__init__(np.zeros(shape.num_ints, np.int32), shape)
        self.published: list[tuple[int, int]] = []

    def told(self, rows: Rows, positions: Rows) -> None:
        self.published.append((int(positions[0]), self.num_ids))

    @property
    def head(self) -> list[int]:
        return self.heads[int(self.versions[0, 0]) % 2].tolist()

    @property
    def num_ids(self) -> int:
        return self.head[1]


class _Sink(ChainSink):
    def release(self) -> None:
        return


def _guide(matcher: _Counting, chains: _Noting) -> Guide:
    return Guide(lambda: (matcher, _Forced()), 32, position=5, output_ids=np.zeros(0, np.int32), sink=_Sink(chains, 0))


def _went_on(guide: Guide, tokens: Sequence[int]) -> None:
    shared, alone = Guide.begin([(guide, tokens)])
    left = run_together(shared, alone)
    assert not left.slow
    for growing in left.growing:
        growing.run()


def test_masks_that_are_known_are_not_made_again() -> None:
    """In either way of going on: a call for one output, or for many."""
    for num_tokens in (1, 2):
        matcher, chains = _Counting([1, 2, 3, 4, 5, 6, 7]), _Noting(3)
        guide = _guide(matcher, chains)
        guide.run()
        assert chains.head == [5, 3, 1, 2, 3] and [int(chains.mask(0, at)[0]) for at in range(4)] == [2, 4, 8, 16]
        assert (matcher.num_fills, matcher.num_taken) == (4, 0), "it stands where it stood"
        _went_on(guide, [1, 2][:num_tokens])
        assert chains.published == [(5, 0), (5 + num_tokens, 3 - num_tokens)], "known masks are there at once"
        assert chains.head == [5 + num_tokens, 3, *range(1 + num_tokens, 4 + num_tokens)]
        assert [int(chains.mask(0, at)[0]) for at in range(4)] == [2 << at + num_tokens for at in range(4)]
        assert (matcher.num_fills, matcher.num_taken) == (4 + num_tokens, num_tokens)
        guide.close()


def test_another_token_than_was_foreseen_begins_a_chain_anew() -> None:
    matcher, chains = _Counting([1, 2, 3, 4, 5, 6]), _Noting(3)
    sink = _Sink(chains, 0)
    sink.words[:] = 2
    sink.publish(5)
    for token in (1, 2):
        sink.next_mask[:] = 2 << token
        sink.grow(token)
    assert sink.foresaw([1]) and sink.foresaw([1, 2]) and not sink.foresaw([2]) and not sink.foresaw([1, 2, 3])
    before, other = chains.versions[0].tolist(), chains.head
    matcher.fill(sink.words)
    assert chains.versions[0].tolist() == [before[0], before[0] + 1] and chains.head == other, "it is still published"
    sink.publish(6)
    assert chains.head[:2] == [6, 0] and not sink.foresaw([2]) and sink.may_grow()


def test_an_output_behind_which_nothing_may_follow_is_no_part_of_a_chain() -> None:
    """The library met a bound of its own: who comes there is told so, and nobody samples by such a mask."""
    matcher, chains = _Counting([1, 2, 3, 4]), _Noting(5)
    guide, fill = _guide(matcher, chains), matcher.fill

    def fill_less(words: MaskWords) -> None:
        fill(words)
        if matcher.num_taken == 2:
            words[:] = 0

    matcher.fill = fill_less  # type: ignore[method-assign]
    guide.run()
    assert chains.head[:3] == [5, 1, 1]
    _went_on(guide, [1])
    assert guide.error is None and chains.head[:2] == [6, 0]
    _went_on(guide, [2])
    assert guide.error is not None


def test_tokens_that_come_while_a_chain_grows_have_their_masks_first() -> None:
    """A long chain would make the known masks of the next step late, and with them all that follow."""
    matcher, chains = _Counting(range(1, 30)), _Noting(12)
    guide = _guide(matcher, chains)
    fill = matcher.fill

    def fill_and_sample(words: MaskWords) -> None:
        fill(words)
        if matcher.num_fills == 4:
            assert Guide.begin([(guide, [1])]) == ([], []), "it runs already, and takes them too"

    matcher.fill = fill_and_sample  # type: ignore[method-assign]
    guide.run()
    assert chains.published == [(5, 0), (6, 2)], "masks of three forced tokens were there by then"
    assert chains.head == [6, 12, *range(2, 14)] and matcher.num_fills == 1 + 3 + 10
    guide.close()


def test_a_chain_whose_masks_take_long_gives_the_thread_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows on with the next token of its output."""
    monkeypatch.setattr(guide_module, "_MOST_GROWTH_S", -1.0)
    matcher, chains = _Counting(range(1, 30)), _Noting(12)
    guide = _guide(matcher, chains)
    guide.run()
    assert chains.num_ids == 1
    _went_on(guide, [1])
    assert chains.head[:3] == [6, 1, 2]
    guide.close()


def test_a_mask_that_allows_two_single_bytes_forces_nothing() -> None:
    """A look at many masks at once says no only where a look at each would."""
    texts = [b"a", b"b", b"ab", b"abc", b"bc", b"", b"a", b"\xff"]
    tokens = GreedyTokens(GuidedVocabulary(texts, (5,), 40))
    masks = np.zeros((256, 2), np.int32)
    masks[:, 0] = np.arange(256)
    may_force = tokens.may_force(masks, range(255, -1, -1))[::-1]
    forced = [tokens.forced_by(mask) is not None for mask in masks]
    assert sum(forced) > 5 and all(may for may, is_forced in zip(may_force, forced, strict=True) if is_forced)
    assert not may_force[0b1000010] and not may_force[0b11000000] and may_force[0b1101]
