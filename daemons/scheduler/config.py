"""Settings of a scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.settings import setting
from radixmesh.daemons.scheduler.cache.eviction import EVICTION_POLICIES
from radixmesh.daemons.scheduler.cache.prefix_cache import PREFIX_CACHES, check_cache_choice
from radixmesh.daemons.scheduler.planning.experts.dispatch import DISPATCH_CHOICES, DispatchChoice
from radixmesh.daemons.scheduler.planning.experts.expert_balancer import BalanceSettings
from radixmesh.daemons.scheduler.planning.settings import PlannerSettings
from radixmesh.daemons.scheduler.queue.policies import QUEUE_POLICIES
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy

_AT_LEAST_ONE = (
    "chunk_tokens",
    "max_tokens_per_step",
    "max_running",
    "max_queue_tokens",
    "grant_ahead_tokens",
    "decode_reserve_tokens",
    "inflight_prefix_min_tokens",
    "low_latency_max_tokens",
)
# Of memory that they take here, and in each router.
_MAX_STORED_TOKENS = 1 << 26


class Role(StrEnum):
    """As `radixmesh.scheduler.v1.SchedulerRole`."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings(CommonSettings):
    """Queue, batches, KV pages and prefix cache of one worker group."""

    workers: tuple[str, ...] = setting((), "addresses of the group's workers by rank, host:port or unix:/path")
    pipeline_depth: str = setting(
        "auto", "plans sent beyond the one that runs: auto (by time), 0, 1, 2, ...", deprecated=("depth",)
    )
    hold_plans: bool = setting(True, "the plan behind a long step leaves shortly before that ends, with requests that "
        "come until then; only where the pipeline depth is auto")  # fmt: skip
    chunk_tokens: int = setting(512, "prefill tokens in one step for each request that is prefilled: those of several "
        "long prompts go to one of them after the other")  # fmt: skip
    max_tokens_per_step: int | None = setting(None, "most tokens of one step; none: what the worker takes")
    max_running: int | None = setting(None, "most requests that run at a time; none: the worker's slots")
    max_queue: int = setting(10_000, "waiting requests before new ones are refused with OVERLOADED")
    grant_ahead_tokens: int = setting(16, "tokens that fit into the pages granted to a decoding request at a time")
    decode_reserve_tokens: int = setting(
        64,
        "tokens for which admission keeps pages free per running request; the first estimate, which adapts",
        deprecated=("growth-tokens",),
    )
    max_queue_tokens: int | None = setting(None, "tokens of waiting requests before new ones are refused; none: any")
    cache: str = setting("radix", f"prefix cache: {', '.join(PREFIX_CACHES)}")
    eviction: str = setting("lru", f"which cached prefix goes first: {', '.join(EVICTION_POLICIES)}")
    queue_policy: str = setting("fcfs", f"order of waiting requests: {', '.join(QUEUE_POLICIES)}")
    max_overtake_factor: float = setting(
        1.0,
        "most later requests admitted before an earlier one, as a multiple of the queue's length; not for fcfs",
        deprecated=("overtaking",),
    )
    queue_seed: int = setting(0, "seed of the random order")
    max_preemptions: int = setting(4, "times that one request gives way to higher priorities (queue policy priority)")
    priority_across_tenants: bool = setting(
        False, "priorities count before the turns of tenants, not within them: a higher one may starve other tenants"
    )
    inflight_prefix_min_tokens: int = setting(
        32,
        "a request waits for a shared prefix of at least so many tokens that another is computing",
        deprecated=("hold-tokens",),
    )
    expert_dispatch: str = setting("auto", "how rows reach experts on other ranks (worker --ep-size): normal, "
        "low-latency, or auto (low-latency for steps of decodes alone)")  # fmt: skip
    low_latency_max_tokens: int = setting(128, "most tokens of a rank in a step that auto dispatches at low latency")
    prefill_align_steps: int = setting(4, "most steps for which new prompts wait until each rank with a free slot gets "
        "one, where a chunk would take ranks that decode out of low latency; 0: none")  # fmt: skip
    expert_balance_threshold: float = setting(0.8, "experts move between ranks while balancedness (mean over most of "
        "the ranks' work) is below; 0: never")  # fmt: skip
    expert_balance_interval_s: float = setting(60.0, "seconds from one look at balancedness to the next")
    role: Role = setting(Role.BOTH, "part in disaggregated prefill and decode: prefill (computes prompts for others), "
        "decode (takes their KV), or both (whole requests, no transfers)")  # fmt: skip
    transfer_timeout_s: float = setting(3.0, "seconds without progress after which a request computes the KV that it "
        "waits for")  # fmt: skip
    transfer_queue_s: float = setting(30.0, "seconds for which a prompt waits for room (pages, a slot, staging) before "
        "its KV is computed elsewhere; then it is computed here")  # fmt: skip
    transfer_chunk_tokens: int = setting(2048, "computed tokens of a prompt from which on their KV is sent to another "
        "group while the rest is computed, by multiples of 256; 0: all at the end")  # fmt: skip
    kv_write_policy: str = setting("write_through", "when KV is saved to the workers' host memory (--host-kv-bytes): "
        "write_through (once cached), selective (once used again) or write_back (when evicted)")  # fmt: skip
    kv_write_hits: int = setting(2, "uses of a cached prefix before the policy selective saves it")
    kv_host_eviction: str = setting("", "which prefix leaves the workers' host memory first: "
        f"{', '.join(EVICTION_POLICIES)}; empty: as --eviction")  # fmt: skip
    kv_fetch_min_tokens: int = setting(64, "a request asks the workers' store (--kv-store) for at least so many "
        "tokens that the host lacks; fewer are computed")  # fmt: skip
    kv_stored_tokens: int = setting(1 << 20, "tokens of prefixes in the workers' store that are remembered and told "
        "to routers; 0: none, routers do not know what a store has")  # fmt: skip
    kv_load_min_tokens: int = setting(32, "a request waits for KV from the host for at least so many tokens; fewer are "
        "computed")  # fmt: skip
    kv_load_timeout_s: float = setting(2.0, "seconds after which a request computes the KV that it waits for from the "
        "host")  # fmt: skip
    check_invariants: bool = setting(False, "verify every page after every step, and fail on a violation (tests)")
    step_timeout_s: float = setting(
        5.0, "seconds without a result after which a worker counts as dead, at least", deprecated=("hang-s",)
    )

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        if not self.workers:
            raise ValueError(
                "--workers (or RADIXMESH_WORKERS): name the workers of the group in the order of their ranks"
            )
        if len(set(self.workers)) != len(self.workers):
            raise ValueError("--workers (or RADIXMESH_WORKERS) names a worker twice: each is one rank of the group")
        depth = self.pipeline_depth
        if depth != "auto" and not depth.isdigit():
            raise ValueError(
                f"--pipeline-depth (or RADIXMESH_PIPELINE_DEPTH) must be auto or a number >= 0, not {depth}"
            )
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be >= 1, not {value}")
        counts = (self.max_queue, self.max_overtake_factor, self.max_preemptions, self.prefill_align_steps)
        if min(counts) < 0 or self.step_timeout_s <= 0:
            raise ValueError(
                "--max-queue, --max-overtake-factor, --max-preemptions and --prefill-align-steps must be >= 0 and "
                "--step-timeout-s > 0"
            )
        if not 0.0 <= self.expert_balance_threshold <= 1.0 or not self.expert_balance_interval_s > 0:
            raise ValueError("--expert-balance-threshold must be in [0, 1] and --expert-balance-interval-s > 0")
        choices: Iterable[str]
        for name, choices in (
            ("cache", PREFIX_CACHES),
            ("eviction", EVICTION_POLICIES),
            ("queue_policy", QUEUE_POLICIES),
            ("expert_dispatch", DISPATCH_CHOICES),
            ("kv_write_policy", [policy.value for policy in WritePolicy]),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"--{name.replace('_', '-')} must be one of {', '.join(choices)}")

        if self.kv_host_eviction and self.kv_host_eviction not in EVICTION_POLICIES:
            raise ValueError(f"--kv-host-eviction must be one of {', '.join(EVICTION_POLICIES)}, or empty")
        if self.role is not Role.BOTH and self.cache == "none":
            raise ValueError(f"--role {self.role} needs a prefix cache: what is sent and what arrives is kept there")
        if self.transfer_chunk_tokens < 0:
            raise ValueError(f"--transfer-chunk-tokens must be >= 0, not {self.transfer_chunk_tokens}")
        if self.transfer_timeout_s <= 0:
            raise ValueError(f"--transfer-timeout-s must be > 0, not {self.transfer_timeout_s}")
        if self.transfer_queue_s <= 0:
            raise ValueError(f"--transfer-queue-s must be > 0, not {self.transfer_queue_s}")
        if min(self.kv_write_hits, self.kv_load_min_tokens, self.kv_fetch_min_tokens) < 1:
            raise ValueError("--kv-write-hits, --kv-load-min-tokens and --kv-fetch-min-tokens must be >= 1")
        if not 0 <= self.kv_stored_tokens <= _MAX_STORED_TOKENS:
            raise ValueError(f"--kv-stored-tokens must be in [0, {_MAX_STORED_TOKENS}], not {self.kv_stored_tokens}")
        if self.kv_load_timeout_s <= 0:
            raise ValueError(f"--kv-load-timeout-s must be > 0, not {self.kv_load_timeout_s}")
        check_cache_choice(self.cache, self.eviction)

    @property
    def fixed_depth(self) -> int | None:
        """None = by time."""
        return None if self.pipeline_depth == "auto" else int(self.pipeline_depth)

    def planner_settings(self) -> PlannerSettings:
        return PlannerSettings(
            chunk_tokens=self.chunk_tokens,
            max_tokens_per_step=self.max_tokens_per_step,
            max_running=self.max_running,
            grant_ahead_tokens=self.grant_ahead_tokens,
            decode_reserve_tokens=self.decode_reserve_tokens,
            max_queue=self.max_queue,
            max_queue_tokens=self.max_queue_tokens,
            cache=self.cache,
            eviction=self.eviction,
            queue_policy=self.queue_policy,
            max_overtake_factor=self.max_overtake_factor,
            queue_seed=self.queue_seed,
            max_preemptions=self.max_preemptions,
            priority_across_tenants=self.priority_across_tenants,
            inflight_prefix_min_tokens=self.inflight_prefix_min_tokens,
            dispatch=DispatchChoice(
                mode=DISPATCH_CHOICES[self.expert_dispatch], max_tokens=self.low_latency_max_tokens
            ),
            prefill_align_steps=self.prefill_align_steps,
            balance=BalanceSettings(threshold=self.expert_balance_threshold, interval_s=self.expert_balance_interval_s),
            transfer_timeout_s=self.transfer_timeout_s,
            transfer_queue_s=self.transfer_queue_s,
            transfer_chunk_tokens=self.transfer_chunk_tokens,
            tiers=TierSettings(
                policy=WritePolicy(self.kv_write_policy),
                min_hits=self.kv_write_hits,
                eviction=self.kv_host_eviction,
                load_min_tokens=self.kv_load_min_tokens,
                load_timeout_s=self.kv_load_timeout_s,
                fetch_min_tokens=self.kv_fetch_min_tokens,
                stored_tokens=self.kv_stored_tokens,
            ),
            check_invariants=self.check_invariants,
        )
