"""Client messages made into journalled requests: options checked, prompt encoded, model found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from radixmesh.daemons.router.messages import identity_from_proto
from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.peers.schedulers.served_models import ServedModel
from radixmesh.daemons.router.peers.tokenizer_pool import TokenizerPool
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.intake.grammars import Grammars, settle_thought
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.intake.resolver import check_names, check_request, end_ids_of, is_pooled, resolve
from radixmesh.daemons.router.requests.intake.resume import check_resume, rebuild
from radixmesh.daemons.router.requests.journal import Journal, Output, OutputState, Request, journal_size
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.router.requests.request_times import RequestTimes
from radixmesh.daemons.router.served_identity import ServedIdentity, is_same_model
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.caller import current_caller
from radixmesh.daemons.runtime.telemetry.tracing import current_context, set_context
from radixmesh.router.v1 import router_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2

_T = TypeVar("_T")

# A model that nobody has announced may be served by a scheduler that is still to be reached.
_UNKNOWN_MODEL_WAIT_S = 5.0
# Of a prompt: more than a thought's tag and the blanks behind it.
_TAIL_CHARS = 256
# A year: no request lives longer, and what is left of it fits every clock and field on its way.
_MAX_DEADLINE_MS = 365 * 24 * 3600 * 1000


class RequestMaker:
    """Makes requests whole. The journal is asked for room, and given nothing yet."""

    def __init__(
        self,
        journal: Journal,
        schedulers: SchedulerPool,
        tokenizers: TokenizerPool,
        times: RequestTimes,
        *,
        scheduler_wait_s: float,
        refuses_cut: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._journal = journal
        self._schedulers = schedulers
        self._tokenizers = tokenizers
        self._grammars = Grammars(tokenizers.compile_grammar)
        self._times = times
        self._scheduler_wait_s = scheduler_wait_s
        self._refuses_cut = refuses_cut

    @property
    def num_tokenizers(self) -> int:
        return self._tokenizers.num_replicas

    async def close(self) -> None:
        await self._tokenizers.close()

    async def encode(
        self, model: str, items: Iterable[tokenizer_pb2.EncodeItem]
    ) -> Sequence[tokenizer_pb2.EncodedItem]:
        """Encodes texts and chats for a model, "" = any. Raises MeshError."""
        check_names(model=model)
        request = tokenizer_pb2.EncodeRequest(items=items, tenant=_tenant())
        if model or self._schedulers.models():
            found = await self._schedulers.find_model(model, _UNKNOWN_MODEL_WAIT_S)
            encoded = await self._tokenizers.encode(request)
            _check_fingerprint(encoded.tokenizer_fingerprint, found.identity)
            return encoded.items
        return (await self._tokenizers.encode(request)).items

    async def decode(self, request: tokenizer_pb2.DecodeRequest) -> Sequence[str]:
        """Texts of whole id arrays. Raises MeshError."""
        request.tenant = _tenant()
        return (await self._tokenizers.decode(request)).texts

    async def vocabulary(self) -> tokenizer_pb2.GetVocabularyResponse:
        """The vocabulary of some tokenizer. Raises MeshError."""
        return await self._tokenizers.vocabulary()

    async def model_identity(self, name: str) -> ServedIdentity:
        """The model of that name, "" = the first, waited for as fresh() does. Raises UNKNOWN_MODEL, NO_REPLICA."""
        check_names(model=name)
        return (await self._schedulers.find_model(name, self._model_wait_s())).identity

    async def models(self) -> list[ServedModel]:
        """Every model that is served: a router that has just come up waits a moment for its first scheduler."""
        return await self._schedulers.list_models(_UNKNOWN_MODEL_WAIT_S)

    async def fresh(self, message: router_pb2.GenerateRequest, request_id: str, delivery: Delivery) -> Request:
        """A request that begins. Raises MeshError."""
        deadline, ttft_deadline = self._deadlines_of(message)
        until = _earlier(deadline, ttft_deadline)
        draft = check_request(message)
        self._require_time(until)
        self._journal.require_room(journal_size(message.ByteSize(), draft.n))
        if message.model or message.WhichOneof("input") == "prompt_ids":
            # A wrong name is told before a tokenizer works for nothing.
            await self._in_time(self._schedulers.find_model(message.model, self._model_wait_s()), until)
        prompt_ids = message.prompt_ids
        fingerprint = ""
        if message.WhichOneof("input") != "prompt_ids":
            prompt_ids, fingerprint, tail = await self._in_time(self._encode(message), until)
            if message.grammar.HasField("thought"):
                settle_thought(message.grammar, tail)
        model = await self._in_time(self._schedulers.find_model(message.model, self._model_wait_s()), until)
        _check_fingerprint(fingerprint, model.identity)
        resolved = resolve(
            message,
            draft,
            request_id=request_id,
            prompt_ids=prompt_ids,
            identity=model.identity,
            default_request_len=model.default_request_len(len(prompt_ids) // 4),
            refuses_cut=self._refuses_cut,
        )
        request = self._request_of(resolved, delivery, message.resume.resumption, deadline)
        request.ttft_deadline = ttft_deadline
        await self._compile_grammar(request)
        for index in range(draft.n):
            output = Output(request=request, index=index)
            if draft.sampling.num_top_logprobs is not None:
                output.logprobs = LogprobTrack(0)
            request.outputs.append(output)
        if draft.sampling.prompt_logprobs:
            request.prompt_logprobs = _prompt_track(request)
        return request

    async def resumed(self, message: router_pb2.GenerateRequest, request_id: str, delivery: Delivery) -> Request:
        """A request whose stream broke, as its client keeps it. Raises MeshError."""
        deadline, ttft_deadline = self._deadlines_of(message)
        check_resume(message)
        self._require_time(deadline)
        self._journal.require_room(journal_size(message.ByteSize(), len(message.resume.outputs)))
        claimed = message.resume.resolved
        theirs = identity_from_proto(claimed.model_identity)
        found = self._schedulers.find_model(claimed.model, self._scheduler_wait_s, theirs)
        model = await self._in_time(found, deadline)
        if not is_same_model(model.identity, theirs):
            raise _other_model(model.identity, theirs)
        _require_size(message.resume.resolved, model)
        resolved, progress = rebuild(message, model.identity)
        request = self._request_of(resolved, delivery, message.resume.resumption, deadline)
        request.ttft_deadline = ttft_deadline
        await self._compile_grammar(request)
        for index, known in enumerate(progress):
            output = Output(request=request, index=index, ids=known.ids)
            output.num_seen = output.num_delivered = output.num_charged = len(known.ids)
            output.text_bytes = output.text_offset = known.text_bytes
            if resolved.sampling.num_top_logprobs is not None:
                output.logprobs = LogprobTrack(len(known.ids))
            if known.is_finished:
                output.state, output.is_finish_delivered = OutputState.FINISHED, True
            request.outputs.append(output)
        # Prompt logprobs are delivered before anything of output 0 is.
        if resolved.sampling.prompt_logprobs and not (progress[0].ids or progress[0].is_finished):
            request.prompt_logprobs = _prompt_track(request)
        return request

    async def _encode(self, message: router_pb2.GenerateRequest) -> tuple[bytes, str, str]:
        """Prompt ids of a text or chat, the fingerprint of the vocabulary they belong to, and the prompt's end."""
        if message.WhichOneof("input") == "chat":
            item = tokenizer_pb2.EncodeItem(chat=message.chat)
        else:
            item = tokenizer_pb2.EncodeItem(text=message.text)
        request = tokenizer_pb2.EncodeRequest(
            items=[item], max_tokens=self._max_prompt_tokens(message.model), tenant=message.tenant
        )
        encoded = await self._encode_request(request)
        if len(encoded.items) != 1:
            raise MeshError(ErrorReason.ERROR_REASON_INTERNAL, "the tokenizer answered another number of items")
        if encoded.items[0].HasField("error"):
            raise MeshError.from_proto(encoded.items[0].error)
        tail = (encoded.items[0].rendered or message.text)[-_TAIL_CHARS:]
        return encoded.items[0].ids, encoded.tokenizer_fingerprint, tail

    async def _encode_request(self, request: tokenizer_pb2.EncodeRequest) -> tokenizer_pb2.EncodeResponse:
        since_s, parent = self._clock(), current_context()
        span = self._times.tracer.begin("router.encode", parent, {})
        set_context(span.context)
        error = "given up"
        try:
            encoded = await self._tokenizers.encode(request)
            error = ""
        except MeshError as failure:
            error = str(failure)
            raise
        finally:
            span.end({}, error=error)
            set_context(parent)
        self._times.encoded(since_s)
        return encoded

    async def _compile_grammar(self, request: Request) -> None:
        if request.resolved.grammar is not None:
            compiled = self._grammars.compiled(request.resolved.grammar, request.resolved.tenant)
            try:
                request.grammar = await self._in_time(compiled, request.deadline)
            except MeshError as error:
                raise _about_grammar(error) from None

    def _max_prompt_tokens(self, name: str) -> int:
        """The longest prompt that any scheduler of that model takes; 0 = not known."""
        own = self._schedulers.own_name(name)
        identities = [link.identity for link in self._schedulers.links if own == "" or own in link.models]
        lengths = [identity.max_total_len if identity is not None else 0 for identity in identities]
        # One token of output at least has to follow.
        return max(lengths) - 1 if lengths and all(lengths) else 0

    async def _in_time(self, work: Awaitable[_T], deadline: float | None) -> _T:
        """Result of work. Raises DEADLINE_EXCEEDED when the request's time is up first."""
        if deadline is None:
            return await work
        try:
            async with asyncio.timeout(deadline - self._clock()):
                return await work
        except TimeoutError as error:
            raise _too_late() from error

    def _request_of(
        self, resolved: ResolvedRequest, delivery: Delivery, resumption: int, deadline: float | None
    ) -> Request:
        return Request(
            clock=self._clock,
            resolved=resolved,
            resumption=resumption,
            deadline=deadline,
            num_prompt=resolved.num_prompt,
            end_ids=end_ids_of(resolved),
            delivery=delivery,
        )

    def _deadlines_of(self, message: router_pb2.GenerateRequest) -> tuple[float | None, float | None]:
        """Moments by which the request is to end, and to have its first tokens."""
        now = self._clock()
        whole = now + min(message.deadline_ms, _MAX_DEADLINE_MS) / 1000 if message.HasField("deadline_ms") else None
        if not message.HasField("ttft_deadline_ms"):
            return whole, None
        return whole, now + min(message.ttft_deadline_ms, _MAX_DEADLINE_MS) / 1000

    def _require_time(self, deadline: float | None) -> None:
        # The steps below may never wait, and then would not notice that the deadline has passed.
        if deadline is not None and deadline <= self._clock():
            raise _too_late()

    def _model_wait_s(self) -> float:
        # Without a name any scheduler will do, and one that restarts is worth waiting for.
        return _UNKNOWN_MODEL_WAIT_S if self._schedulers.models() else self._scheduler_wait_s


def _earlier(deadline: float | None, other: float | None) -> float | None:
    return min((moment for moment in (deadline, other) if moment is not None), default=None)


def _tenant() -> str:
    return current_caller().tenant or ""


def _too_late() -> MeshError:
    message = "the request's deadline_ms or ttft_deadline_ms passed before it could start: give it more time"
    return MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message)


def _require_size(claimed: router_pb2.Resolved, model: ServedModel) -> None:
    """Raises NO_REPLICA for a resume that is larger than any replica: the one that it fitted may come back."""
    wanted = len(claimed.prompt_ids) // 4 + (1 if is_pooled(claimed.task) else claimed.stop.max_tokens)
    if wanted > model.max_request_len:
        message = f"no replica of {model.name!r} holds {wanted} tokens now, the largest {model.max_request_len}: retry"
        raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})


def _other_model(ours: ServedIdentity, theirs: ServedIdentity) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_MODEL_MISMATCH,
        f"model {ours.name!r} is not the one that the stream began with: send the request anew",
        {
            "ours": ours.model_fingerprint or ours.tokenizer_fingerprint,
            "theirs": theirs.model_fingerprint or theirs.tokenizer_fingerprint,
        },
    )


def _prompt_track(request: Request) -> LogprobTrack:
    """Logprobs of the prompt from the position that was asked for; none are due at its end."""
    return LogprobTrack(min(max(1, request.resolved.sampling.prompt_logprobs_start), request.num_prompt))


def _check_fingerprint(fingerprint: str, identity: ServedIdentity) -> None:
    if fingerprint and identity.tokenizer_fingerprint and fingerprint != identity.tokenizer_fingerprint:
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH,
            f"tokenizer and model {identity.name!r} have different vocabularies: start both on one folder",
            {"ours": fingerprint, "theirs": identity.tokenizer_fingerprint},
        )


def _about_grammar(error: MeshError) -> MeshError:
    """Tokenizers name no field: the source is all that they are sent."""
    if error.reason is not ErrorReason.ERROR_REASON_INVALID_GRAMMAR or error.metadata.get("field"):
        return error
    return MeshError(error.reason, error.message, {**error.metadata, "field": "grammar"})
