"""What an operator may choose of planning."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.prefill import PrefillLimits
from radixmesh.daemons.scheduler.queue.policies import QueueSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """chunk_tokens: most tokens of one request a step. max_tokens_per_step, max_running: None = the worker's limit.
    grant_ahead_tokens: pages granted at a time hold about so many. growth_tokens: first estimate of what a running
    request will still need. max_queue, max_queue_tokens: waiting requests and tokens before OVERLOADED; None = no
    bound. cache, eviction: names in PREFIX_CACHES and EVICTION_POLICIES. queue_policy: a name in QUEUE_POLICIES;
    overtaking, queue_seed: see QueueSettings. max_preemptions: how often one request gives way to higher
    priorities. priority_across_tenants: priorities count against other tenants' requests too. hold_tokens: a common
    prefix of at least so many tokens, being computed for another, is waited for.
    check_invariants: verify every page after every step and fail on a breach (tests)."""

    chunk_tokens: int = 512
    max_tokens_per_step: int | None = None
    max_running: int | None = None
    grant_ahead_tokens: int = 16
    growth_tokens: int = 64
    max_queue: int = 10_000
    max_queue_tokens: int | None = None
    cache: str = "radix"
    eviction: str = "lru"
    queue_policy: str = "fcfs"
    overtaking: float = 1.0
    queue_seed: int = 0
    max_preemptions: int = 4
    priority_across_tenants: bool = False
    hold_tokens: int = 32
    check_invariants: bool = False

    def step_tokens(self, group: GroupInfo) -> int:
        """Most tokens of a step."""
        return min(self.max_tokens_per_step or group.max_tokens_per_step, group.max_tokens_per_step)

    def ahead_pages(self, group: GroupInfo) -> int:
        """Pages granted at a time."""
        return max(1, self.grant_ahead_tokens // group.page_size)

    def prefill_limits(self, group: GroupInfo) -> PrefillLimits:
        return PrefillLimits(
            chunk_tokens=self.chunk_tokens,
            max_running=min(self.max_running or group.num_slots, self.step_tokens(group)),
            ahead_pages=self.ahead_pages(group),
            hold_tokens=self.hold_tokens,
        )

    def queue_settings(self) -> QueueSettings:
        return QueueSettings(
            policy=self.queue_policy,
            overtaking=self.overtaking,
            seed=self.queue_seed,
            priority_across_tenants=self.priority_across_tenants,
        )
