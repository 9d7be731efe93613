"""The operator's choices for planning."""

from __future__ import annotations

from dataclasses import dataclass

from radixmesh.daemons.scheduler.cache.prefix_cache import EVICTING_CACHES
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.planning.admission.prefill import PrefillLimits
from radixmesh.daemons.scheduler.planning.experts.dispatch import DispatchChoice
from radixmesh.daemons.scheduler.planning.experts.expert_balancer import BalanceSettings
from radixmesh.daemons.scheduler.queue.policies import QueueSettings
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """The planner's part of the scheduler's settings."""

    chunk_tokens: int = 512
    """Prefill tokens in one step for each request that is prefilled, see Prefill."""
    max_tokens_per_step: int | None = None
    """None = the worker's limit."""
    max_running: int | None = None
    """None = the worker's slots."""
    grant_ahead_tokens: int = 16
    """Tokens that fit into the pages granted to a decoding request at a time."""
    decode_reserve_tokens: int = 64
    """First estimate of the tokens that a running request will still need."""
    max_queue: int = 10_000
    """Waiting requests before OVERLOADED."""
    max_queue_tokens: int | None = None
    """Waiting tokens before OVERLOADED; None = no bound."""
    cache: str = "radix"
    """A name in PREFIX_CACHES."""
    eviction: str = "lru"
    """A name in EVICTION_POLICIES."""
    queue_policy: str = "fcfs"
    """A name in QUEUE_POLICIES."""
    max_overtake_factor: float = 1.0
    """See AgedSubQueue."""
    queue_seed: int = 0
    """Seed of the random order."""
    max_preemptions: int = 4
    """Times that one request gives way to higher priorities."""
    priority_across_tenants: bool = False
    """Priorities also count against requests of other tenants."""
    inflight_prefix_min_tokens: int = 32
    """A request waits for a common prefix of at least so many tokens that another is computing."""
    prefill_align_steps: int = 0
    """See PrefillAlignment."""
    dispatch: DispatchChoice = DispatchChoice()
    """Way to experts that are divided among ranks."""
    balance: BalanceSettings = BalanceSettings()
    """When experts move between ranks."""
    transfer_timeout_s: float = 3.0
    """A request waits so long for KV from elsewhere that makes no progress."""
    transfer_queue_s: float = 30.0
    """And so long for room for it."""
    transfer_chunk_tokens: int = 2048
    """See KvHandovers."""
    tiers: TierSettings = TierSettings()
    """Use of host memory, where workers have some for KV."""
    check_invariants: bool = False
    """Verifies every page after every step and fails on a violation (tests)."""

    def step_tokens(self, group: GroupInfo) -> int:
        """Most tokens of a step."""
        return min(self.max_tokens_per_step or group.max_tokens_per_step, group.max_tokens_per_step)

    def tiers_of(self, group: GroupInfo) -> TierSettings | None:
        """None: the workers have no host tier, or the prefix cache has no use for one."""
        return self.tiers if group.num_host_pages and self.cache in EVICTING_CACHES else None

    def ahead_pages(self, group: GroupInfo) -> int:
        """Pages granted at a time."""
        return max(1, self.grant_ahead_tokens // group.page_size)

    def prefill_limits(self, group: GroupInfo) -> PrefillLimits:
        return PrefillLimits(
            chunk_tokens=self.chunk_tokens,
            max_running=self.max_running or group.num_slots * group.dp_size,
            # Each of them takes a token of a step.
            max_running_of_rank=min(group.num_slots, self.step_tokens(group)),
            ahead_pages=self.ahead_pages(group),
            inflight_prefix_min_tokens=self.inflight_prefix_min_tokens,
            align_steps=self.prefill_align_steps,
        )

    def queue_settings(self) -> QueueSettings:
        return QueueSettings(
            policy=self.queue_policy,
            max_overtake_factor=self.max_overtake_factor,
            seed=self.queue_seed,
            priority_across_tenants=self.priority_across_tenants,
        )
