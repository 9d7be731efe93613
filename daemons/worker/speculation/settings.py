"""Choice of a drafter and of the length of its drafts, from the flags that SGLang's users know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from radixmesh.daemons.worker.limits import MAX_TOKENS_PER_ROW

DEFAULT_NUM_STEPS = 4


class SpeculativeAlgorithm(StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    STANDALONE = "standalone"
    EAGLE3 = "eagle3"
    MTP = "mtp"


_OF_FOLDER = (SpeculativeAlgorithm.STANDALONE, SpeculativeAlgorithm.EAGLE3)
NETWORKS = (*_OF_FOLDER, SpeculativeAlgorithm.MTP)
"""Those by which a network drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The algorithm that proposes, and the most tokens that a row drafts in one step.

    draft_model: folder of the network that drafts, where that is not the model's own.
    """

    algorithm: SpeculativeAlgorithm
    max_drafts: int
    draft_model: Path | None = None


def read_speculation(
    algorithm: SpeculativeAlgorithm,
    num_steps: int | None,
    num_draft_tokens: int | None,
    draft_model: Path | None = None,
) -> Speculation | None:
    """None: off. num_steps: drafts of a row. num_draft_tokens: tokens that a step verifies of a row: its last one too.

    Raises ValueError for numbers that do not fit each other, or the algorithm.
    """
    if algorithm is SpeculativeAlgorithm.OFF:
        if num_steps is not None or num_draft_tokens is not None or draft_model is not None:
            known = ", ".join(known for known in SpeculativeAlgorithm if known is not algorithm)
            raise ValueError("--speculative-num-steps, --speculative-num-draft-tokens and "
                f"--speculative-draft-model-path need --speculative-algorithm, one of {known}")  # fmt: skip
        return None
    if draft_model is None and algorithm in _OF_FOLDER:
        raise ValueError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path, the folder of the "
            "network that drafts")  # fmt: skip
    if draft_model is not None and algorithm not in _OF_FOLDER:
        raise ValueError(f"--speculative-draft-model-path is for --speculative-algorithm {', '.join(_OF_FOLDER)}, not "
            f"for {algorithm}: leave it out")  # fmt: skip
    if num_steps is None:
        num_steps = DEFAULT_NUM_STEPS if num_draft_tokens is None else num_draft_tokens - 1
    if num_draft_tokens is not None and num_draft_tokens != num_steps + 1:
        raise ValueError(f"--speculative-num-draft-tokens is {num_draft_tokens}, but a chain of {num_steps} drafts "
            f"(--speculative-num-steps) is verified as {num_steps + 1} tokens: there are no trees yet; leave one of "
            "them out")  # fmt: skip
    if not 1 <= num_steps < MAX_TOKENS_PER_ROW:
        raise ValueError(f"--speculative-num-steps must be in [1, {MAX_TOKENS_PER_ROW - 1}], not {num_steps}")
    return Speculation(algorithm=algorithm, max_drafts=num_steps, draft_model=draft_model)
