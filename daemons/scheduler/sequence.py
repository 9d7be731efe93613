"""One output on its way through the scheduler.

WAITING --admit--> RUNNING --retract--> RETRACTING --result of the plan before the release--> WAITING
   |                  |                     |
   +---- finish ------+------- finish ------+--> FINISHED (for good)

A new epoch of the worker group takes RUNNING and RETRACTING back to WAITING at once: results
still outstanding are void.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.runtime.cache_namespace import cache_name
from radixmesh.daemons.runtime.sampling import Sampling, Stop
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.scheduler.queue.grammars import Grammar
from radixmesh.daemons.scheduler.transfers.kv_target import KvTarget


class Lifecycle(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    RETRACTING = "retracting"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """One output of a request. Ids are names within a tenant: two tenants may use the same one at once."""

    request_id: str
    index: int
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Domain form of `radixmesh.scheduler.v1.Submit`; ids int32, `deadline_s` on the planner's clock."""

    key: SequenceKey
    attempt: int = 0
    owner: int
    """Stream that gets the rows."""
    handle: int
    router: str = ""
    tenant: str = ""
    priority: int = 0
    model: str = ""
    task: Task = Task.GENERATE
    prompt_ids: IntArray
    resumed_output_ids: IntArray = field(default_factory=empty_ints)
    sampling: Sampling
    stop: Stop
    logprobs_start: int = 0
    cache_salt: str = ""
    deadline_s: float | None = None
    grammar: Grammar | None = None
    """That the output follows; None = it is free."""
    transfer_id: str = ""
    """Of the KV of its prompt that comes from elsewhere; empty = none comes."""
    send_kv_to: KvTarget | None = None
    """Set: it ends with its first token, and the prompt's KV goes there."""
    unsupported: str = ""
    """Name of an option that this scheduler does not offer; empty = none is used."""
    trace_context: str = ""
    """W3C traceparent of the router's span; empty = not traced."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """An accepted submission with its state: one of the n outputs of a request. Tokens: `prompt_ids` then `output`."""

    submission: Submission
    arrival: int
    """Order of acceptance: the youngest has the highest."""
    owner: int
    handle: int
    adapter: str
    max_total_len: int
    end_ids: frozenset[int]
    """Ids that end the output: EOS unless ignored, and stop ids."""
    logprobs_start: int
    output: array[int] = field(default_factory=lambda: array("i"))
    """While RUNNING the newest tokens may still be in the SequenceTable: its settle() brings them here."""
    lifecycle: Lifecycle = Lifecycle.WAITING
    slot: int = -1
    generation: int = 0
    cached_tokens: int = -1
    """Prompt tokens found in the cache at the first admission; -1 before."""
    drafted_tokens: int = 0
    """Tokens that steps of it verified (speculative decoding)."""
    accepted_tokens: int = 0
    """Of these, tokens of the output."""
    waits_for_step: int = 0
    """While RETRACTING: the result after which it may be admitted again."""
    num_prefix_waits: int = 0
    """Times it waited for a prefix that another computed."""
    num_blob_misses: int = 0
    """Times that a worker did not have the blob that it names: it has to be put again before the next admission."""
    num_preempted: int = 0
    """Times it gave its place to a higher priority."""
    trace_context: str = ""
    """W3C traceparent for what the worker does for it; empty = not traced."""
    retracted_from: tuple[int, int] = (-1, 0)
    """While RETRACTING: the (slot, generation) that its outstanding rows name."""

    @property
    def key(self) -> SequenceKey:
        return self.submission.key

    @property
    def prompt_len(self) -> int:
        return len(self.submission.prompt_ids)

    @property
    def total_len(self) -> int:
        return len(self.submission.prompt_ids) + len(self.output)

    @property
    def cache_name(self) -> str:
        """Pages are shared among equal names: one per (adapter, salt)."""
        return cache_name(self.adapter, self.submission.cache_salt)

    def token_ids(self) -> IntArray:
        """Prompt and output so far, int32 [total_len]; not to be written to."""
        if not self.output:
            return self.submission.prompt_ids
        return np.concatenate([self.submission.prompt_ids, self.output_ids()])

    def output_ids(self) -> IntArray:
        """Output so far, resumed tokens included; a copy, since an array that is viewed cannot grow."""
        return np.frombuffer(self.output.tobytes(), np.int32) if self.output else empty_ints()

    def max_cached_len(self) -> int:
        """Longest prefix that may come from the cache.

        The last token is always computed, its logits are needed. A prompt token's logprob comes from the computation
        of the token before it, so undelivered ones cap the prefix too. An embed task pools what all positions give.
        """
        if self.submission.task is Task.EMBED:
            return 0
        limit = self.total_len - 1
        if self.submission.sampling.prompt_logprobs and self.logprobs_start < self.prompt_len:
            limit = min(limit, max(0, self.logprobs_start - 1))
        return limit
