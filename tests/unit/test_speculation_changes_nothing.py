"""Drafts of the CPU worker under a planner: outputs are to the bit those without, whatever else happens on the way.

Prompts repeat themselves, so that n-grams are found, and share prefixes, so that pages of rows that draft are others'
prefixes. Memory holds few of the requests: rows that draft are retracted and resumed, their pages evicted.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.drafting import cpu_drafter, target_folder
from support.planner_world import World, joined

from radixmesh.daemons.runtime.sampling import Sampling, Stop, output_seed
from radixmesh.daemons.scheduler.results.outputs import Outputs
from radixmesh.daemons.worker.cpu import load_cpu_runner
from radixmesh.daemons.worker.cpu.runner import CpuRunner
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import Segment

MODELS = Path(__file__).parents[2] / "compose" / "models"
NUM_SLOTS, STEP_TOKENS = 4, 48
# Outputs of few tokens repeat themselves, but not for long. 1 is an EOS.
FEW = ((40, 60.0), (41, 59.0), (42, 60.0), (1, 58.0))


class Run(NamedTuple):
    """tokens and end of each request, bits of the logprobs of each of its positions; drafted, accepted: tokens."""

    outputs: dict[int, tuple[list[int], object, list[bytes]]]
    num_steps: int
    drafted: int
    accepted: int
    num_retractions: int


class _Script:
    """Requests, and what disturbs them: turns at which scheduler and worker lose their stream, or the worker dies."""

    def __init__(self, model: str, page_size: int, num_tokens: int, max_drafts: int, algorithm: str, topk: int) -> None:
        self._model = model
        self._runner_of = lambda: _runner(model, page_size, num_tokens, max_drafts, algorithm, topk)
        self.world = World(
            runner=self._runner_of(),
            num_slots=NUM_SLOTS,
            chunk_tokens=12,
            max_tokens_per_step=STEP_TOKENS,
            decode_reserve_tokens=1,
            ahead=1,
        )
        self._logprobs: dict[int, list[bytes]] = {}
        self._counts: defaultdict[int, list[int]] = defaultdict(list)
        self.drafted = self.accepted = self.num_retractions = 0
        self._take, self.world.take = self.world.take, self._noting  # type: ignore[method-assign]

    def run(self, depth: int, epochs: tuple[int, ...], deaths: tuple[int, ...]) -> Run:
        world = self.world
        _submit_all(world)
        for turn in range(4000):
            while world.planner.num_in_flight <= depth and world.plan():
                pass
            if turn in deaths:
                world.plans.clear()
                executor = StepExecutor(self._runner_of(), num_slots=NUM_SLOTS, max_tokens_per_step=STEP_TOKENS)
                world.executor = executor
            if turn in (*epochs, *deaths):
                world.begin_epoch()
                continue
            if not world.execute() and not world.results:
                break
            if world.results:
                self.drafted += int(world.results[-1].drafted.sum())
                self.accepted += int(world.results[-1].accepted.sum())
            world.process()
        world.check_clean()
        _check_records(world, self._model)
        outputs = {}
        for (_, handle), record in world.records.items():
            assert record.finished is not None and record.finished.error is None
            # A row's last token is sampled, but the last one of the request may be a draft that ends it.
            most = 1 + sum(count - 1 for count in self._counts[handle])
            assert record.finished.accepted_tokens <= min(record.finished.drafted_tokens, most)
            outputs[handle] = record.tokens, record.finished.reason, self._logprobs.get(handle, [])
        return Run(outputs, len(world.log), self.drafted, self.accepted, world.planner.counters.num_retracted)

    def _noting(self, outputs: Outputs) -> None:
        for part in outputs.rows:
            for handle, count in zip(part.handles.tolist(), part.counts.tolist(), strict=True):
                self._counts[handle].append(count)
            for row, given in part.logprobs.items():
                bits = np.concatenate([given.own[:, None], given.top_ids, given.top], axis=1)
                self._logprobs.setdefault(int(part.handles[row]), []).extend(line.tobytes() for line in bits)
        self._take(outputs)


def _runner(
    model: str, page_size: int, num_tokens: int, max_drafts: int, algorithm: str = "ngram", topk: int = 1
) -> CpuRunner:
    runner = load_cpu_runner(
        target_folder(algorithm, model),
        page_size=page_size,
        num_pages=num_tokens // page_size,
        threads=1,
        max_total_len=96,
    )
    assert isinstance(runner, CpuRunner) and runner.is_deterministic
    if max_drafts:
        runner.verify(cpu_drafter(algorithm, runner, model, max_drafts, topk), max_drafts=max_drafts)
    return runner


@cache
def _checked_runner(model: str, page_size: int) -> CpuRunner:
    """For prefills of what others have computed: loading it, which verifies its tiles, takes longer than a run."""
    return _runner(model, page_size, 4096, 0)


def _submit_all(world: World) -> None:
    """Greedy, sampled (two outputs of one prompt each), penalised, with logprobs, minimum, stop ids and ends."""
    shared = [50, 51, 52, 53, 54, 55] * 3
    for number in range(4):
        prompt = [*shared[: 6 + 4 * number], 60 + number, *shared[:5]]
        for index in range(2):
            sampling = Sampling(
                temperature=(0.0, 1.0)[index],
                seed=output_seed(number, index),
                top_k=(0, 20)[number % 2],
                repetition_penalty=(1.0, 1.02)[number // 2],
                logit_bias=FEW if number < 3 else (),
                num_top_logprobs=2 if number % 2 else None,
            )
            stop = Stop(max_tokens=22, min_tokens=(0, 3)[index], stop_ids=((), (42,))[number % 2])
            world.submit(prompt, sampling=sampling, stop=stop)
    # Once it may end it does, with a token that is drafted, and others behind it.
    ends = Sampling(temperature=0.0, logit_bias=((40, 80.0), (41, 78.0)))
    prompt = [61, 41, 41, 41, 40, 40, 40, 40, 40, 62]
    world.submit(prompt, sampling=ends, stop=Stop(max_tokens=22, min_tokens=3, stop_ids=(40,)))


def _check_records(world: World, model: str) -> None:
    """Page records tell what was computed for a request's own tokens, never a draft that was not confirmed: the KV of
    every page that counts has the bits of a prefill of the same tokens."""
    runner, checked = world.executor.runner, _checked_runner(model, world.group.page_size)
    assert isinstance(runner, CpuRunner)
    texts = [[*record.submission.prompt_ids.tolist(), *record.tokens] for record in world.records.values()]
    records = joined(world.executor.snapshot()[0])
    ends = np.cumsum(records.filled)
    ids = [records.ids[end - num : end].tolist() for end, num in zip(ends, records.filled, strict=True)]
    num_checked = 0
    for page, own in enumerate(ids):
        chain, at = list(own), page
        while records.previous_pages[at] >= 0:
            before = int(records.previous_pages[at])
            if records.generations[before] != records.previous_generations[at]:
                break  # Granted again since: the chain is no prefix of anything.
            chain, at = ids[before] + chain, before
        else:
            if own:
                # Behind an end, which the worker does not know, are tokens that were sampled and belong to nobody.
                assert any(text[: len(chain)] == chain[: len(text)] for text in texts), (page, chain)
                _check_kv(runner, checked, page, len(own), chain)
                num_checked += 1
    assert num_checked


def _check_kv(runner: CpuRunner, checked: CpuRunner, page: int, num_own: int, chain: list[int]) -> None:
    """The KV of a page's tokens, which are the last ones of `chain`, against that of a prefill."""
    size = runner.page_size
    num_pages = -(-len(chain) // size)
    pages = np.arange(num_pages, dtype=np.int32)
    checked.forward([Segment(slot=0, ids=np.array(chain, np.int32), start=0, pages=pages, is_last_chunk=False)])
    for layer in range(runner.model.kv_layout.num_layers):
        for plane in (plane.name for plane in runner.model.kv_layout.planes):
            got = runner.pool.tokens(plane, layer)[page * size : page * size + num_own]
            want = checked.pool.tokens(plane, layer)[(num_pages - 1) * size : len(chain)]
            assert torch.equal(got, want), (page, layer, plane)


def _run(
    model: str,
    page_size: int,
    max_drafts: int,
    *,
    depth: int = 1,
    num_tokens: int = 80,
    epochs: tuple[int, ...] = (),
    deaths: tuple[int, ...] = (),
    algorithm: str = "ngram",
    topk: int = 1,
) -> Run:
    return _Script(model, page_size, num_tokens, max_drafts, algorithm, topk).run(depth, epochs, deaths)


@cache
def _plain(model: str) -> Run:
    run = _run(model, 1, 0, num_tokens=4096)
    lengths = {len(tokens) for tokens, _, _ in run.outputs.values()}
    assert max(lengths) == 22 and len(lengths) > 2, "some end early, some do not"
    return run


@pytest.mark.parametrize(
    ("model", "page_size", "max_drafts", "depth"),
    [
        ("tiny-llama", 16, 2, 1),
        pytest.param("tiny-llama", 4, 8, 0, marks=pytest.mark.full),
        ("tiny-deepseek", 16, 4, 2),
        *(
            pytest.param(model, page_size, max_drafts, depth, marks=pytest.mark.full)
            for model in ("tiny-llama", "tiny-deepseek")
            for page_size in (1, 16)
            for max_drafts in range(1, 9)
            for depth in range(3)
        ),
    ],
)
def test_outputs_are_those_without_drafts(model: str, page_size: int, max_drafts: int, depth: int) -> None:
    plain = _plain(model)
    run = _run(model, page_size, max_drafts, depth=depth)
    assert run.outputs == plain.outputs
    assert 0 < run.accepted < run.drafted
    assert run.num_retractions > 0 or depth == 0, "nothing was retracted"


@pytest.mark.parametrize(
    ("model", "algorithm", "page_size", "max_drafts", "depth"),
    [
        ("tiny-llama", "standalone", 16, 4, 2),
        ("tiny-llama", "eagle3", 1, 3, 2),
        ("tiny-deepseek", "mtp", 16, 3, 1),
        *(
            pytest.param(model, algorithm, page_size, max_drafts, depth, marks=pytest.mark.full)
            for model, algorithm in (
                ("tiny-llama", "standalone"),
                ("tiny-deepseek", "standalone"),
                ("tiny-llama", "eagle3"),
                ("tiny-deepseek", "mtp"),
            )
            for page_size in (1, 16)
            for max_drafts in (1, 3, 5, 8)
            for depth in range(3)
        ),
    ],
)
def test_outputs_are_those_without_a_network_that_drafts(
    model: str, algorithm: str, page_size: int, max_drafts: int, depth: int
) -> None:
    run = _run(model, page_size, max_drafts, depth=depth, algorithm=algorithm)
    assert run.outputs == _plain(model).outputs
    assert 0 < run.accepted < run.drafted
    assert run.num_retractions > 0 or depth == 0, "nothing was retracted"


@pytest.mark.parametrize(
    ("model", "algorithm", "page_size", "max_drafts", "topk", "depth"),
    [
        ("tiny-llama", "eagle3", 16, 7, 3, 2),
        ("tiny-deepseek", "mtp", 1, 5, 2, 1),
        *(
            pytest.param(model, algorithm, page_size, max_drafts, topk, depth, marks=pytest.mark.full)
            for model, algorithm in (("tiny-llama", "standalone"), ("tiny-llama", "eagle3"), ("tiny-deepseek", "mtp"))
            for page_size in (1, 16)
            for max_drafts, topk in ((2, 2), (3, 2), (5, 4), (8, 2), (15, 4))
            for depth in range(3)
        ),
    ],
)
def test_outputs_are_those_without_a_tree_of_drafts(
    model: str, algorithm: str, page_size: int, max_drafts: int, topk: int, depth: int
) -> None:
    """The KV of accepted drafts, which lay where other branches have theirs, has the bits of a prefill as well."""
    run = _run(model, page_size, max_drafts, depth=depth, algorithm=algorithm, topk=topk)
    assert run.outputs == _plain(model).outputs
    assert 0 < run.accepted < run.drafted


@pytest.mark.parametrize(
    ("model", "algorithm", "topk"),
    [
        *(pytest.param("tiny-llama", name, 1, marks=pytest.mark.full) for name in ("standalone", "eagle3")),
        ("tiny-deepseek", "mtp", 1),
        ("tiny-llama", "eagle3", 3),
    ],
)
def test_lost_streams_and_workers_change_nothing_of_what_a_network_drafts(
    model: str, algorithm: str, topk: int
) -> None:
    """A claim adopts pages whose KV of the network is there too; the next worker has none of it."""
    run = _run(model, 4, 4, depth=2, epochs=(5, 6, 14), deaths=(9, 20), algorithm=algorithm, topk=topk)
    assert run.outputs == _plain(model).outputs and run.accepted > 0


@pytest.mark.parametrize(
    ("epochs", "deaths", "depth"),
    [
        ((5, 6, 14), (), 2),
        ((), (7, 12), 0),
        *(
            pytest.param(*losses, depth, marks=pytest.mark.full)
            for losses in (((5, 6, 14), ()), ((), (7, 12)), ((), tuple(range(3, 60, 7))))
            for depth in range(3)
        ),
    ],
)
def test_lost_streams_and_workers_change_nothing(epochs: tuple[int, ...], deaths: tuple[int, ...], depth: int) -> None:
    """Rows with drafts in flight are admitted again with what their scheduler has; pages that a claim adopts hold
    confirmed tokens alone."""
    run = _run("tiny-llama", 4, 4, depth=depth, epochs=epochs, deaths=deaths)
    assert run.outputs == _plain("tiny-llama").outputs and run.accepted > 0
