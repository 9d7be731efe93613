"""The request journal: everything needed to run a request again, and what its client has of it.

Life of an output:

    REPLAYING --nothing ends what is known--> WAITING --submitted--> RUNNING --finished--> ENDED --text out--> FINISHED
        |                                        ^                    |   |                  ^                   ^
        |                                        +---scheduler lost,--+   +--stop string--> STOPPING --usage-----+
        +-------already complete--> ENDED           rejected, moved

REPLAYING: resumed by its client; the detokenizer looks for a stop string in what the client has.
WAITING: no scheduler has it. RUNNING: submitted. STOPPING: a stop string was found; the scheduler's usage is awaited.
ENDED: no more tokens come; text may still. FINISHED: everything is known; the client may still have to read it.
A failure or an abort leads to ENDED from anywhere.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING

from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.tracing import NoSpan, Span

if TYPE_CHECKING:
    from radixmesh.daemons.router.peers.detokenizer_link import Entry
    from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
    from radixmesh.daemons.router.requests.delivery import Delivery
    from radixmesh.daemons.router.requests.intake.grammars import CompiledGrammar

# Cost of objects, tasks and buffers beside the arrays, in bytes; measured with 10,000 queued requests.
REQUEST_BYTES = 30_000
OUTPUT_BYTES = 5_000
MAX_ATTEMPT_NO = (1 << 16) - 1
_RETRY_AFTER_MS = 1000


class OutputState(Enum):
    REPLAYING = auto()
    WAITING = auto()
    RUNNING = auto()
    STOPPING = auto()
    ENDED = auto()
    FINISHED = auto()


# A member read through its class costs a call of Python: these are asked for with every token.
_ENDED, _FINISHED = OutputState.ENDED, OutputState.FINISHED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why an output ended. num_output: tokens that count. stop_id, stop: what ended it, if that did."""

    reason: FinishReason
    num_output: int
    stop_id: int | None = None
    stop: str = ""
    cached_tokens: int = 0
    accepted_predictions: int = 0
    rejected_predictions: int = 0
    error: MeshError | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Output:
    """One of a request's n outputs.

    ids: all output tokens known. num_seen: how many of them may be delivered (the detokenizer has looked for a stop).
    text_bytes: UTF-8 bytes of text taken from the detokenizer; text: what of it the client does not have.
    num_delivered: ids handed to the client. vector: f32 array of an embed or score task that the client does not have.
    attempt_no: counts submits by this router.
    """

    request: Request
    index: int
    ids: array[int] = field(default_factory=lambda: array("i"))
    state: OutputState = OutputState.WAITING
    state_since: float = 0.0
    num_seen: int = 0
    num_delivered: int = 0
    text_bytes: int = 0
    text: list[str] = field(default_factory=list)
    text_offset: int = 0
    vector: bytes = b""
    is_text_done: bool = False
    is_finish_delivered: bool = False
    attempt_no: int = -1
    ending: Ending | None = None
    logprobs: LogprobTrack | None = None
    weights_version: int = 0
    scheduler: SchedulerLink | None = None
    scheduler_handle: int = 0
    entry: Entry | None = None
    # Scheduler address -> moment until which it is not asked again after a rejection.
    backoff_until: dict[str, float] = field(default_factory=dict)
    num_rejections: int = 0
    num_moves: int = 0
    num_barren_moves: int = 0
    """Of these the latest ones, between which no token came."""
    transfer_id: str = ""
    """Of the KV of its prompt that comes to its scheduler from a prefill elsewhere; empty = none does."""
    # Since when it waits for a scheduler that takes it; later than that by the time for which schedulers had it.
    waiting_since: float | None = None
    num_submitted: int = 0
    """Ids that were known when it was last submitted."""
    max_ids: int = 0
    """The request's max_tokens, known once it is submitted: here it costs nothing to read."""
    num_charged: int = 0
    # When its client was last given tokens of it, 0 = never yet.
    delivered_s: float = 0.0

    @property
    def attempt(self) -> int:
        """As submitted: a client's resumption supersedes whatever earlier routers did."""
        return (self.request.resumption << 16) | self.attempt_no

    @property
    def known_ending(self) -> Ending | None:
        """The output's ending if its ids already say so: no scheduler has to be asked."""
        if self.ids and self.ids[-1] in self.request.end_ids:
            return Ending(reason=FinishReason.STOP, num_output=len(self.ids), stop_id=self.ids[-1])
        if len(self.ids) >= self.request.max_tokens:
            return Ending(reason=FinishReason.LENGTH, num_output=len(self.ids))
        return None

    @property
    def is_open(self) -> bool:
        """True if more tokens may come."""
        return self.state is not _ENDED and self.state is not _FINISHED

    def __post_init__(self) -> None:
        self.state_since = self.request.clock()

    def level_logprobs(self) -> None:
        """Drops what a broken frame brought of ids without logprobs, or the other way round: it is asked for again."""
        if self.logprobs is not None:
            end = min(len(self.ids), self.logprobs.end)
            del self.ids[end:]
            self.logprobs.cut(end)

    def count_wait(self, *, was_accepted: bool) -> None:
        """It is lost by a scheduler, which had accepted it or not. Tokens end a wait, nothing else does.

        Time in the queue of a scheduler is not counted. A scheduler that is lost before it has accepted anything gave
        no answer: without counting that, an output that kills every stream it is sent on would wait for ever.
        """
        if self.waiting_since is None or len(self.ids) > self.num_submitted:
            self.waiting_since = None
        elif was_accepted:
            self.waiting_since += self.request.clock() - self.state_since

    def move_to(self, state: OutputState) -> None:
        assert self.state is not OutputState.FINISHED, f"{self.request.request_id}/{self.index} is finished"
        self.state = state
        self.state_since = self.request.clock()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A resolved request. prompt_logprobs: those still to be delivered, None if none are wanted (any more).

    grammar: that its outputs follow, made of resolved.grammar. clock: monotonic seconds. deadline: a moment of it,
    None = none; ttft_deadline: one for the first token of each output. num_bytes: charged to the journal.
    """

    resolved: ResolvedRequest
    resumption: int
    deadline: float | None
    ttft_deadline: float | None = None
    num_prompt: int
    end_ids: frozenset[int]
    delivery: Delivery
    outputs: list[Output] = field(default_factory=list)
    prompt_logprobs: LogprobTrack | None = None
    grammar: CompiledGrammar | None = None
    clock: Callable[[], float] = time.monotonic
    accepted: float = 0.0
    num_bytes: int = 0
    span: Span = field(default_factory=NoSpan)
    # Seconds from its arrival until the client could be given a token.
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.accepted = self.accepted or self.clock()

    @property
    def request_id(self) -> str:
        return self.resolved.request_id

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and request id: an id is a name within its tenant."""
        return self.resolved.tenant, self.resolved.request_id

    @property
    def trace_context(self) -> str:
        """Parent of the request's spans in other daemons; empty = it is not traced."""
        return self.span.context

    @property
    def has_text(self) -> bool:
        return not self.resolved.ids_only

    @property
    def max_tokens(self) -> int:
        return self.resolved.stop.max_tokens or 0

    @property
    def max_total_len(self) -> int:
        """Tokens of prompt and output at most; the vector of an embed or score task counts as one."""
        return self.num_prompt + (1 if self.resolved.is_pooled else self.max_tokens)

    @property
    def are_prompt_logprobs_due(self) -> bool:
        """True if prompt logprobs are incomplete: nothing of output 0 is delivered before them."""
        return self.prompt_logprobs is not None and self.prompt_logprobs.end < self.num_prompt


class Journal:
    """The requests that live at this router, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._requests: dict[tuple[str, str], Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._requests.values()))

    def oldest(self, num_requests: int) -> list[Request]:
        """The requests that came first, at most so many."""
        return list(islice(self._requests.values(), num_requests))

    def get(self, request_id: str, tenant: str = "") -> Request | None:
        return self._requests.get((tenant, request_id))

    def require_room(self, num_bytes: int) -> None:
        """Raises JOURNAL_FULL unless num_bytes more fit.

        Requests that are in grow beyond the bound rather than fail; each by its own output at most.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise MeshError(
                ErrorReason.ERROR_REASON_JOURNAL_FULL,
                f"this router keeps {self.num_bytes} of {self.max_bytes} bytes of requests: retry later or elsewhere",
                {"retry_after_ms": str(_RETRY_AFTER_MS)},
            )

    def add(self, request: Request, num_message_bytes: int = 0) -> None:
        """Takes a request in, and with it the message of that many bytes that it came by. Raises JOURNAL_FULL."""
        assert request.key not in self._requests, f"{request.request_id} is in the journal"
        size = journal_size(len(request.resolved.prompt_ids), len(request.resolved.seeds))
        size += num_message_bytes + sum(4 * len(output.ids) for output in request.outputs)
        self.require_room(size)
        self._requests[request.key] = request
        self.charge(request, size)

    def charge(self, request: Request, num_bytes: int) -> None:
        """request has grown by num_bytes, or shrunk if negative."""
        request.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def drop(self, request: Request) -> None:
        """Forgets a request. Idempotent."""
        if self._requests.get(request.key) is request:
            del self._requests[request.key]
            self.num_bytes -= request.num_bytes


def journal_size(num_prompt_bytes: int, num_outputs: int) -> int:
    """Bytes that a request costs before it has output."""
    return REQUEST_BYTES + num_prompt_bytes + num_outputs * OUTPUT_BYTES
