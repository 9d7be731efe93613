"""The stream to one scheduler: submits down, tokens up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import identity_from_proto
from radixmesh.daemons.router.peers.frame_stream import Dial
from radixmesh.daemons.router.peers.peer_link import PeerLink
from radixmesh.daemons.router.peers.schedulers.link_health import LinkHealth
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.scheduler_events import SchedulerEvents
from radixmesh.daemons.router.peers.schedulers.serve_checks import ServeChecks
from radixmesh.daemons.router.peers.schedulers.serve_frames import ServeFrames
from radixmesh.daemons.router.peers.schedulers.serve_rows import ServeRows
from radixmesh.daemons.router.peers.schedulers.submit import prefill_of
from radixmesh.daemons.router.placement.replicas import ReplicaLoad
from radixmesh.daemons.router.requests.journal import Ending, Output, OutputState, Request
from radixmesh.daemons.router.served_identity import ServedIdentity, is_same_model
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.rpc.hello import SHARING_VERSION, check_hello
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.scheduler.v1 import scheduler_pb2

log = get_logger(__name__)

# Ends of an output that say something of the scheduler and its workers, and nothing of the request.
_OWN_FAULTS = frozenset((ErrorReason.ERROR_REASON_STEP_FAILED, ErrorReason.ERROR_REASON_INTERNAL))
_Request = scheduler_pb2.ServeRequest
_Response = scheduler_pb2.ServeResponse
# As the router's own requests have at most: nobody can have been given a longer id.
_MAX_REQUEST_ID_BYTES = 256


class SchedulerLink(PeerLink[_Request, _Response]):
    """One scheduler. Frames bundle what there is to say when the transport takes one."""

    def __init__(
        self,
        address: str,
        dial: Dial[_Request, _Response],
        peer_timeout_s: float,
        hello: common_pb2.Hello,
        events: SchedulerEvents,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(address, dial, peer_timeout_s, clock)
        self._hello = hello
        self._events = events
        self.health = LinkHealth(clock)
        self.on_facts: Callable[[SchedulerLink], None] = lambda link: None
        """Called when that has changed which decides what can go here."""
        self._is_draining = False
        self.is_left = False
        """Its outputs go on elsewhere as soon as another scheduler can take them."""
        self.identity: ServedIdentity | None = None
        self.adapters: tuple[str, ...] = ()
        self._page_size = self._num_pages = 0
        self.kv_heads = b""
        """KV heads of its ranks, as its hello has them."""
        self.takes_kv_targets = False
        """Prompts for outputs elsewhere may come ahead of the target of their KV."""
        self.role = scheduler_pb2.SCHEDULER_ROLE_UNSPECIFIED
        """In disaggregated prefill and decode, as last announced."""
        self._prefills: dict[int, RemotePrompt] = {}
        self.load = scheduler_pb2.Load()
        self.group_since = self._clock()
        """Since when the worker group serves, or does not; claims that fail in between change nothing."""
        self._has_served = False
        self._sequence = 0
        self._last_handle = 0
        self._last_abort_id = 0
        self._running: dict[int, Output] = {}
        self._sequences: dict[int, int] = {}
        self._without_tokens: set[int] = set()
        self._handle_of_0 = 0  # The stream's submit number n has the handle n more.
        self._frames = ServeFrames()
        self._checks = ServeChecks(address)
        self._rows = ServeRows(self._running, self._prefills, self._checks)
        self._abort_answers: dict[int, asyncio.Future[scheduler_pb2.AbortOutcome]] = {}

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @is_draining.setter
    def is_draining(self, is_draining: bool) -> None:
        self._is_draining = is_draining
        self.on_facts(self)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def last_sequence(self) -> int:
        """Of the latest submit on this stream."""
        return self._sequence

    def replica_load(self) -> ReplicaLoad:
        """The scheduler's latest figures. An output on a data-parallel rank finds no more room than that rank has."""
        load, page_size = self.load, self._page_size
        free_pages = max((rank.free_pages for rank in load.ranks), default=load.free_pages)
        return ReplicaLoad(
            submit_sequence=load.submit_sequence,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_tokens=load.waiting_tokens,
            free_tokens=free_pages * page_size,
            cached_tokens=load.cached_pages * page_size,
            host_load_cost=_share_of(load.host_load_cost),
            store_load_cost=_share_of(load.store_load_cost),
            token_us=load.token_us if 0 < load.token_us < math.inf else 0.0,
        )

    @property
    def is_group_serving(self) -> bool:
        return self.is_connected and self.load.group == scheduler_pb2.GROUP_STATE_SERVING

    @property
    def models(self) -> tuple[str, ...]:
        """Names served, the base model first; empty before the first connection."""
        return () if self.identity is None else (self.identity.name, *self.adapters)

    @property
    def max_total_len(self) -> int:
        """The model's context here, in tokens; 0 before the first connection."""
        return 0 if self.identity is None else self.identity.max_total_len

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV memory of all ranks holds; 0 = the scheduler does not tell, or was never connected."""
        return (self.load.total_pages or self._num_pages) * self._page_size

    @property
    def page_size(self) -> int:
        """Tokens of a KV page; 0 before the first connection."""
        return self._page_size

    @property
    def max_request_len(self) -> int:
        """The most tokens of prompt and output together that context and KV memory of a data-parallel rank hold; kept
        while the scheduler is away, 0 before the first connection."""
        kv_tokens = self.kv_tokens // max(1, len(self.load.ranks))
        # The last token is sampled, never computed: it needs no KV.
        return min(self.max_total_len, kv_tokens + 1) if kv_tokens else self.max_total_len

    def serves(self, model: str, identity: ServedIdentity) -> bool:
        """True if outputs here are what the identity promises, now or once the scheduler is back."""
        return self.identity is not None and model in self.models and is_same_model(self.identity, identity)

    @property
    def takes_submits(self) -> bool:
        """True if new submits can go here."""
        if not self.is_connected or self.is_draining or self.load.is_draining:
            return False
        return self.load.group != scheduler_pb2.GROUP_STATE_STANDBY

    def outputs(self) -> list[Output]:
        """Outputs that are here."""
        return list(self._running.values())

    def is_without_tokens(self, output: Output) -> bool:
        """True until the first token of the output's attempt here has come: it waits or is prefilled."""
        return output.scheduler_handle in self._without_tokens

    def submit(self, output: Output) -> None:
        """Takes an output, as a new attempt."""
        since_s = output.state_since
        output.scheduler = self
        output.max_ids = output.request.max_tokens
        output.move_to(OutputState.RUNNING)
        self._events.on_submitted(output, self, since_s)
        self._submit(output)

    def submit_again(self, output: Output) -> int:
        """A new attempt in the place of the one here: it goes on behind ids that came from elsewhere. Returns the
        sequence of the submit that it replaces."""
        handle = output.scheduler_handle
        del self._running[handle]
        self._without_tokens.discard(handle)
        sequence = self._sequences.pop(handle)
        self._submit(output)
        return sequence

    def _submit(self, output: Output) -> None:
        self._last_handle += 1
        self._sequence += 1
        output.attempt_no += 1
        output.scheduler_handle = self._last_handle
        output.num_submitted = len(output.ids)
        self._running[self._last_handle] = output
        self._sequences[self._last_handle] = self._sequence
        self._without_tokens.add(self._last_handle)
        self._frames.submit(output, self._last_handle, self._sequence)
        self.wake()

    def reserve(self, reservation: scheduler_pb2.Reservation) -> None:
        """Asks for a place for KV, renews one, or gives one up; a new one is answered by on_reservation()."""
        self._frames.add_reservation(reservation)
        self.wake()

    def prefill(self, output: Output, transfer_id: str, target: scheduler_pb2.TransferTarget) -> None:
        """Computes the prompt of an output that runs elsewhere; on_prefill_over() follows. target: with its id alone
        where send_target() will bring the rest."""
        self._last_handle += 1
        self._sequence += 1
        self._prefills[self._last_handle] = RemotePrompt(
            transfer_id=transfer_id, output=output, attempt=output.attempt, num_before=len(output.ids)
        )
        self._frames.add_prefill(prefill_of(output, self._last_handle, self._sequence, target))
        self.wake()

    def send_target(self, target: scheduler_pb2.TransferTarget) -> None:
        """Tells where the KV of a prompt goes that is there already."""
        self._frames.add_target(target)
        self.wake()

    @property
    def num_prefills(self) -> int:
        """Prompts that are computed there for outputs elsewhere."""
        return len(self._prefills)

    def stop(self, output: Output, num_output: int) -> None:
        """A stop string ended output after num_output tokens; its Finished still comes."""
        self._frames.stop(scheduler_pb2.FinishedByStop(handle=output.scheduler_handle, num_output=num_output))
        self.wake()

    def release(self, output: Output) -> None:
        """Nothing that comes for output matters any more. Tells nobody."""
        self._running.pop(output.scheduler_handle, None)
        self._without_tokens.discard(output.scheduler_handle)
        sequence = self._sequences.pop(output.scheduler_handle, None)
        output.scheduler = None
        if sequence is not None:
            self._events.on_left(self, sequence, output)

    def cancel(self, request: Request, *, below_attempt: int, index: int | None = None, is_own: bool = True) -> None:
        """Ends attempts of a request below that one, without an answer. is_own: those that this router submitted."""
        tenant, request_id = request.key
        self._frames.add_abort(
            scheduler_pb2.Abort(
                request_id=request_id, tenant=tenant, index=index, below_attempt=below_attempt, is_own=is_own
            )
        )
        self.wake()

    async def cancel_all(self, request_id: str, tenant: str | None) -> scheduler_pb2.AbortOutcome:
        """Ends every attempt of a request, of any tenant for None; what the scheduler found.

        Raises NO_REPLICA if the link is lost.
        """
        if len(request_id.encode()) > _MAX_REQUEST_ID_BYTES:
            return scheduler_pb2.ABORT_OUTCOME_UNKNOWN
        self._last_abort_id += 1
        abort_id = self._last_abort_id
        answer: asyncio.Future[scheduler_pb2.AbortOutcome] = asyncio.get_running_loop().create_future()
        self._abort_answers[abort_id] = answer
        self._frames.add_abort(scheduler_pb2.Abort(abort_id=abort_id, request_id=request_id, tenant=tenant))
        self.wake()
        try:
            return await answer
        finally:
            self._abort_answers.pop(abort_id, None)

    def _on_state(self) -> None:
        self.on_facts(self)

    def _hello_frame(self) -> _Request:
        return _Request(hello=self._hello)

    def _welcome(self, frame: _Response) -> str:
        version = check_hello(frame.hello.hello, self._hello)
        self._checks.hello(frame.hello)
        if self.instance_id not in ("", frame.hello.hello.instance_id):
            # A drain is of a process: the one that was started since is there to be used.
            self.is_draining = self.is_left = False
        self.identity, self.adapters = identity_from_proto(frame.hello.hello.model), tuple(frame.hello.adapters)
        self._page_size, self._num_pages = frame.hello.page_size, frame.hello.num_pages
        self.role, self.kv_heads = frame.hello.role, frame.hello.kv_heads
        self.takes_kv_targets = frame.hello.takes_kv_targets
        self.load = scheduler_pb2.Load()
        self._sequence, self._handle_of_0 = 0, self._last_handle
        self._frames.can_share = version >= SHARING_VERSION
        if frame.HasField("load"):
            self.load = frame.load
        self._has_served |= self.load.group == scheduler_pb2.GROUP_STATE_SERVING
        return frame.hello.hello.instance_id

    def _on_connected(self) -> None:
        self.group_since = self._clock()
        if self.num_connects > 1:
            self.health.came_back()
            self.on_facts(self)
        self._events.on_load(self)
        self._events.on_scheduler_changed(self)

    def _on_lost(self) -> None:
        outputs = self.outputs()
        if outputs:
            self._note_failure()
        for output in outputs:
            self.release(output)
            number = output.scheduler_handle - self._handle_of_0
            output.count_wait(was_accepted=number <= self.load.submit_sequence)
        self._frames.clear()
        prefills = list(self._prefills.values())
        self._prefills.clear()
        for prompt in prefills:
            self._events.on_prefill_over(prompt, is_handed_over=False)
        for answer in self._abort_answers.values():
            if not answer.done():
                answer.set_exception(MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, "the scheduler was lost"))
        self._events.on_scheduler_lost(outputs)

    def _note_failure(self) -> None:
        if self.health.failed():
            log.warning("scheduler_passed_over", address=self.address)
        self.on_facts(self)

    def _is_answer_owed(self) -> bool:
        return True  # A Load comes every second.

    def next_frame(self) -> _Request | None:
        frame, refused = self._frames.next(self._running)
        for output, error in refused:
            self.release(output)
            self._events.on_rejected(output, self, error)
        if not self._frames.is_empty:
            self.wake()
        is_empty = not (frame.submits or frame.stops or frame.aborts or frame.reservations or frame.kv_targets)
        return None if is_empty else frame

    def _on_frame(self, frame: _Response) -> None:
        if frame.HasField("tokens"):
            self._take_tokens(frame.tokens)
        for prompt in frame.prompt_logprobs:
            if (output := self._rows.take_prompt_logprobs(prompt)) is not None:
                self._events.on_prompt_logprobs(output)
        for vector in frame.vectors:
            if (output := self._rows.output_of_vector(vector)) is not None:
                self._events.on_vector(output, vector.values)
        for finished in frame.finished:
            self._take_finished(finished)
        for result in frame.reservation_results:
            self._events.on_reservation(self, result)
        for rejected in frame.rejected:
            self._take_rejected(rejected)
        for aborted in frame.abort_results:
            answer = self._abort_answers.get(aborted.abort_id)
            if answer is not None and not answer.done():
                answer.set_result(aborted.outcome)
        if frame.HasField("load"):
            has_changed = _state_of(self.load) != _state_of(frame.load)
            self._note_group(frame.load.group)
            self.load = frame.load
            if frame.load.HasField("role"):
                self.role = frame.load.role
            self.on_facts(self)
            self._events.on_load(self)
            if has_changed:
                self._events.on_scheduler_changed(self)

    def _note_group(self, group: scheduler_pb2.GroupState) -> None:
        """The worker group's next state, before it is taken: a loss counts as the scheduler's own, and so does what
        follows it."""
        serving = scheduler_pb2.GROUP_STATE_SERVING
        if (self.load.group == serving) != (group == serving):
            self.group_since = self._clock()
        if self.load.group == serving and group == scheduler_pb2.GROUP_STATE_CONNECTING and self._running:
            self._note_failure()
        if self._has_served and self.load.group != serving and group == serving:
            # Its workers may be new: their KV is empty, and nothing has been compiled.
            self.health.came_back()
        self._has_served |= group == serving

    def _take_tokens(self, batch: scheduler_pb2.TokenBatch) -> None:
        assert self.identity is not None
        changed, num_tokens = self._rows.take_tokens(batch, self.identity.vocab_size)
        if self._without_tokens:
            self._note_first_tokens(changed)
        if changed:
            self._events.on_tokens(changed, num_tokens)
        for prompt in self._rows.take_changed_prompts():
            self._events.on_prompt_token(prompt)

    def _note_first_tokens(self, outputs: list[Output]) -> None:
        for output in outputs:
            handle = output.scheduler_handle
            if handle in self._without_tokens:
                self._without_tokens.discard(handle)
                self._events.on_first_token(self, self._sequences[handle])

    def _prefill_over(self, handle: int, *, is_handed_over: bool, cached_tokens: int = 0) -> None:
        prompt = self._prefills.pop(handle, None)
        if prompt is not None:
            prompt.cached_tokens = min(cached_tokens, prompt.output.request.num_prompt)
            self._events.on_prefill_over(prompt, is_handed_over=is_handed_over)

    def _take_rejected(self, rejected: scheduler_pb2.Rejected) -> None:
        prefill, output = self._prefills.get(rejected.handle), self._running.get(rejected.handle)
        of = prefill.output if prefill is not None else output
        error = MeshError.from_proto(rejected.error)
        grammar = of.request.grammar if of is not None else None
        if grammar is not None and error.reason == ErrorReason.ERROR_REASON_UNKNOWN_BLOB:
            self._frames.forget_blob(grammar.hash)
        self._prefill_over(rejected.handle, is_handed_over=False)
        if output is not None and output.attempt == rejected.attempt:
            self.release(output)
            self._events.on_rejected(output, self, error)

    def _take_finished(self, finished: scheduler_pb2.Finished) -> None:
        is_handed_over = finished.reason == common_pb2.FINISH_REASON_HANDED_OVER
        cached_tokens = finished.usage.cached_tokens
        self._prefill_over(finished.handle, is_handed_over=is_handed_over, cached_tokens=cached_tokens)
        output = self._running.get(finished.handle)
        if output is None or output.attempt != finished.attempt:
            return
        self._checks.reason(finished)
        reason = FinishReason(finished.reason)
        is_regular = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if is_regular and output.state is OutputState.RUNNING and finished.num_output != len(output.ids):
            raise self._checks.broken(f"finished after {finished.num_output} tokens, {len(output.ids)} came")
        self.release(output)
        output.count_wait(was_accepted=True)
        error = None
        if finished.HasField("error") or not is_regular:  # A client has to be told something.
            error = MeshError.from_proto(finished.error)
            if error.reason in _OWN_FAULTS:
                self._note_failure()
        ending = Ending(
            reason=reason,
            num_output=min(finished.num_output, len(output.ids)) if is_regular else len(output.ids),
            stop_id=finished.stop_id if finished.HasField("stop_id") else None,
            cached_tokens=min(finished.usage.cached_tokens, output.request.num_prompt),
            accepted_predictions=finished.usage.accepted_prediction_tokens,
            rejected_predictions=finished.usage.rejected_prediction_tokens,
            error=error,
        )
        self._events.on_finished(output, self, ending)


def _share_of(cost: float) -> float:
    """A peer may send any number, or none."""
    return cost if 0.0 <= cost <= 1.0 else 1.0


def _state_of(load: scheduler_pb2.Load) -> tuple[int, bool, bool]:
    return load.group, load.is_draining, load.is_leaving
