"""Workloads give token for token what every other system was measured with, and the oracle its known rates."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from radixmesh.cli.bench.oracle import made_up_output, oracle_of, prompt_of
from radixmesh.cli.bench.workloads import Turn, make_workload

# sha256 over (parent or -1, new ids, out_len, delay) of every turn; the oracle's hit rate; tokens of its cache.
KNOWN = {
    "few-shot": ("3a2121d2fa7cd4d4", 0.9310213377383757, 75_816),
    "multi-turn": ("98a30e6fbd68ecbc", 0.9123754675329132, 164_235),
    "tree": ("b85e22bbf8204224", 0.9172369463669258, 122_955),
    "code": ("ca50bc2de40b3061", 0.6798684828339107, 370_363),
    "none": ("f584003e074ebf4f", 4.894127780782229e-06, 466_946),
    "mixed": ("627bef4f66a86dc2", 0.8223910536137109, 252_972),
    "random": ("b0abd7813366cf90", 0.0, 1_553_802),
    "shared-prefix": ("58400530ebec4c10", 0.8823529411764706, 196_096),
    "single-stream": ("f2a5656a55e2ea8d", 0.0, 383),
    "decode-256": ("146ecc95e956bfa7", 0.0, 163_584),
}


@pytest.mark.parametrize("name", KNOWN)
def test_workload_is_token_for_token_the_known_one(name: str) -> None:
    turns = make_workload(name)
    digest, hit_rate, working_set = KNOWN[name]
    assert _digest(turns)[:16] == digest
    oracle = oracle_of(turns)
    assert oracle.hit_rate == pytest.approx(hit_rate, abs=1e-12)
    assert oracle.working_set_tokens == working_set


def test_oracle_agrees_with_a_plain_trie() -> None:
    turns = make_workload("tree", seed=5, num_requests=44)
    edges: dict[tuple[int, int], int] = {}
    sequences: list[np.ndarray] = []
    hit = total = 0
    for index, turn in enumerate(turns):
        prompt = prompt_of(turn, sequences)
        sequence = np.concatenate([prompt, made_up_output(index, turn.out_len)])
        node = match = 0
        ids = sequence.tolist()
        while match < len(ids) and (node, ids[match]) in edges:
            node, match = edges[node, ids[match]], match + 1
        hit += min(match, len(prompt) - 1)
        total += len(prompt)
        for token in ids[match:-1]:
            edges[node, token] = node = len(edges) + 1
        sequences.append(sequence)
    oracle = oracle_of(turns)
    assert (oracle.hit_rate, oracle.working_set_tokens) == (hit / total, len(edges))


def test_seed_and_number_are_the_callers() -> None:
    assert _digest(make_workload("code", seed=1)) != _digest(make_workload("code", seed=2))
    assert len(make_workload("shared-prefix", num_requests=64)) == 64
    assert len(make_workload("mixed", num_requests=344)) == pytest.approx(344, rel=0.05)
    with pytest.raises(ValueError, match="choose one of few-shot, multi-turn"):
        make_workload("nonsense")


def _digest(turns: list[Turn]) -> str:
    digest = hashlib.sha256()
    for turn in turns:
        parent = -1 if turn.parent is None else turn.parent
        digest.update(np.array([parent, len(turn.new_ids), turn.out_len], "<i8").tobytes())
        digest.update(np.array([turn.delay_s], "<f8").tobytes() + turn.new_ids.astype("<i4").tobytes())
    return digest.hexdigest()
