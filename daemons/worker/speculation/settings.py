"""Choice of a drafter and of the length of its drafts, from the flags that SGLang's users know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from radixmesh.daemons.worker.limits import MAX_TOKENS_PER_ROW

DEFAULT_NUM_STEPS = 4


class SpeculativeAlgorithm(StrEnum):
    OFF = "off"
    NGRAM = "ngram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The algorithm that proposes, and the most tokens that a row drafts in one step."""

    algorithm: SpeculativeAlgorithm
    max_drafts: int


def read_speculation(
    algorithm: SpeculativeAlgorithm, num_steps: int | None, num_draft_tokens: int | None
) -> Speculation | None:
    """None: off. num_steps: drafts of a row. num_draft_tokens: tokens that a step verifies of a row: its last one too.

    Raises ValueError for numbers that do not fit each other, or the algorithm.
    """
    if algorithm is SpeculativeAlgorithm.OFF:
        if num_steps is not None or num_draft_tokens is not None:
            raise ValueError("--speculative-num-steps and --speculative-num-draft-tokens need --speculative-algorithm "
                "ngram")  # fmt: skip
        return None
    if num_steps is None:
        num_steps = DEFAULT_NUM_STEPS if num_draft_tokens is None else num_draft_tokens - 1
    if num_draft_tokens is not None and num_draft_tokens != num_steps + 1:
        raise ValueError(f"--speculative-num-draft-tokens is {num_draft_tokens}, but a chain of {num_steps} drafts "
            f"(--speculative-num-steps) is verified as {num_steps + 1} tokens: there are no trees yet; leave one of "
            "them out")  # fmt: skip
    if not 1 <= num_steps < MAX_TOKENS_PER_ROW:
        raise ValueError(f"--speculative-num-steps must be in [1, {MAX_TOKENS_PER_ROW - 1}], not {num_steps}")
    return Speculation(algorithm=algorithm, max_drafts=num_steps)
