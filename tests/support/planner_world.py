"""A planner and a simulated worker in one process, with every event in the test's hands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import PageRecords, StepPlan, StepResult
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.results.outputs import Finished, Outputs, Rejected
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission
from radixmesh.daemons.worker.plans.executor import StepExecutor
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation
from radixmesh.daemons.worker.simulated.uneven_runner import UnevenRunner
from support.fake_store import FakeStore

VOCAB_SIZE = 64
EOS_ID = 1


@dataclass
class Record:
    """A submit, as a test knows it."""

    submission: Submission
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None
    rejected: Rejected | None = None


class World:
    """Sends plans to the worker only when told to, so that any number can be in flight in either direction."""

    def __init__(
        self,
        *,
        page_size: int = 1,
        num_pages: int = 256,
        num_slots: int = 8,
        max_tokens_per_step: int = 64,
        chunk_tokens: int = 16,
        max_total_len: int = 200,
        cache: str = "radix",
        eos_rate: float = 0.05,
        max_queue: int = 1000,
        ahead: int = 4,
        decode_reserve_tokens: int = 64,
        runner_class: type[SimulatedRunner] = SimulatedRunner,
        max_tokens_per_row: int = 1,
        row_seed: int = 0,
        runner: ModelRunner | None = None,
        num_host_pages: int = 0,
        load_token_us: float = 500.0,
        num_stored: Callable[[int], int] | None = None,
        **choices: object,
    ) -> None:
        """max_tokens_per_row: above 1 a decode yields 0 to so many tokens a step, at random from `row_seed`. runner: in
        place of a simulated one; its sizes count, and nothing is expected of its outputs. num_host_pages: of the host
        tier; a load takes load_token_us of virtual time a token, so that steps run meanwhile. num_stored: of pages
        that are asked of a store below the host, how many that has; None: there is no store."""
        self.max_tokens_per_row = max_tokens_per_row
        if max_tokens_per_row > 1:
            runner_class = partial(UnevenRunner, max_tokens_per_row=max_tokens_per_row, row_seed=row_seed)  # type: ignore[assignment]
        self.alphabet = Alphabet.of(VOCAB_SIZE, eos_ids=[EOS_ID], eos_rate=eos_rate)
        runner = runner or runner_class(
            page_size=page_size,
            num_pages=num_pages,
            vocab_size=VOCAB_SIZE,
            max_total_len=max_total_len,
            alphabet=self.alphabet,
            latency=LatencyModel(per_loaded_token=load_token_us),
            clock=VirtualClock(),
        )
        if num_host_pages:
            runner.add_host_pool(num_host_pages * runner.page_size * runner.kv_token_bytes)
        self.executor = StepExecutor(runner, num_slots=num_slots, max_tokens_per_step=max_tokens_per_step)
        self.group = GroupInfo(
            page_size=runner.page_size,
            num_pages=runner.num_pages,
            num_slots=num_slots,
            num_host_pages=0 if runner.host_pool is None else runner.host_pool.num_pages,
            has_kv_store=num_stored is not None and runner.host_pool is not None,
            max_tokens_per_step=max_tokens_per_step,
            max_plans_in_flight=4,
            max_tokens_per_row=runner.max_tokens_per_row,
            vocab_size=runner.vocab_size,
            max_total_len=runner.max_total_len,
            eos_ids=(EOS_ID,),
            barrier_ops=frozenset({"flush_cache"}),
            model_name="simulated",
        )
        settings = PlannerSettings(
            chunk_tokens=chunk_tokens,
            cache=cache,
            check_invariants=True,
            max_queue=max_queue,
            grant_ahead_tokens=ahead,
            decode_reserve_tokens=decode_reserve_tokens,
        )
        self.planner = Planner(replace(settings, **choices))  # type: ignore[arg-type]
        self._has_store = num_stored is not None
        self.store = FakeStore(self.planner, lambda: (self.executor,), num_stored or (lambda num: num))
        self.records: dict[tuple[int, int], Record] = {}
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.log: list[StepPlan] = []
        self.now = 0.0
        self.epoch = 0
        self._num_handles = 0
        self._expected: dict[SequenceKey, tuple[Submission, list[int]]] = {}
        self.begin_epoch()

    def begin_epoch(self) -> int:
        """Steps that the worker has received run on and count for its page records; their results are lost."""
        while self.plans:
            self.execute()
        self.results.clear()
        self.epoch += 1
        self.executor.begin_epoch(self.epoch)
        return self.planner.begin_epoch(self.epoch, self.group, self.snapshot())

    def snapshot(self) -> CacheSnapshot:
        parts, names = self.executor.snapshot()
        host = self.executor.host_snapshot()
        of_host = None if host is None else CacheSnapshot(records=joined(host[0]), names=tuple(host[1]))
        return CacheSnapshot(records=joined(parts), names=tuple(names), host=of_host)

    def submission(self, prompt: list[int], **changes: object) -> Submission:
        self._num_handles += 1
        return submission(self._num_handles, prompt, **changes)

    def submit(self, prompt: list[int], **changes: object) -> Record:
        return self.send(self.submission(prompt, **changes))

    def send(self, wanted: Submission) -> Record:
        record = self.records.setdefault((wanted.owner, wanted.handle), Record(wanted))
        if not record.tokens:
            record.tokens = wanted.resumed_output_ids.tolist()
        self.planner.submit(wanted)
        self.collect()
        return record

    def plan(self) -> bool:
        self.planner.settle_results()
        plan = self.planner.plan(self.now)
        self.collect()
        if self._has_store:
            self.store.collect()
        if plan is None:
            return False
        self.plans.append(plan)
        self.log.append(plan)
        return True

    def execute(self) -> bool:
        if not self.plans:
            return False
        self.results.append(self.executor.run(self.plans.popleft()))
        return True

    def process(self, *, settles: bool = True) -> bool:
        """settles: else that is left to the next plan."""
        if not self.results:
            return False
        if settles:
            self.take(self.planner.process(self.results.popleft()))
        else:
            self.planner.take_result(self.results.popleft())
            self.collect()
        return True

    def collect(self) -> None:
        self.take(self.planner.take_outputs())

    def run(self, depth: int = 1, max_steps: int = 10_000) -> None:
        """Until nothing is left to do, with up to depth + 1 plans in flight."""
        for _ in range(max_steps):
            while self.planner.num_in_flight <= depth and self.plan():
                pass
            if not self.execute() and not self.results and not self.store.step():
                return
            self.process()
        raise AssertionError(f"not done after {max_steps} steps: {self.planner.num_live} live")

    def take(self, outputs: Outputs) -> None:
        for rows in outputs.rows:
            start = 0
            for row, (owner, handle) in enumerate(zip(rows.owners.tolist(), rows.handles.tolist(), strict=True)):
                record = self.records[owner, handle]
                assert record.finished is None, "tokens after the end"
                assert int(rows.attempts[row]) == record.submission.attempt
                assert int(rows.firsts[row]) == len(record.tokens), "a gap or a repetition"
                end = start + int(rows.counts[row])
                record.tokens += rows.ids[start:end].tolist()
                start = end
        for finished in outputs.finished:
            record = self.records[finished.owner, finished.handle]
            assert record.finished is None and record.rejected is None
            record.finished = finished
        for rejected in outputs.rejected:
            self.records[rejected.owner, rejected.handle].rejected = rejected

    def expected(self, wanted: Submission) -> list[int]:
        """The whole output, by the oracle."""
        if wanted.key not in self._expected or self._expected[wanted.key][0] is not wanted:
            self._expected[wanted.key] = (wanted, self._compute_expected(wanted))
        return self._expected[wanted.key][1]

    def forget_expected(self) -> None:
        """Of a long life: what is asked for again is computed anew."""
        self._expected.clear()

    def _compute_expected(self, wanted: Submission) -> list[int]:
        stop = wanted.stop
        limit = min(self.group.max_total_len, self.group.num_pages * self.group.page_size + 1)
        if stop.max_tokens is not None:
            limit = min(limit, len(wanted.prompt_ids) + stop.max_tokens)
        num = limit - len(wanted.prompt_ids)
        ends = set(stop.stop_ids) | (set() if stop.ignore_eos else {EOS_ID})
        tokens = simulated_continuation(
            wanted.prompt_ids.tolist(),
            num,
            alphabet=self.alphabet,
            temperature=wanted.sampling.temperature,
            seed=wanted.sampling.seed or 0,
            suppressed_ids=sorted(ends),
            num_suppressed=stop.min_tokens,
        )
        for i, token in enumerate(tokens):
            if token in ends and i >= stop.min_tokens:
                return tokens[: i + 1]
        return tokens

    def check_clean(self) -> None:
        """Nothing runs, nothing leaked: on neither side."""
        state = self.planner.state
        assert state is not None
        pool = state.pages.pool
        assert self.planner.num_live == 0 and state.table.num_running == 0
        assert not state.retracting and not state.in_flight and not state.releases
        assert pool.num_owned == pool.num_leased == pool.num_quarantined == 0
        assert pool.num_free + pool.num_cached == pool.num_pages
        assert not self.planner.loads.num_under_way and not pool.num_loading and not len(self.planner.fetches)
        if state.pages.host is not None:
            host = state.pages.host
            assert not host.has_saves and host.cache.num_evictable == host.cache.num_cached == host.pages.num_used
            assert host.pages.count_used() == host.pages.num_used
        self.planner.loads.let_go(state)
        assert state.pages.cache.num_evictable == state.pages.cache.num_cached == pool.num_cached
        assert self.planner.num_waiting == self.planner.waiting_tokens == 0
        assert not self.executor.table.is_occupied.any(), "a slot of the worker was never released"


def new_executor(
    world: World,
    *,
    step_us: float | None = None,
    runner_class: type[SimulatedRunner] = SimulatedRunner,
    num_host_pages: int = 0,
) -> StepExecutor:
    """A worker that has just started: no KV, no epochs. step_us: time of a step beyond what its tokens take."""
    runner = runner_class(
        page_size=world.group.page_size,
        num_pages=world.group.num_pages,
        vocab_size=VOCAB_SIZE,
        max_total_len=world.group.max_total_len,
        alphabet=world.alphabet,
        latency=LatencyModel() if step_us is None else LatencyModel(base=step_us),
        clock=VirtualClock(),
    )
    if num_host_pages:
        runner.add_host_pool(num_host_pages * world.group.page_size * runner.kv_token_bytes)
    return StepExecutor(runner, num_slots=world.group.num_slots, max_tokens_per_step=world.group.max_tokens_per_step)


def submission(handle: int, prompt: list[int], **changes: object) -> Submission:
    base = Submission(
        key=SequenceKey(f"r{handle}", 0, str(changes.get("tenant", ""))),
        owner=1,
        handle=handle,
        prompt_ids=np.array(prompt, np.int32),
        sampling=Sampling(temperature=0.0),
        stop=Stop(max_tokens=8),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def joined(parts: object) -> PageRecords:
    """Ranges of page records as one."""
    ranges = list(parts)  # type: ignore[call-overload]
    columns = ("generations", "filled", "previous_pages", "previous_generations", "namespace_indexes")
    columns = (*columns, "weights_versions", "ids")
    return PageRecords(first_page=0, **{c: np.concatenate([getattr(r, c) for r in ranges]) for c in columns})
