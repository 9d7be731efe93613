"""One output on its way through its grammar, as sampling needs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import FloatArray, IntArray
from radixmesh.daemons.runtime.guided.backend import GrammarMatcher, GreedyTokens
from radixmesh.daemons.runtime.guided.source import invalid_grammar

BoolArray = npt.NDArray[np.bool_]


class Guide:
    """The step thread alone uses it. vocab_size: ids of a row of logits. tokens: for forced texts."""

    def __init__(self, matcher: GrammarMatcher, vocab_size: int, tokens: GreedyTokens) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._words = np.zeros(-(-vocab_size // 32), np.int32)
        self._vocab_size = vocab_size

    def replay(self, tokens: IntArray) -> None:
        """Goes over the tokens that the output has already. Raises INVALID_GRAMMAR for one that the grammar forbids."""
        for position, token in enumerate(tokens.tolist()):
            if not self._matcher.accept(token):
                message = f"token {position} of the output so far ({token}) does not follow the grammar: send it anew"
                raise invalid_grammar(message, "")

    def accept(self, token: int) -> bool:
        """One token further. False if the grammar forbids it, or the output was over."""
        return self._matcher.accept(token)

    @property
    def is_over(self) -> bool:
        """Nothing follows: the output has ended, and what is sampled behind it is dropped."""
        return self._matcher.is_over

    def forced_ids(self, most: int) -> Sequence[int]:
        """Tokens of the text that must follow, at most so many; () where the grammar has a choice.

        The output may cut that text in other places: they are drafts, which sampling confirms or not.
        """
        if most < 1 or self._matcher.is_over:
            return ()
        return self._tokens.encode(self._matcher.forced_text(), most)

    def is_stuck(self) -> bool:
        """No token may follow, not even the end."""
        allowed = self.allowed()
        return allowed is not None and not allowed.any()

    def allowed(self, drafts: Sequence[int] = ()) -> BoolArray | None:
        """Ids that may come behind the known tokens and these drafts, bool [vocabulary].

        None where nothing is to be masked: the output is over, or a draft does not follow the grammar, so that sampling
        ends before it.
        """
        accepted = 0
        try:
            for draft in drafts:
                if not self._matcher.accept(draft):
                    return None
                accepted += 1
            if self._matcher.is_over:
                return None
            self._matcher.fill(self._words)
        finally:
            self._matcher.rollback(accepted)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=self._vocab_size)
        return bits.view(np.bool_)


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
