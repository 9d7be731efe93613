"""Steps of decodes alone bring what has changed with them: pages as they are granted, slots that are taken anew."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.plan_driver import GREEDY, PlanDriver
from support.replaying_device import ReplayingDevice
from support.thread_group import ThreadGroup
from triton.runtime import interpreter

from radixmesh.daemons.runtime.sampling import Sampling
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, DispatchMode, Grant, Release, StepPlan
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.cuda.device import Device, HostDevice
from radixmesh.daemons.worker.cuda.load import create_shared_out, load_device_runner
from radixmesh.daemons.worker.cuda.runner import DeviceRunner
from radixmesh.daemons.worker.cuda.step.warm_up.warm_up_steps import warm_up_steps
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import Segment

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host need Triton's interpreter")

MODEL = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
PROMPT = np.array([20, 31, 5, 77, 42], np.int32)
NUM_TOKENS = 6
LOW = DispatchMode.LOW_LATENCY
SLOTS = 2


def _runner(device: Device) -> DeviceRunner:
    settings = replace(
        TINY_SETTINGS,
        num_slots=SLOTS,
        max_tokens_per_step=16,
        max_total_len=32,
        cuda_graphs=True,
    )
    runner = load_device_runner(MODEL, settings, device)
    if device.can_capture:
        runner.warm_up()
    return runner


def _admit(generation: int, cached: np.ndarray, cached_generations: np.ndarray) -> Admit:
    return Admit(
        slot=1,
        generation=generation,
        request_id=f"r{generation}",
        prompt_ids=PROMPT,
        max_total_len=len(PROMPT) + 20,
        sampling=GREEDY,
        cached_len=len(cached),
        cached_pages=cached,
        cached_page_generations=cached_generations,
    )


@pytest.mark.parametrize("device", [HostDevice(), ReplayingDevice()], ids=["launched", "captured"])
@pytest.mark.parametrize("lag", [0, 3])
def test_a_slot_that_is_taken_anew_decodes_at_once_what_its_own_request_says(device: Device, lag: int) -> None:
    """Three requests of the same prompt, one after the other in one slot. The first has all pages from its beginning,
    the others one a step; the last one's prompt is in the cache but for its last token, so that page tables and that
    token come with a decode, while steps of the one before are under way."""
    runner = _runner(device)
    executor = StepExecutor(runner, num_slots=SLOTS, max_tokens_per_step=16)
    executor.begin_epoch(1)
    none, decodes = np.zeros(0, np.int32), np.array([1], np.int32)
    pages = iter(range(60, 0, -1))
    launched, tokens = [], []

    def grant(count: int) -> tuple[Grant, ...]:
        return (Grant(slot=1, pages=np.array([next(pages) for _ in range(count)], np.int32)),) if count else ()

    def run(**parts: object) -> None:
        launched.append(executor.launch(StepPlan(epoch=1, step_id=len(launched) + 1, **parts)))
        while len(launched) - len(tokens) > lag:
            tokens.append(launched[len(tokens)].result().ids.tolist())

    def finish(num_pages: int) -> None:
        for _ in range(NUM_TOKENS - 1):
            run(grants=grant(num_pages), decode_set=decodes)

    whole = (Chunk(slot=1, length=len(PROMPT)),)
    run(admits=(_admit(1, none, none),), grants=grant(len(PROMPT) + NUM_TOKENS), chunks=whole, decode_set=none)
    finish(0)
    own = grant(len(PROMPT))
    run(
        releases=(Release(slot=1, generation=1),),
        admits=(_admit(2, none, none),),
        grants=own,
        chunks=whole,
        decode_set=none,
    )
    finish(1)
    cached = own[0].pages[:-1]
    run(
        releases=(Release(slot=1, generation=2),),
        admits=(_admit(3, cached, executor.records.generations[cached]),),
        grants=grant(1),
        decode_set=decodes,
    )
    finish(1)
    tokens += [step.result().ids.tolist() for step in launched[len(tokens) :]]
    of_request = [tokens[first : first + NUM_TOKENS] for first in range(0, len(tokens), NUM_TOKENS)]
    assert len(set(map(tuple, tokens))) > 2, "tokens that are all the same would show nothing"
    assert of_request == [of_request[0]] * 3 and all(len(ids) == 1 for ids in tokens)
    held = executor.table.pages(1).tolist()
    assert len(held) == len(PROMPT) + NUM_TOKENS - 1
    assert runner.slots.page_tables[1, : len(held)].tolist() == held


def test_logits_of_other_pages_leave_a_slots_request_with_its_own() -> None:
    def tokens(*, is_disturbed: bool) -> list[int]:
        runner = _runner(HostDevice())
        executor = StepExecutor(runner, num_slots=SLOTS, max_tokens_per_step=16)
        executor.begin_epoch(1)
        none, decodes = np.zeros(0, np.int32), np.array([1], np.int32)
        first = StepPlan(
            epoch=1,
            step_id=1,
            admits=(_admit(1, none, none),),
            grants=(Grant(slot=1, pages=np.arange(20, 20 + len(PROMPT) + NUM_TOKENS, dtype=np.int32)),),
            chunks=(Chunk(slot=1, length=len(PROMPT)),),
            decode_set=none,
        )
        ids = executor.run(first).ids.tolist()
        for step in range(2, NUM_TOKENS + 1):
            if is_disturbed and step == 3:
                runner.logits([Segment(slot=1, ids=PROMPT[::-1].copy(), start=0, pages=np.arange(5, dtype=np.int32))])
            ids += executor.run(StepPlan(epoch=1, step_id=step, decode_set=decodes)).ids.tolist()
        return ids

    assert tokens(is_disturbed=True) == tokens(is_disturbed=False)


@pytest.mark.parametrize("mixes", [False, True])
def test_ranks_that_share_experts_replay_together_or_not_at_all(mixes: bool) -> None:
    """At low latency a rank with chunks launches kernel by kernel: over collectives those of the others do so too."""
    group, device = ThreadGroup(2), ReplayingDevice()
    settings = replace(
        TINY_SETTINGS, num_slots=SLOTS, max_tokens_per_step=16, max_total_len=32, page_size=4, cuda_graphs=True
    )
    shared = create_shared_out(settings, AllToAllDispatch(group.groups[0]), HostDevice())
    assert shared is not None and not shared.dispatch.mixes
    shared.dispatch.can_capture, shared.dispatch.mixes = True, mixes
    runner = load_device_runner(MODEL.with_name("tiny-deepseek"), settings, device, experts=shared)
    runner.warm_up()
    rows = [
        rows
        for rows, segments in warm_up_steps(num_slots=SLOTS, max_prompt_len=4, max_tokens_per_step=16, num_decodes=1)
        if not segments
    ][-1]
    num_replayed = []
    for mode, may_have_chunks in ((LOW, False), (LOW, True), (DispatchMode.NORMAL, False), (LOW, False)):
        before = len(device.replayed)
        runner.set_dispatch_mode(mode, 2, may_have_chunks=may_have_chunks)
        with torch.inference_mode():
            runner._launch(rows, ()).result()
        num_replayed.append(len(device.replayed) - before)
    group.close()
    assert num_replayed == [1, int(mixes), 0, 1]


class LaunchCounter(ReplayingDevice):
    """Counts the project's kernels that are launched outside of replays, by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.launched: list[str] = []
        self._is_replaying = False
        launch = interpreter.GridExecutor.__call__

        def launch_and_count(executor: interpreter.GridExecutor, *args: object, **kwargs: object) -> object:
            if not self._is_replaying:
                self.launched.append(executor.fn.__name__)
            return launch(executor, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_and_count)

    def capture(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        replay = super().capture(work)

        def replay_uncounted() -> torch.Tensor:
            self._is_replaying = True
            try:
                return replay()
            finally:
                self._is_replaying = False

        return replay_uncounted


_SAMPLED = Sampling(temperature=1.0, seed=2**63 + 5)
_LOGPROBS = {"_survey_kernel", "_finish_logprobs_kernel"}
_FILTERS = {"_survey_kernel", "_collect_kernel", "_cut_off_kernel", "_gumbel_kernel", "_finish_kernel"}
_PENALTIES = {"_count_kernel", "_adjust_kernel", "_bias_kernel", "_highest_kernel", "_gumbel_kernel", "_finish_kernel"}


@pytest.mark.parametrize(
    ("sampling", "behind"),
    [
        (GREEDY, set()),
        (_SAMPLED, set()),
        (replace(_SAMPLED, num_top_logprobs=2), _LOGPROBS),
        (replace(_SAMPLED, top_k=20), _FILTERS),
        (replace(_SAMPLED, presence_penalty=0.5), _PENALTIES),
    ],
    ids=["greedy", "sampled", "logprobs", "filtered", "penalised"],
)
def test_a_step_is_one_graph_unless_a_row_has_filters_penalties_or_logprobs(
    monkeypatch: pytest.MonkeyPatch, sampling: Sampling, behind: set[str]
) -> None:
    """Beside a row that is sampled, whose tokens are those of steps that are launched kernel by kernel."""
    counter = LaunchCounter(monkeypatch)

    def driver(device: Device) -> PlanDriver:
        driver = PlanDriver(_runner(device), lag=1, num_slots=SLOTS, max_tokens_per_step=16)
        driver.add(0, PROMPT.tolist(), replace(_SAMPLED, seed=11), chunk_len=8, num_out=20, min_tokens=0)
        driver.add(1, PROMPT.tolist(), sampling, chunk_len=8, num_out=20, min_tokens=0)
        return driver

    captured, launched = driver(counter), driver(HostDevice())
    for _ in range(3):
        before = len(counter.replayed)
        counter.launched.clear()
        captured.run()
        assert len(counter.replayed) == before + 1
        assert set(counter.launched) == behind
    captured.finish(2)
    for _ in range(3):
        launched.run()
    launched.finish(2)
    assert captured.tokens == launched.tokens and len(set(captured.tokens[0])) > 2
