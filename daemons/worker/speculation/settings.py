"""Choice of a drafter and of the length of its drafts, from the flags that SGLang's users know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from radixmesh.daemons.worker.limits import MAX_TOKENS_PER_ROW
from radixmesh.daemons.worker.speculation.draft_tree import TreeShape

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

    draft_model: folder of the network that drafts, where that is not the model's own. topk: drafts that may follow the
    same token; 1: they are a chain. levels: of the tree; 0: as many as drafts.
    """

    algorithm: SpeculativeAlgorithm
    max_drafts: int
    draft_model: Path | None = None
    topk: int = 1
    levels: int = 0

    @property
    def num_steps(self) -> int:
        """Drafts that may be accepted in one step, one after the other."""
        return self.levels or self.max_drafts

    @property
    def tree(self) -> TreeShape | None:
        """None: drafts are a chain."""
        return None if self.topk == 1 else TreeShape(self.topk, self.num_steps)


def read_speculation(
    algorithm: SpeculativeAlgorithm,
    num_steps: int | None,
    num_draft_tokens: int | None,
    draft_model: Path | None = None,
    topk: int = 1,
) -> Speculation | None:
    """None: off. num_steps: drafts of a row, one after the other. num_draft_tokens: tokens that a step verifies of a
    row: its last one too. topk: drafts that may follow the same token.

    Raises ValueError for numbers that do not fit each other, or the algorithm.
    """
    if algorithm is SpeculativeAlgorithm.OFF:
        if num_steps is not None or num_draft_tokens is not None or draft_model is not None or topk != 1:
            known = ", ".join(known for known in SpeculativeAlgorithm if known is not algorithm)
            raise ValueError("--speculative-num-steps, --speculative-num-draft-tokens, --speculative-eagle-topk and "
                f"--speculative-draft-model-path need --speculative-algorithm, one of {known}")  # fmt: skip
        return None
    if draft_model is None and algorithm in _OF_FOLDER:
        raise ValueError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path, the folder of the "
            "network that drafts")  # fmt: skip
    if draft_model is not None and algorithm not in _OF_FOLDER:
        raise ValueError(f"--speculative-draft-model-path is for --speculative-algorithm {', '.join(_OF_FOLDER)}, not "
            f"for {algorithm}: leave it out")  # fmt: skip
    if not 1 <= topk < MAX_TOKENS_PER_ROW:
        raise ValueError(f"--speculative-eagle-topk must be in [1, {MAX_TOKENS_PER_ROW - 1}], not {topk}")
    if topk > 1:
        return _tree(algorithm, num_steps, num_draft_tokens, draft_model, topk)
    if num_steps is None:
        num_steps = DEFAULT_NUM_STEPS if num_draft_tokens is None else num_draft_tokens - 1
    if num_draft_tokens is not None and num_draft_tokens != num_steps + 1:
        raise ValueError(f"--speculative-num-draft-tokens is {num_draft_tokens}, but a chain of {num_steps} drafts "
            f"(--speculative-num-steps) is verified as {num_steps + 1} tokens: leave one of them out, or have several "
            "drafts follow a token with --speculative-eagle-topk")  # fmt: skip
    if not 1 <= num_steps < MAX_TOKENS_PER_ROW:
        raise ValueError(f"--speculative-num-steps must be in [1, {MAX_TOKENS_PER_ROW - 1}], not {num_steps}")
    return Speculation(algorithm=algorithm, max_drafts=num_steps, draft_model=draft_model)


def _tree(
    algorithm: SpeculativeAlgorithm,
    num_steps: int | None,
    num_draft_tokens: int | None,
    draft_model: Path | None,
    topk: int,
) -> Speculation:
    if algorithm not in NETWORKS:
        raise ValueError(f"--speculative-eagle-topk is for --speculative-algorithm {', '.join(NETWORKS)}, not for "
            f"{algorithm}, which drafts chains: leave it out")  # fmt: skip
    if num_steps is None:
        num_steps = DEFAULT_NUM_STEPS
    if num_draft_tokens is None:
        num_draft_tokens = min(num_steps + topk, MAX_TOKENS_PER_ROW)
    if not 1 <= num_steps < MAX_TOKENS_PER_ROW:
        raise ValueError(f"--speculative-num-steps must be in [1, {MAX_TOKENS_PER_ROW - 1}], not {num_steps}")
    most = min(1 + topk + (num_steps - 1) * topk**2, MAX_TOKENS_PER_ROW)
    if not num_steps < num_draft_tokens <= most:
        raise ValueError(f"--speculative-num-draft-tokens must be in [{num_steps + 1}, {most}] for trees of "
            f"{num_steps} steps (--speculative-num-steps) and {topk} drafts behind a token (--speculative-eagle-topk), "
            f"not {num_draft_tokens}")  # fmt: skip
    return Speculation(
        algorithm=algorithm, max_drafts=num_draft_tokens - 1, draft_model=draft_model, topk=topk, levels=num_steps
    )
