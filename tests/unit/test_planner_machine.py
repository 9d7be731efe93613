"""Random lives: submits, attempts, aborts, stop strings, retractions, new epochs, results in any lag."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.planner_world import Record, World

from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.queue.policies import QUEUE_POLICIES
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy

PROMPTS = st.one_of(
    st.lists(st.integers(2, 63), min_size=1, max_size=40),
    # Many share a prefix: the cache has something to do.
    st.integers(1, 40).map(lambda n: [2 + i % 7 for i in range(n)]),
)


class PlannerMachine(RuleBasedStateMachine):
    """Every output equals the oracle's, positions have no gap, the page invariant holds after every step (the planner
    asserts it), the worker refuses nothing, and nothing is left at the end."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        chunk_tokens=st.sampled_from([1, 5, 64]),
        num_tokens=st.sampled_from([64, 96, 256]),
        num_slots=st.sampled_from([1, 3, 6]),
        cache=st.sampled_from(
            [("radix", "lru"), ("radix", "priority"), ("radix", "lfu"), ("trie", "lru"), ("none", "lru")]
        ),
        queue_policy=st.sampled_from(sorted(QUEUE_POLICIES)),
        inflight_prefix_min_tokens=st.sampled_from([1, 4, 1000]),
        max_overtake_factor=st.sampled_from([0.0, 2.0, 1e9]),
        depth=st.integers(0, 3),
        decode_reserve_tokens=st.sampled_from([1, 32]),
        max_tokens_per_row=st.sampled_from([1, 2, 4, 9]),
        row_seed=st.integers(0, 1000),
        tier=st.sampled_from(
            [(0, "write_through"), (3, "write_through"), (3, "selective"), (3, "write_back"), (0.5, "write_back")]
        ),
        load_token_us=st.sampled_from([0.0, 300.0, 5000.0]),
        load_min_tokens=st.sampled_from([1, 1, 16]),
        load_window_tokens=st.sampled_from([0, 30, 16384]),
        store_seed=st.one_of(st.none(), st.integers(0, 1000)),
    )
    def start(
        self,
        page_size: int,
        chunk_tokens: int,
        num_tokens: int,
        num_slots: int,
        cache: tuple[str, str],
        queue_policy: str,
        inflight_prefix_min_tokens: int,
        max_overtake_factor: float,
        depth: int,
        decode_reserve_tokens: int,
        max_tokens_per_row: int,
        row_seed: int,
        tier: tuple[float, str],
        load_token_us: float,
        load_min_tokens: int,
        load_window_tokens: int,
        store_seed: int | None,
    ) -> None:
        """tier: host pages as a multiple of the device's, and the write policy. store_seed: of how much a store below
        the host has of what is asked for; None: there is none."""
        stored = None if store_seed is None else np.random.default_rng(store_seed)
        self.depth = depth
        self.world = World(
            page_size=page_size,
            num_pages=num_tokens // page_size,
            num_slots=num_slots,
            chunk_tokens=chunk_tokens,
            max_tokens_per_step=24,
            cache=cache[0],
            eviction=cache[1],
            queue_policy=queue_policy,
            inflight_prefix_min_tokens=inflight_prefix_min_tokens,
            max_overtake_factor=max_overtake_factor,
            decode_reserve_tokens=decode_reserve_tokens,
            max_total_len=90,
            max_tokens_per_row=max_tokens_per_row,
            row_seed=row_seed,
            num_host_pages=int(tier[0] * num_tokens // page_size),
            load_token_us=load_token_us,
            tiers=TierSettings(
                policy=WritePolicy(tier[1]),
                min_hits=1,
                load_min_tokens=load_min_tokens,
                load_timeout_s=5.0,
                load_window_tokens=load_window_tokens,
                fetch_min_tokens=load_min_tokens,
                stored_tokens=8 * num_tokens,
            ),
            num_stored=None if stored is None else (lambda num: int(stored.integers(0, num + 1))),
        )
        self.cut: dict[tuple[int, int], int] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        min_tokens=st.integers(0, 3),
        temperature=st.sampled_from([0.0, 1.0]),
        router=st.sampled_from(["a", "b"]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
        num=st.sampled_from([1, 1, 3]),
        ignore_eos=st.booleans(),
        stop_id=st.one_of(st.none(), st.integers(2, 63)),
        wants_logprobs=st.booleans(),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int | None,
        min_tokens: int,
        temperature: float,
        router: str,
        priority: int,
        num: int,
        ignore_eos: bool,
        stop_id: int | None,
        wants_logprobs: bool,
    ) -> None:
        sampling = Sampling(
            temperature=temperature,
            seed=7,
            num_top_logprobs=0 if wants_logprobs else None,
            prompt_logprobs=wants_logprobs,
        )
        for _ in range(num):
            self.world.submit(
                prompt,
                router=router,
                priority=priority,
                owner=1 if router == "a" else 2,
                sampling=sampling,
                stop=Stop(
                    max_tokens=max_tokens,
                    min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
                    stop_ids=() if stop_id is None else (stop_id,),
                    ignore_eos=ignore_eos,
                ),
            )

    @precondition(lambda self: self.world.records)
    @rule(data=st.data(), bump=st.integers(0, 1), owner=st.integers(1, 2))
    def resubmit(self, data: st.DataObject, bump: int, owner: int) -> None:
        """Another stream takes over with what it has seen; the old row of the journal ends there."""
        old = data.draw(st.sampled_from(self._live() or list(self.world.records.values())))
        if old.rejected is not None:
            return
        known = data.draw(st.integers(0, len(old.tokens)))
        changes = {
            name: getattr(old.submission, name) for name in ("key", "sampling", "stop", "router") if name != "owner"
        }
        self.world.submit(
            old.submission.prompt_ids.tolist(),
            **changes,
            attempt=old.submission.attempt + bump,
            owner=owner,
            resumed_output_ids=np.array(old.tokens[:known], np.int32),
        )

    @precondition(lambda self: self.world.records)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(list(self.world.records.values())))
        self.world.planner.abort(record.submission.key.request_id)
        self.world.collect()

    @precondition(lambda self: self._live())
    @rule(data=st.data())
    def stop_string(self, data: st.DataObject) -> None:
        record = data.draw(st.sampled_from(self._live()))
        if not record.tokens:
            return
        num = data.draw(st.integers(1, len(record.tokens)))
        s = record.submission
        if self.world.planner.submissions.by_handle(s.owner, s.handle) is not None:
            self.cut[s.owner, s.handle] = num
        self.world.planner.finish_by_stop(s.owner, s.handle, num)
        self.world.collect()

    @rule(seconds=st.sampled_from([0.5, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def flush(self) -> None:
        self.world.planner.flush.wish()

    @rule()
    def plan(self) -> None:
        if self.world.planner.num_in_flight <= self.depth:
            self.world.plan()

    @rule()
    def execute(self) -> None:
        self.world.execute()

    @rule()
    def fetch(self) -> None:
        self.world.store.step()

    @rule(settles=st.booleans())
    def process(self, settles: bool) -> None:
        self.world.process(settles=settles)

    @rule(times=st.integers(1, 12))
    def run_some(self, times: int) -> None:
        for _ in range(times):
            self.plan()
            self.world.execute()
            self.world.store.step()
            self.world.process()

    @rule()
    def new_epoch(self) -> None:
        self.world.begin_epoch()

    @invariant()
    def outputs_are_the_oracles(self) -> None:
        if not hasattr(self, "world"):
            return
        for record in self._live():
            expected = self.world.expected(record.submission)
            assert record.tokens == expected[: len(record.tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.run(self.depth)
        world.collect()
        world.check_clean()
        for key, record in world.records.items():
            if record.finished is None or record.finished.reason not in (FinishReason.STOP, FinishReason.LENGTH):
                continue
            if key in self.cut:
                assert record.finished.num_output == self.cut[key]
                continue
            assert record.tokens == world.expected(record.submission), key
            assert record.finished.num_output == len(record.tokens)

    def _live(self) -> list[Record]:
        return [r for r in self.world.records.values() if r.finished is None and r.rejected is None]


PlannerMachine.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=60,
    deadline=None,
    # Shrinking runs take minutes; the failing example is reported as it is.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_random_lives = pytest.mark.timeout(300)(PlannerMachine.TestCase)
