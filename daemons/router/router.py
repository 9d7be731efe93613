"""The router: requests in, streams of deltas out, whatever dies meanwhile. Knows no transport.

HTTP and gRPC servers call open(), and write what the stream gives as their clients take it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from google.protobuf.message import Message

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.discovery.discovery import Discovery
from radixmesh.daemons.router.discovery.retirement import Retirement
from radixmesh.daemons.router.peers.detokenizer_pool import DetokenizerPool
from radixmesh.daemons.router.peers.local_text import LOAD_AFTER_S, LocalText
from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.peers.schedulers.served_models import ServedModel
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.intake.request_maker import RequestMaker
from radixmesh.daemons.router.requests.intake.resolver import check_names
from radixmesh.daemons.router.requests.intake.resume import check_resume, rebuild
from radixmesh.daemons.router.requests.intake.sessions import bind_session
from radixmesh.daemons.router.requests.intake.tenancy import bind_priority, bind_tenant
from radixmesh.daemons.router.requests.journal import Journal, Request
from radixmesh.daemons.router.requests.output_flow import OutputFlow
from radixmesh.daemons.router.requests.request_stream import RequestStream, StreamTable
from radixmesh.daemons.router.requests.request_times import RequestTimes
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.request_ids import check_request_id
from radixmesh.daemons.runtime.rpc.caller import current_caller
from radixmesh.daemons.runtime.rpc.health.progress import Progress, State
from radixmesh.daemons.runtime.rpc.name_watch import NameWatch
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import current_context, set_context
from radixmesh.router.v1 import router_pb2
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

_TICK_S = 0.1
# For a client to read an answer that is done, while this router has no room for more.
_READ_S = 1.0
# Bytes of unknown fields that clients of a newer contract may send.
_MAX_UNKNOWN_BYTES = 64 << 10
_ABORT_OUTCOMES = {
    scheduler_pb2.ABORT_OUTCOME_FOUND: router_pb2.ABORT_OUTCOME_FOUND,
    scheduler_pb2.ABORT_OUTCOME_FINISHED: router_pb2.ABORT_OUTCOME_FINISHED,
}


class Router:
    """Requests of all clients. connect() once, then open() streams; keep_time() runs beside them."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        journal: Journal,
        flow: OutputFlow,
        maker: RequestMaker,
        peer_watchers: Sequence[NameWatch],
        members: Retirement,
        discovery: Discovery,
        progress: Progress,
        metrics: Metrics,
        times: RequestTimes | None = None,
        text: LocalText | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._text = text
        self._clock = clock
        self._journal = journal
        self._flow = flow
        self._maker = maker
        self._peer_watchers = tuple(peer_watchers)
        self.members = members
        self.discovery = discovery
        self._progress = progress
        self._metrics = metrics
        self._times = times or RequestTimes(metrics)
        self._pacer = WakeupPacer()
        self._streams = StreamTable()

    @property
    def schedulers(self) -> SchedulerPool:
        return self._flow.schedulers

    @property
    def detokenizers(self) -> DetokenizerPool:
        return self._flow.detokenizers

    @property
    def num_tokenizers(self) -> int:
        return self._maker.num_tokenizers

    @property
    def has_text(self) -> bool:
        """The served model's tokenizer is in this process."""
        return self._text is not None and self._text.vocabulary is not None

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def journal(self) -> Journal:
        return self._journal

    def connect(self) -> None:
        """Starts to connect to every peer of the settings but those that are names: see follow_names()."""
        for watcher in self._peer_watchers:
            watcher.start()

    async def follow_names(self) -> None:
        """Runs for ever: connects to the replicas that names and sources tell, and lets those go that have left."""
        watchers = (watcher.run() for watcher in self._peer_watchers)
        await asyncio.gather(*watchers, self.discovery.run(), self.members.run())

    async def load_text(self) -> None:
        """Reads the served model's tokenizer, if this router is to have it; until then requests go without."""
        if self._text is not None:
            await asyncio.sleep(LOAD_AFTER_S)
            await self._text.load()

    async def close(self) -> None:
        """Ends all connections."""
        await self.schedulers.close()
        await self.detokenizers.close()
        await self._maker.close()

    async def keep_time(self) -> None:
        """Runs for ever: deadlines, waits, stalls, health."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick(self._clock())

    def tick(self, now: float) -> None:
        """Everything that only time brings about."""
        self._flow.tick(now)
        num_late = num_messages = 0
        for stream in self._streams:
            delivery = stream.delivery
            num_messages += delivery.num_messages
            delivery.num_messages = 0
            if delivery.writing_since is not None:
                self._check_stall(stream, now - delivery.writing_since)
            elif delivery.news_since is not None and now - delivery.news_since > _TICK_S:
                num_late += 1
        if self._journal.num_bytes > self._journal.max_bytes:
            self._make_room(now)
        if num_messages:
            self._progress.completed(num_messages)
        self._progress.work_pending(num_late)
        self._metrics.journal_bytes.set(self._journal.num_bytes)
        if self.detokenizers.local is not None:
            self._metrics.local_outputs.set(self.detokenizers.local.num_entries)
        self._metrics.requests_queued.set(self.schedulers.num_waiting)
        self._metrics.router_queue_bytes.set(self.schedulers.waiting.num_bytes)
        self._metrics.router_credits.set(self.schedulers.placement.num_credits)
        self._metrics.router_imbalance.set(self.schedulers.placement.imbalance)
        self._metrics.requests_running.set(len(self._journal))

    def open(self, message: router_pb2.GenerateRequest, *, while_draining: bool = False) -> RequestStream:
        """A stream for one request; nothing runs before its first take(). Raises MeshError.

        while_draining: of a client who cannot know that this router drains, and has no other connection to ask on.
        """
        if not (while_draining and self._progress.state is State.DRAINING):
            self._progress.require_serving()
        _drop_unknown_fields(message)
        bind_tenant(message, current_caller(), shares_cache=self._settings.share_cache_across_tenants)
        bind_priority(message, current_caller())
        bind_session(message)
        request_id = message.resume.resolved.request_id or message.request_id or uuid.uuid4().hex
        check_request_id(request_id)
        delivery = Delivery(self._journal, self._pacer, self._times, self._clock)
        stream = RequestStream(self, message, request_id, delivery)
        check_names(tenant=stream.tenant)
        self.schedulers.turns.require_any_room()
        live = self._streams.get(request_id, stream.tenant)
        if live is not None:
            self._supersede(live, stream)
        self._streams.add(stream)
        context = message.resume.resolved.trace_context or current_context()
        stream.span = self._times.opened(request_id, context, stream.resumption)
        return stream

    async def cancel(self, request_id: str) -> router_pb2.AbortOutcome:
        """Ends a request here and on every scheduler, whichever router runs it.

        Where the caller's key names a tenant, requests of others are UNKNOWN, as if they had never been.
        """
        if not request_id:
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "say which request", {"field": "request_id"})
        check_request_id(request_id)
        tenant = current_caller().tenant
        is_here = False
        for stream in self._streams.of_id(request_id, tenant):
            is_here |= stream.request is None or self._has_unfinished(stream.request)
            error = MeshError(ErrorReason.ERROR_REASON_ABORTED, "the request was aborted", {"request_id": request_id})
            if stream.request is None:
                stream.fail(error)
            else:
                self._flow.cancel(stream.request, error)
        outcome = await self.schedulers.cancel_everywhere(request_id, tenant)
        if is_here:
            return router_pb2.ABORT_OUTCOME_FOUND
        return _ABORT_OUTCOMES.get(outcome, router_pb2.ABORT_OUTCOME_UNKNOWN)

    async def tokenize(self, request: router_pb2.TokenizeRequest) -> router_pb2.TokenizeResponse:
        """Encodes texts and chats as open() would."""
        _drop_unknown_fields(request)
        return router_pb2.TokenizeResponse(items=await self._maker.encode(request.model, request.items))

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> Sequence[str]:
        """Texts of whole id arrays."""
        return await self._maker.decode(request)

    async def model_identity(self, name: str) -> ServedIdentity:
        """The model of that name, "" = the first, waited for as open() does. Raises MeshError."""
        return await self._maker.model_identity(name)

    async def models(self) -> list[ServedModel]:
        """Every model that is served; waits a moment for the first scheduler, while none has been reached."""
        return await self._maker.models()

    async def vocabulary(self) -> tokenizer_pb2.GetVocabularyResponse:
        """The vocabulary that tokenizers have."""
        return await self._maker.vocabulary()

    # For RequestStream.

    async def start(self, stream: RequestStream) -> Request:
        message = stream.message
        make = self._maker.resumed if message.HasField("resume") else self._maker.fresh
        parent = current_context()
        set_context(stream.span.context)  # For the tokenizer.
        try:
            return await make(message, stream.request_id, stream.delivery)
        finally:
            set_context(parent)

    def begin(self, stream: RequestStream, request: Request) -> None:
        request.span = stream.span
        if not request.resumption and request.trace_context != request.resolved.trace_context:
            request.resolved = replace(request.resolved, trace_context=request.trace_context)
        self.schedulers.turns.require_room(request)
        # The message lives as long as its call does, whatever is made of it.
        self._journal.add(request, num_message_bytes=stream.message.ByteSize())
        self._metrics.requests_started.inc()
        self._metrics.prompt_tokens.inc(request.num_prompt)
        stream.delivery.begin(request)
        self._flow.begin(request)

    def release(self, stream: RequestStream) -> None:
        self._streams.remove(stream)
        self._times.left(stream.request, stream.span, "" if stream.error is None else str(stream.error))
        if stream.request is not None:
            self._metrics.e2e_request_latency_seconds.observe(self._clock() - stream.request.accepted)
            self._flow.release(stream.request)

    def _supersede(self, live: RequestStream, stream: RequestStream) -> None:
        if not stream.resumption:
            message = f"a request {stream.request_id!r} is running: choose another id, or resume it"
            raise MeshError(ErrorReason.ERROR_REASON_DUPLICATE_REQUEST, message, {"request_id": stream.request_id})
        if stream.resumption <= live.resumption:
            message = f"resumption {live.resumption} of this request is running: count further"
            raise MeshError(
                ErrorReason.ERROR_REASON_STALE_ATTEMPT,
                message,
                {"attempt": str(stream.resumption), "current": str(live.resumption)},
            )
        _check_same(live, stream.message)
        live.fail(MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "the client resumed this request on another stream"))
        live.close()

    def _check_stall(self, stream: RequestStream, stalled_s: float) -> None:
        if stalled_s < self._settings.client_stall_s:
            return
        log.warning("client_stalled", request_id=stream.request_id, stalled_s=round(stalled_s, 1))
        error = MeshError(
            ErrorReason.ERROR_REASON_CLIENT_STALLED,
            f"the client read nothing for {stalled_s:.1f} s: read faster, or resume",
            {"stalled_ms": str(int(1000 * stalled_s))},
        )
        stream.fail(error)
        stream.close()

    def _make_room(self, now: float) -> None:
        """Ends streams of answers that are done and not read, the largest first, until the journal is within its bound.

        What requests brought was let in; their output came on top. Running ones end by themselves, but a client that
        reads a byte now and then could keep a whole answer here, and thousands of clients thousands.
        """
        excess = self._journal.num_bytes - self._journal.max_bytes
        unread = [stream for stream in self._streams if _is_done_and_unread(stream, now)]
        for stream in sorted(unread, key=lambda stream: -_num_bytes(stream)):
            if excess <= 0:
                return
            excess -= _num_bytes(stream)
            log.warning("answer_dropped_unread", request_id=stream.request_id, num_bytes=_num_bytes(stream))
            message = "answers that are done and not read fill this router: read faster, or resume"
            stream.fail(MeshError(ErrorReason.ERROR_REASON_CLIENT_STALLED, message))
            stream.close()

    def _has_unfinished(self, request: Request) -> bool:
        return any(output.is_open for output in request.outputs)


def _is_done_and_unread(stream: RequestStream, now: float) -> bool:
    if stream.request is None or stream.delivery.writing_since is None:
        return False
    return all(not output.is_open and now - output.state_since > _READ_S for output in stream.request.outputs)


def _num_bytes(stream: RequestStream) -> int:
    return 0 if stream.request is None else stream.request.num_bytes


def _drop_unknown_fields(message: Message) -> None:
    """Drops fields that this version does not know. Raises INVALID_ARGUMENT for more than _MAX_UNKNOWN_BYTES."""
    num_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    num_bytes -= message.ByteSize()
    if num_bytes > _MAX_UNKNOWN_BYTES:
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
            f"{num_bytes} bytes are of fields that this version does not know: leave them out",
            {"field": "unknown", "max": str(_MAX_UNKNOWN_BYTES)},
        )


def _check_same(live: RequestStream, message: router_pb2.GenerateRequest) -> None:
    """Raises what a resume is refused for that is broken, or of another request than the live one."""
    check_resume(message)
    if live.request is None:
        return
    ours, theirs = live.request.resolved, message.resume.resolved
    if (ours.prompt_ids, ours.seeds, ours.model) != (theirs.prompt_ids, tuple(theirs.seeds), theirs.model):
        text = f"a request {ours.request_id!r} is running that is another one: choose another id"
        raise MeshError(ErrorReason.ERROR_REASON_DUPLICATE_REQUEST, text, {"request_id": ours.request_id})
    rebuild(message, ours.model_identity)
