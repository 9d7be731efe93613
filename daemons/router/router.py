"""The router: requests in, streams of deltas out, whatever dies meanwhile. Knows no transport.

HTTP and gRPC edges call open(), and write what the stream gives as their clients take it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable
from typing import TypeVar

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.delivery import Delivery
from radixmesh.daemons.router.detokenizer_pool import DetokenizerPool
from radixmesh.daemons.router.journal import Journal, Output, OutputState, Request, journal_size
from radixmesh.daemons.router.logprob_track import LogprobTrack
from radixmesh.daemons.router.output_flow import OutputFlow
from radixmesh.daemons.router.request_stream import RequestStream
from radixmesh.daemons.router.resolver import check_request, check_resume, end_ids_of, resolve
from radixmesh.daemons.router.scheduler_link import is_same_model
from radixmesh.daemons.router.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.tokenizer_pool import TokenizerPool
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.logs import get_logger
from radixmesh.daemons.runtime.metrics import Metrics
from radixmesh.daemons.runtime.progress import Progress
from radixmesh.router.v1 import router_pb2
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

log = get_logger(__name__)

_T = TypeVar("_T")

_TICK_S = 0.1
# A model that nobody has announced may be served by a scheduler that is still to be reached.
_UNKNOWN_MODEL_WAIT_S = 5.0
_ABORT_OUTCOMES = {
    scheduler_pb2.ABORT_OUTCOME_FOUND: router_pb2.ABORT_OUTCOME_FOUND,
    scheduler_pb2.ABORT_OUTCOME_FINISHED: router_pb2.ABORT_OUTCOME_FINISHED,
}


class Router:
    """Composes journal, pools and flow. start() once, then open() streams; tick() keeps time."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        journal: Journal,
        flow: OutputFlow,
        tokenizers: TokenizerPool,
        progress: Progress,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._flow = flow
        self._tokenizers = tokenizers
        self._progress = progress
        self._metrics = metrics
        self._streams: dict[str, RequestStream] = {}
        self._num_messages = 0

    @property
    def schedulers(self) -> SchedulerPool:
        return self._flow.schedulers

    @property
    def detokenizers(self) -> DetokenizerPool:
        return self._flow.detokenizers

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def journal(self) -> Journal:
        return self._journal

    def connect(self) -> None:
        """Starts to connect to every peer of the settings."""
        self.detokenizers.start()
        for address in self._settings.schedulers:
            self.schedulers.add(address)

    async def close(self) -> None:
        """Ends all connections."""
        await self.schedulers.close()
        await self.detokenizers.close()
        await self._tokenizers.close()

    async def keep_time(self) -> None:
        """Runs for ever: deadlines, waits, stalls, health."""
        while True:
            await asyncio.sleep(_TICK_S)
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Everything that only time brings about."""
        self._flow.tick(now)
        self.schedulers.tick(now)
        self.detokenizers.tick(now)
        num_late = num_messages = 0
        for stream in tuple(self._streams.values()):
            delivery = stream.delivery
            num_messages += delivery.num_messages
            delivery.num_messages = 0
            if delivery.writing_since is not None:
                self._check_stall(stream, now - delivery.writing_since)
            elif delivery.news_since is not None and now - delivery.news_since > _TICK_S:
                num_late += 1
        if num_messages:
            self._progress.completed(num_messages)
        self._progress.work_pending(num_late)
        self._metrics.journal_bytes.set(self._journal.num_bytes)
        self._metrics.requests_queued.set(self.schedulers.num_waiting)
        self._metrics.requests_running.set(len(self._journal))

    def open(self, message: router_pb2.GenerateRequest) -> RequestStream:
        """A stream for one request; nothing runs before its first take(). Raises MeshError."""
        self._progress.require_serving()
        request_id = message.resume.resolved.request_id or message.request_id or uuid.uuid4().hex
        stream = RequestStream(self, message, request_id, Delivery(self._journal))
        live = self._streams.get(request_id)
        if live is not None:
            self._supersede(live, stream)
        self._streams[request_id] = stream
        return stream

    async def abort(self, request_id: str) -> router_pb2.AbortOutcome:
        """Ends a request here and on every scheduler, whichever router runs it."""
        if not request_id:
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "say which request", {"field": "request_id"})
        stream = self._streams.get(request_id)
        is_here = stream is not None and (stream.request is None or self._has_unfinished(stream.request))
        if stream is not None:
            error = MeshError(ErrorReason.ERROR_REASON_ABORTED, "the request was aborted", {"request_id": request_id})
            if stream.request is None:
                stream.fail(error)
            else:
                self._flow.abort(stream.request, error)
        outcome = await self.schedulers.abort_everywhere(request_id)
        if is_here:
            return router_pb2.ABORT_OUTCOME_FOUND
        return _ABORT_OUTCOMES.get(outcome, router_pb2.ABORT_OUTCOME_UNKNOWN)

    async def tokenize(self, request: router_pb2.TokenizeRequest) -> router_pb2.TokenizeResponse:
        """Encodes texts and chats as open() would."""
        if request.model:
            await self.schedulers.find_model(request.model, _UNKNOWN_MODEL_WAIT_S)
        encoded = await self._tokenizers.encode(tokenizer_pb2.EncodeRequest(items=request.items))
        return router_pb2.TokenizeResponse(items=encoded.items)

    # For RequestStream.

    async def start(self, stream: RequestStream) -> Request:
        message = stream.message
        if message.HasField("resume"):
            return await self._resumed(stream)
        return await self._fresh(stream)

    def begin(self, stream: RequestStream, request: Request) -> None:
        self._journal.add(request)
        self._metrics.requests_started.inc()
        self._metrics.prompt_tokens.inc(request.num_prompt)
        stream.delivery.begin(request)
        self._flow.begin(request)

    def leave(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        if stream.request is not None:
            self._metrics.request_seconds.observe(time.monotonic() - stream.request.accepted)
            self._flow.discard(stream.request)

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
        check_resume(stream.message)  # A broken resume must not end the stream that lives.
        live.fail(MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "the client resumed this request on another stream"))
        live.close()

    async def _fresh(self, stream: RequestStream) -> Request:
        message = stream.message
        deadline = _deadline_of(message)
        draft = check_request(message)
        self._journal.require_room(journal_size(message.ByteSize(), draft.n))
        if message.model or message.WhichOneof("input") == "prompt_ids":
            # A wrong name is told before a tokenizer works for nothing.
            await self._in_time(self.schedulers.find_model(message.model, self._model_wait_s(message)), deadline)
        prompt_ids = message.prompt_ids
        fingerprint = ""
        if message.WhichOneof("input") != "prompt_ids":
            prompt_ids, fingerprint = await self._in_time(self._encode(message), deadline)
        model = await self._in_time(self.schedulers.find_model(message.model, self._model_wait_s(message)), deadline)
        _check_fingerprint(fingerprint, model.identity)
        resolved = resolve(message, draft, request_id=stream.request_id, prompt_ids=prompt_ids, identity=model.identity)
        request = _request_of(resolved, stream, deadline)
        for index in range(draft.n):
            output = Output(request=request, index=index)
            if draft.sampling.num_top_logprobs is not None:
                output.logprobs = LogprobTrack(0)
            request.outputs.append(output)
        if draft.sampling.prompt_logprobs:
            request.prompt_logprobs = LogprobTrack(1)
        return request

    async def _resumed(self, stream: RequestStream) -> Request:
        message = stream.message
        deadline = _deadline_of(message)
        progress = check_resume(message)
        resolved = message.resume.resolved
        model = await self._in_time(
            self.schedulers.find_model(resolved.model, self._settings.scheduler_wait_s), deadline
        )
        if not is_same_model(model.identity, resolved.model_identity):
            raise MeshError(
                ErrorReason.ERROR_REASON_MODEL_MISMATCH,
                f"model {resolved.model!r} is not the one that the stream began with: send the request anew",
                {
                    "ours": model.identity.model_fingerprint or model.identity.tokenizer_fingerprint,
                    "theirs": resolved.model_identity.model_fingerprint
                    or resolved.model_identity.tokenizer_fingerprint,
                },
            )
        request = _request_of(resolved, stream, deadline)
        for index, known in enumerate(progress):
            output = Output(request=request, index=index, ids=known.ids)
            output.num_seen = output.num_delivered = output.num_charged = len(known.ids)
            output.text_bytes = output.text_offset = known.text_bytes
            if resolved.sampling.HasField("num_top_logprobs"):
                output.logprobs = LogprobTrack(len(known.ids))
            if known.is_finished:
                output.state, output.is_finish_delivered = OutputState.FINISHED, True
            request.outputs.append(output)
        # Prompt logprobs are delivered before anything of output 0 is.
        if resolved.sampling.prompt_logprobs and not (progress[0].ids or progress[0].is_finished):
            request.prompt_logprobs = LogprobTrack(1)
        return request

    async def _encode(self, message: router_pb2.GenerateRequest) -> tuple[bytes, str]:
        """Prompt ids of a text or chat, and the fingerprint of the vocabulary they belong to."""
        if message.WhichOneof("input") == "chat":
            item = tokenizer_pb2.EncodeItem(chat=message.chat)
        else:
            item = tokenizer_pb2.EncodeItem(text=message.text)
        encoded = await self._tokenizers.encode(tokenizer_pb2.EncodeRequest(items=[item]))
        if len(encoded.items) != 1:
            raise MeshError(ErrorReason.ERROR_REASON_INTERNAL, "the tokenizer answered another number of items")
        if encoded.items[0].HasField("error"):
            raise MeshError.from_proto(encoded.items[0].error)
        return encoded.items[0].ids, encoded.tokenizer_fingerprint

    async def _in_time(self, work: Awaitable[_T], deadline: float | None) -> _T:
        """What work gives. Raises DEADLINE_EXCEEDED when the request's time is up first."""
        if deadline is None:
            return await work
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await work
        except TimeoutError as error:
            message = "the request's deadline_ms passed before it could start"
            raise MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message) from error

    def _model_wait_s(self, message: router_pb2.GenerateRequest) -> float:
        # Without a name any scheduler will do, and one that restarts is worth waiting for.
        return _UNKNOWN_MODEL_WAIT_S if self.schedulers.models() else self._settings.scheduler_wait_s

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

    def _has_unfinished(self, request: Request) -> bool:
        return any(output.is_open for output in request.outputs)


def _request_of(resolved: router_pb2.Resolved, stream: RequestStream, deadline: float | None) -> Request:
    return Request(
        resolved=resolved,
        resumption=stream.resumption,
        deadline=deadline,
        num_prompt=len(resolved.prompt_ids) // 4,
        end_ids=end_ids_of(resolved),
        delivery=stream.delivery,
    )


def _deadline_of(message: router_pb2.GenerateRequest) -> float | None:
    return time.monotonic() + message.deadline_ms / 1000 if message.HasField("deadline_ms") else None


def _check_fingerprint(fingerprint: str, identity: common_pb2.ModelIdentity) -> None:
    if fingerprint and identity.tokenizer_fingerprint and fingerprint != identity.tokenizer_fingerprint:
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH,
            f"tokenizer and model {identity.name!r} have different vocabularies: start both on one folder",
            {"ours": fingerprint, "theirs": identity.tokenizer_fingerprint},
        )
