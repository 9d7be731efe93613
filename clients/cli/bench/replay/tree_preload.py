"""Fills a prefix cache with conversations before a replay, by running them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixmesh.cli.bench.replay.step_costs import StepCosts
from radixmesh.cli.bench.replay.virtual_group import VirtualGroup
from radixmesh.cli.bench.workloads import VOCAB_SIZE, IntArray
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.scheduler.planning.planner import Planner
from radixmesh.daemons.scheduler.sequence import SequenceKey, Submission

OWNER = 1
_SHARED_TEXTS, _SHARED_LEN = 16, 300
_NUM_TURNS, _TURN_LEN = 4, 250
LONGEST = _SHARED_LEN + _NUM_TURNS * _TURN_LEN + 1
_WAVE = 16


class TreePreload:
    """Prompts begin with one of 16 texts of 300 tokens; a conversation of four turns of 250 follows, each prompt
    repeating the former ones, so that the tree forks and splits as a chat service's does."""

    def __init__(self, planner: Planner, group: VirtualGroup, seed: int) -> None:
        self._planner = planner
        self._group = group
        self._rng = np.random.default_rng([seed, 0x7EE])
        self._costs = StepCosts()
        self._num_sent = 0
        self.now = 0.0

    def fill(self, num_tokens: int) -> float:
        """Returns the virtual time at which about that many tokens are cached: the last conversation is cut short."""
        state = self._planner.state
        assert state is not None
        page_size, pool = state.group.page_size, state.pages.pool
        for wave in self._waves():
            missing = num_tokens - pool.num_cached * page_size
            if missing < page_size:
                break
            kept = wave if missing > _WAVE * (_SHARED_LEN + _TURN_LEN) else [wave[0][: max(2, missing + _SHARED_LEN)]]
            before = pool.num_cached
            self._run(kept)
            if pool.num_cached <= before and len(kept) == 1:
                break
        return self.now

    def _waves(self) -> Iterator[list[IntArray]]:
        shared = [self._tokens(_SHARED_LEN) for _ in range(_SHARED_TEXTS)]
        while True:
            prompts = shared
            for _ in range(_NUM_TURNS):
                prompts = [np.concatenate([prompt, self._tokens(_TURN_LEN)]) for prompt in prompts]
                yield prompts

    def _tokens(self, num: int) -> IntArray:
        return self._rng.integers(10, VOCAB_SIZE, num).astype(np.int32)

    def _run(self, prompts: list[IntArray]) -> None:
        for prompt in prompts:
            self._num_sent += 1
            self._planner.submit(
                Submission(
                    key=SequenceKey(f"preload-{self._num_sent}", 0),
                    owner=OWNER,
                    handle=self._num_sent,
                    prompt_ids=prompt,
                    sampling=Sampling(temperature=0.0),
                    stop=Stop(max_tokens=1, ignore_eos=True),
                )
            )
        while (plan := self._planner.plan(self.now)) is not None:
            pending = self._group.send(plan, self.now, self._costs)
            self.now = pending.arrives_s
            self._planner.process(self._group.receive(pending.step_id, self._costs))
        assert not self._planner.num_live, "the tree does not fit the cache"
