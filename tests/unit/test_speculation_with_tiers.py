"""Rows that draft beside prefixes that come back from host memory: outputs are those without drafts and tiers."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.drafting import cpu_drafter, target_folder
from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.results.outputs import Outputs
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner

NUM_TEXTS, PROMPT_TOKENS, MAX_TOKENS = 6, 40, 10
# Outputs of few tokens repeat themselves, so that n-grams are found.
FEW = ((40, 60.0), (41, 59.0), (42, 60.0))


class _Rounds:
    """The same texts in rounds, each time with the answers before, as chats have them."""

    def __init__(self, runner: CpuRunner, num_host_pages: int) -> None:
        self.world = World(
            runner=runner,
            num_slots=3,
            chunk_tokens=16,
            max_tokens_per_step=64,
            decode_reserve_tokens=1,
            num_host_pages=num_host_pages,
            tiers=TierSettings(policy=WritePolicy.WRITE_THROUGH, min_hits=1, load_min_tokens=4),
        )
        self.bits: dict[int, list[bytes]] = {}
        self._take, self.world.take = self.world.take, self._noting  # type: ignore[method-assign]

    def run(self, num_rounds: int) -> list[list[int]]:
        texts = [[50 + (7 * n + j // 2) % 40 for j in range(PROMPT_TOKENS)] for n in range(NUM_TEXTS)]
        outputs = []
        for number in range(num_rounds):
            records = [
                self.world.submit(
                    text,
                    sampling=Sampling(
                        temperature=float(n % 2), seed=number, logit_bias=FEW if n < 3 else (), num_top_logprobs=1
                    ),
                    stop=Stop(max_tokens=MAX_TOKENS, ignore_eos=True),
                )
                for n, text in enumerate(texts)
            ]
            self.world.run(2)
            outputs += [record.tokens for record in records]
            texts = [[*text, *record.tokens] for text, record in zip(texts, records, strict=True)]
        self.world.check_clean()
        return outputs

    def _noting(self, outputs: Outputs) -> None:
        for part in outputs.rows:
            for row, given in part.logprobs.items():
                bits = np.concatenate([given.own[:, None], given.top_ids, given.top], axis=1)
                self.bits.setdefault(int(part.handles[row]), []).extend(line.tobytes() for line in bits)
        self._take(outputs)


def _runner(algorithm: str, model: str, num_tokens: int, page_size: int) -> CpuRunner:
    runner = load_cpu_runner(
        target_folder(algorithm, model),
        page_size=page_size,
        num_pages=num_tokens // page_size,
        threads=1,
        max_total_len=128,
    )
    assert isinstance(runner, CpuRunner) and runner.is_deterministic
    return runner


@cache
def _plain(model: str) -> tuple[list[list[int]], dict[int, list[bytes]]]:
    rounds = _Rounds(_runner("ngram", model, 4096, 4), 0)
    return rounds.run(3), rounds.bits


@pytest.mark.parametrize(
    ("algorithm", "model", "topk"),
    [("eagle3", "tiny-llama", 1), pytest.param("mtp", "tiny-deepseek", 1, marks=pytest.mark.full)],
)
def test_drafts_behind_a_prefix_are_the_same_wherever_that_was(algorithm: str, model: str, topk: int) -> None:
    """Features of the target come back with the KV: without them a network drafts worse."""
    accepted = []
    for num_tokens, num_host_pages in ((4096, 0), (240, 1024)):
        runner = _runner(algorithm, model, num_tokens, 4)
        runner.verify(cpu_drafter(algorithm, runner, model, 5, topk), max_drafts=5)
        rounds = _Rounds(runner, num_host_pages)
        rounds.run(3)
        records = rounds.world.records.values()
        accepted.append([record.finished.accepted_tokens for record in records if record.finished])
    assert rounds.world.planner.loads.num_loads >= NUM_TEXTS
    assert accepted[0] == accepted[1] and len(accepted[0]) == 3 * NUM_TEXTS and sum(accepted[0]) >= 20


@pytest.mark.parametrize(
    ("algorithm", "model", "topk", "page_size"),
    [
        ("eagle3", "tiny-llama", 3, 4),
        ("ngram", "tiny-llama", 1, 1),
        pytest.param("eagle3", "tiny-llama", 1, 1, marks=pytest.mark.full),
        pytest.param("standalone", "tiny-llama", 1, 4, marks=pytest.mark.full),
        pytest.param("mtp", "tiny-deepseek", 1, 4, marks=pytest.mark.full),
        pytest.param("mtp", "tiny-deepseek", 2, 4, marks=pytest.mark.full),
    ],
)
def test_prefixes_that_come_back_are_drafted_behind(algorithm: str, model: str, topk: int, page_size: int) -> None:
    """Device memory holds two of the texts: the others come from host memory while rows draft."""
    runner = _runner(algorithm, model, 240, page_size)
    runner.verify(cpu_drafter(algorithm, runner, model, 5, topk), max_drafts=5)
    rounds = _Rounds(runner, 1024)
    got = rounds.run(3)
    outputs, bits = _plain(model)
    assert got == outputs
    assert rounds.bits == bits and len(bits) == len(outputs)
    records = rounds.world.records.values()
    assert sum(record.finished.accepted_tokens for record in records if record.finished) >= 20
    assert rounds.world.planner.loads.num_loads >= NUM_TEXTS
