"""What an operator may choose of planning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """chunk_tokens: most tokens of one request a step. max_tokens_per_step, max_running: None = the worker's limit.
    grant_ahead_tokens: pages granted at a time hold about so many. growth_tokens: first estimate of what a running
    request will still need. max_queue: waiting requests before OVERLOADED.
    check_invariants: verify every page after every step and fail on a breach (tests)."""

    chunk_tokens: int = 512
    max_tokens_per_step: int | None = None
    max_running: int | None = None
    grant_ahead_tokens: int = 16
    growth_tokens: int = 64
    max_queue: int = 10_000
    cache: str = "trie"
    queue_policy: str = "fcfs"
    check_invariants: bool = False
