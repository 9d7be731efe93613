"""Flags of speculation: what fits each other becomes one choice, and the rest an error that names the flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.limits import MAX_TOKENS_PER_ROW
from radixmesh.daemons.worker.speculation.draft_tree import TreeShape
from radixmesh.daemons.worker.speculation.settings import SpeculativeAlgorithm, read_speculation

OFF, NGRAM, STANDALONE = SpeculativeAlgorithm.OFF, SpeculativeAlgorithm.NGRAM, SpeculativeAlgorithm.STANDALONE
EAGLE3 = SpeculativeAlgorithm.EAGLE3
FOLDER = Path("draft-model")


def test_without_an_algorithm_there_is_no_speculation() -> None:
    assert read_speculation(OFF, None, None) is None


@pytest.mark.parametrize(("num_steps", "num_tokens", "most"), [(None, None, 4), (7, None, 7), (None, 6, 5), (3, 4, 3)])
def test_either_number_says_the_other(num_steps: int | None, num_tokens: int | None, most: int) -> None:
    found = read_speculation(NGRAM, num_steps, num_tokens)
    assert found is not None and (found.max_drafts, found.draft_model) == (most, None)
    found = read_speculation(STANDALONE, num_steps, num_tokens, FOLDER)
    assert found is not None and (found.max_drafts, found.draft_model) == (most, FOLDER)


@pytest.mark.parametrize(
    ("algorithm", "num_steps", "num_tokens", "folder", "said"),
    [
        (OFF, 3, None, None, "need --speculative-algorithm"),
        (OFF, None, 3, None, "need --speculative-algorithm"),
        (OFF, None, None, FOLDER, "need --speculative-algorithm"),
        (STANDALONE, None, None, None, "needs --speculative-draft-model-path"),
        (NGRAM, None, None, FOLDER, "leave it out"),
        (NGRAM, 3, 3, None, "verified as 4 tokens"),
        (NGRAM, 0, None, None, "must be in"),
        (NGRAM, MAX_TOKENS_PER_ROW, None, None, "must be in"),
    ],
)
def test_what_does_not_fit_is_said(
    algorithm: SpeculativeAlgorithm, num_steps: int | None, num_tokens: int | None, folder: Path | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read_speculation(algorithm, num_steps, num_tokens, folder)


@pytest.mark.parametrize(
    ("num_steps", "num_tokens", "topk", "drafts", "levels"),
    [
        (None, None, 4, 7, 4),
        (5, 8, 4, 7, 5),
        (3, None, 2, 4, 3),
        (2, 7, 2, 6, 2),
        (1, None, 8, 8, 1),
        (6, 64, 4, 63, 6),
    ],
)
def test_a_tree_has_levels_and_drafts(
    num_steps: int | None, num_tokens: int | None, topk: int, drafts: int, levels: int
) -> None:
    found = read_speculation(EAGLE3, num_steps, num_tokens, FOLDER, topk)
    assert found is not None and (found.max_drafts, found.num_steps, found.topk) == (drafts, levels, topk)
    assert read_speculation(EAGLE3, 3, 4, FOLDER, 1) == read_speculation(EAGLE3, 3, None, FOLDER)


@pytest.mark.parametrize(
    ("algorithm", "num_steps", "num_tokens", "folder", "topk", "said"),
    [
        (OFF, None, None, None, 2, "need --speculative-algorithm"),
        (NGRAM, None, None, None, 2, "drafts chains: leave it out"),
        (EAGLE3, None, None, FOLDER, 0, r"must be in \[1, 63\]"),
        (EAGLE3, None, None, FOLDER, MAX_TOKENS_PER_ROW, r"must be in \[1, 63\]"),
        (EAGLE3, 4, 4, FOLDER, 2, r"must be in \[5, 15\] for trees of 4 steps"),
        (EAGLE3, 4, 16, FOLDER, 2, r"must be in \[5, 15\] for trees of 4 steps"),
        (EAGLE3, 3, 65, FOLDER, 8, r"must be in \[4, 64\]"),
        (EAGLE3, 64, 64, FOLDER, 2, "must be in"),
        (EAGLE3, 4, 8, FOLDER, 1, "with --speculative-eagle-topk"),
    ],
)
def test_trees_that_cannot_be_are_refused_with_what_can(
    algorithm: SpeculativeAlgorithm,
    num_steps: int | None,
    num_tokens: int | None,
    folder: Path | None,
    topk: int,
    said: str,
) -> None:
    with pytest.raises(ValueError, match=said):
        read_speculation(algorithm, num_steps, num_tokens, folder, topk)


def test_a_gpu_refuses_trees_of_more_candidates_than_it_sorts() -> None:
    """Others are drafted there as on the CPU."""
    settings = {"model": FOLDER, "speculative_algorithm": EAGLE3, "speculative_draft_model_path": FOLDER}
    large = {"speculative_eagle_topk": 20, "speculative_num_steps": 12, "speculative_num_draft_tokens": 40}
    with pytest.raises(ValueError, match=r"are 4420 candidates .* a GPU chooses among 4096; set a smaller"):
        WorkerSettings(backend=Backend.CUDA, **large, **settings)  # type: ignore[arg-type]
    assert WorkerSettings(backend=Backend.CPU, **large, **settings).speculation  # type: ignore[arg-type]
    speculation = WorkerSettings(backend=Backend.CUDA, speculative_eagle_topk=4, **settings).speculation  # type: ignore[arg-type]
    assert speculation is not None and speculation.tree == TreeShape(topk=4, num_steps=4)
