"""The verify forward of the CPU runner: with drafts the outputs are those without, token for token and bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.planner_world import World

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.results.outputs import Outputs
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.runner import SampleInput
from radixmesh.daemons.worker.speculation.draft_tree import DraftTree
from radixmesh.daemons.worker.speculation.drafter import Drafter, DraftRow, EachRow

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"


class _Answers:
    """Outputs and logprobs by number of the request; `steps` that the worker ran."""

    def __init__(self, world: World) -> None:
        self.logprobs: dict[int, list[np.ndarray]] = {}
        self._world, self._take = world, world.take
        world.take = self._noting  # type: ignore[method-assign]
        self.tokens: dict[int, list[int]] = {}

    def _noting(self, outputs: Outputs) -> None:
        for part in outputs.rows:
            for row, given in part.logprobs.items():
                columns = [given.own[:, None], given.top_ids, given.top]
                self.logprobs.setdefault(int(part.handles[row]), []).append(np.concatenate(columns, axis=1))
        self._take(outputs)

    def finish(self) -> None:
        self._world.run(2)
        self.tokens = {handle: record.tokens for (_, handle), record in self._world.records.items()}
        self._world.check_clean()

    def bits(self) -> dict[int, bytes]:
        return {handle: np.concatenate(parts).tobytes() for handle, parts in self.logprobs.items()}


def _runner() -> CpuRunner:
    runner = load_cpu_runner(MODEL, page_size=4, num_pages=120, threads=1, max_total_len=160)
    assert isinstance(runner, CpuRunner) and runner.is_deterministic
    return runner


def _answers(runner: CpuRunner) -> tuple[_Answers, int]:
    """Greedy, sampled, penalised, with logprobs, min_tokens, stops and shared prefixes; more than fits at once."""
    rng = random.Random(5)
    world = World(runner=runner, num_slots=5, chunk_tokens=24, max_tokens_per_step=64)
    answers = _Answers(world)
    for number in range(10):
        sampling = Sampling(
            temperature=rng.choice((0.0, 0.0, 0.9)),
            seed=number,
            top_k=rng.choice((0, 20)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            num_top_logprobs=2 if number % 2 else None,
        )
        prompt = [40 + i % 9 for i in range(rng.randrange(1, 12))] + [rng.randrange(2, 200) for _ in range(4)]
        stop = Stop(max_tokens=24, min_tokens=rng.choice((0, 3)), stop_ids=(rng.randrange(2, 200),))
        world.submit(prompt, sampling=sampling, stop=stop)
    answers.finish()
    return answers, len(world.log)


def _drafter(tokens: dict[int, list[int]], seed: int, share: float) -> Drafter:
    """Proposes what the output went on with before, each token right with probability `share`."""
    rng = random.Random(seed)
    known = [outputs for outputs in tokens.values() if outputs]

    def draft(sample: SampleInput, most: int) -> Sequence[int]:
        so_far = sample.output_ids.tolist()
        matching = [outputs for outputs in known if outputs[: len(so_far)] == so_far] or [known[0]]
        following = rng.choice(matching)[len(so_far) : len(so_far) + rng.randrange(most + 1)]
        return [token if rng.random() < share else rng.randrange(2, 200) for token in following]

    return EachRow(draft)


class _Trees(EachRow):
    """The same, hidden in trees of random drafts: what is right is any child of its parent."""

    def __init__(self, of_chains: Drafter, seed: int) -> None:
        super().__init__(lambda sample, most: ())
        self._of_chains, self._rng = of_chains, random.Random(seed)

    def propose_trees(self, rows: Sequence[DraftRow]) -> Sequence[DraftTree]:
        return [
            self._hidden(ids.tolist(), row.most) for row, ids in zip(rows, self._of_chains.propose(rows), strict=True)
        ]

    def _hidden(self, chain: list[int], most: int) -> DraftTree:
        """Parents may be named before or behind the right path's own rows."""
        ids, parents, path = [], [], [0]
        for token in chain[: most - most // 2]:
            while len(ids) < most - len(chain) and self._rng.random() < 0.6:
                # Other ids than the right one, or siblings would be the same draft twice.
                ids.append(self._rng.randrange(200, 700))
                parents.append(self._rng.randrange(len(ids)))
            ids.append(token)
            parents.append(path[-1])
            path.append(len(ids))
        return DraftTree.grown(ids[:most], parents[:most])


@pytest.fixture(scope="module")
def plain() -> tuple[_Answers, int]:
    return _answers(_runner())


@pytest.mark.parametrize("max_drafts", range(1, 9))
def test_drafts_change_no_bit_of_an_output(plain: tuple[_Answers, int], max_drafts: int) -> None:
    expected, num_steps = plain
    runner = _runner()
    runner.verify(_drafter(expected.tokens, max_drafts, 0.8), max_drafts=max_drafts)
    got, num_fewer = _answers(runner)
    assert got.tokens == expected.tokens
    assert got.bits() == expected.bits() and len(expected.bits()) == 5
    # Drafts were accepted: it took fewer steps.
    assert num_fewer < num_steps


@pytest.mark.parametrize("max_drafts", [3, 6, 20])
def test_trees_of_drafts_change_no_bit_of_an_output(plain: tuple[_Answers, int], max_drafts: int) -> None:
    """Branches stand before the path that is accepted, and behind it, at its positions."""
    expected, num_steps = plain
    runner, noted = _runner(), []
    runner.verify(_Trees(_drafter(expected.tokens, max_drafts, 0.9), max_drafts), max_drafts=max_drafts)
    move = runner.pool.move_tokens
    runner.pool.move_tokens = lambda sources, targets: noted.append(len(sources)) or move(sources, targets)  # type: ignore[method-assign, func-returns-value]
    got, num_fewer = _answers(runner)
    assert got.tokens == expected.tokens
    assert got.bits() == expected.bits() and len(expected.bits()) == 5
    assert num_fewer < num_steps and sum(noted) > 10, "no accepted draft lay behind another branch"
