"""Requests checked and made whole: every default filled in, so that any router can run them again exactly."""

from __future__ import annotations

import secrets
from array import array
from dataclasses import dataclass, replace

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.sampling import (
    Sampling,
    Stop,
    output_seed,
    sampling_from_proto,
    sampling_to_proto,
    stop_from_proto,
    stop_to_proto,
)
from radixmesh.router.v1 import router_pb2

MAX_N = 128
MAX_RESUMPTION = 32_767
MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request whose options are in order; prompt and model are still to be looked at."""

    n: int
    sampling: Sampling
    stop: Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a client has of one output."""

    ids: array[int]
    text_bytes: int
    is_finished: bool


def check_request(request: router_pb2.GenerateRequest) -> Draft:
    """Checks all that can be checked without model and prompt. Raises MeshError naming the field."""
    _check_names(request.request_id, request.cache_salt, request.tenant, request.model)
    if request.WhichOneof("input") is None:
        raise MeshError(
            ErrorReason.ERROR_REASON_MISSING_FIELD, "set text, prompt_ids or chat: what to continue", {"field": "input"}
        )
    if request.WhichOneof("input") == "prompt_ids" and not request.prompt_ids:
        raise _empty_prompt()
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_N:
        raise _out_of_range("n", n, 1, MAX_N)
    sampling, stop = sampling_from_proto(request.sampling), stop_from_proto(request.stop)
    if request.ids_only and stop.stop:
        message = "ids_only makes no text, so stop strings cannot be found: drop one of both"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "stop.stop"})
    _check_offered(request.task, request.HasField("grammar"))
    if is_pooled(request.task):
        _check_pooled(n, sampling, stop)
    return Draft(n=n, sampling=sampling, stop=stop)


def resolve(
    request: router_pb2.GenerateRequest,
    draft: Draft,
    *,
    request_id: str,
    prompt_ids: bytes,
    identity: common_pb2.ModelIdentity,
    kv_tokens: int = 0,
) -> router_pb2.Resolved:
    """The request for one model. A seed is drawn where none is given. Raises MeshError naming the field.

    prompt_ids: little-endian int32 bytes. max_tokens and min_tokens are cut to what the context holds. kv_tokens: what
    the largest replica's KV memory holds, 0 = unknown; max_tokens, where it is not given, is what fits there too.
    """
    room = _check_prompt(prompt_ids, identity)
    _check_options(draft.sampling, draft.stop, identity)
    # The last token is sampled, never computed: it needs no KV.
    default = min(room, max(1, kv_tokens + 1 - len(prompt_ids) // 4)) if kv_tokens else room
    max_tokens = min(draft.stop.max_tokens or default, room)
    stop = replace(draft.stop, max_tokens=max_tokens, min_tokens=min(draft.stop.min_tokens, max_tokens))
    task = request.task or common_pb2.TASK_GENERATE
    seed = draft.sampling.seed
    if seed is None:
        seed = 0 if is_pooled(task) else secrets.randbits(64)
    return router_pb2.Resolved(
        request_id=request_id,
        model=identity.name,
        model_identity=identity,
        prompt_ids=prompt_ids,
        seeds=[output_seed(seed, index) for index in range(draft.n)],
        sampling=sampling_to_proto(replace(draft.sampling, seed=None)),
        stop=stop_to_proto(stop),
        ids_only=request.ids_only or is_pooled(task),
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        task=task,
    )


def check_resume(request: router_pb2.GenerateRequest) -> list[Progress]:
    """Checks the state of a broken stream, whoever kept it. Raises INVALID_RESUME, or what resolve() raises."""
    resume, resolved = request.resume, request.resume.resolved
    if not resume.HasField("resolved") or not resolved.request_id or not resolved.model:
        raise _bad_resume("send the first message of the broken stream, unchanged, as resume.resolved")
    if request.request_id and request.request_id != resolved.request_id:
        raise _bad_resume(f"request_id is {request.request_id!r}, the stream was {resolved.request_id!r}'s")
    _check_names(resolved.request_id, resolved.cache_salt, resolved.tenant, resolved.model)
    if not 1 <= resume.resumption <= MAX_RESUMPTION:
        raise _bad_resume(f"resumption is {resume.resumption}: count from 1 to {MAX_RESUMPTION}")
    n, identity = len(resolved.seeds), resolved.model_identity
    if not 1 <= n <= MAX_N or len(resume.outputs) != n:
        raise _bad_resume(f"{len(resume.outputs)} outputs for {n} seeds: send one per index, in order")
    if not identity.vocab_size or not identity.max_total_len:
        raise _bad_resume("resolved.model_identity lacks vocab_size or max_total_len")
    room = _check_prompt(resolved.prompt_ids, identity)
    stop = stop_from_proto(resolved.stop)
    _check_options(sampling_from_proto(resolved.sampling), stop, identity)
    if stop.max_tokens is None or stop.max_tokens > room:
        raise _bad_resume("resolved.stop.max_tokens is unset or more than the context holds")
    if resolved.ids_only and stop.stop:
        raise _bad_resume("ids_only with stop strings")
    _check_offered(resolved.task, resolved.HasField("grammar"))
    end_ids = end_ids_of(resolved)
    return [_progress_of(output, index, resolved, end_ids) for index, output in enumerate(resume.outputs)]


def _check_pooled(n: int, sampling: Sampling, stop: Stop) -> None:
    asked = {"n": n > 1, "sampling.logprobs": sampling.wants_logprobs, "stop.stop": bool(stop.stop)}
    for field, is_asked in asked.items():
        if is_asked:
            message = f"embed and score tasks make one vector and no tokens: leave {field} out"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def end_ids_of(resolved: router_pb2.Resolved) -> frozenset[int]:
    """Ids that end an output: stop ids, and EOS unless ignored."""
    end_ids = set(unpack_ints(resolved.stop.stop_ids, "stop_ids").tolist())
    if not resolved.stop.ignore_eos:
        end_ids.update(unpack_ints(resolved.model_identity.eos_ids, "eos_ids").tolist())
    return frozenset(end_ids)


def check_ids(ids: IntArray, vocab_size: int, what: str) -> None:
    """Raises TOKEN_OUT_OF_VOCABULARY, naming the first id outside [0, vocab_size)."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        position = int(outside[0])
        token = int(ids[position])
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
            f"id {token} in {what} is outside the vocabulary: ids are 0 to {vocab_size - 1}",
            {"position": str(position), "id": str(token), "vocab_size": str(vocab_size)},
        )


def _check_prompt(prompt_ids: bytes, identity: common_pb2.ModelIdentity) -> int:
    """Room for output tokens after the prompt."""
    ids = unpack_ints(prompt_ids, "prompt_ids")
    if not len(ids):
        raise _empty_prompt()
    check_ids(ids, identity.vocab_size, "prompt_ids")
    room = identity.max_total_len - len(ids)
    if room < 1:
        raise MeshError(
            ErrorReason.ERROR_REASON_PROMPT_TOO_LONG,
            f"{len(ids)} prompt tokens leave no room in a context of {identity.max_total_len}: shorten the prompt",
            {"prompt_tokens": str(len(ids)), "max_total_len": str(identity.max_total_len)},
        )
    return room


def _check_options(sampling: Sampling, stop: Stop, identity: common_pb2.ModelIdentity) -> None:
    bias_ids = np.asarray([token for token, _ in sampling.logit_bias], np.int32)
    check_ids(bias_ids, identity.vocab_size, "logit_bias_ids")
    check_ids(np.asarray(stop.stop_ids, np.int32), identity.vocab_size, "stop_ids")


def _progress_of(
    output: router_pb2.OutputProgress, index: int, resolved: router_pb2.Resolved, end_ids: frozenset[int]
) -> Progress:
    ids = unpack_ints(output.output_ids, f"resume.outputs[{index}].output_ids")
    output_ids = array("i", output.output_ids)
    check_ids(ids, resolved.model_identity.vocab_size, f"resume.outputs[{index}]")
    if len(ids) > resolved.stop.max_tokens:
        raise _bad_resume(f"output {index} has {len(ids)} ids, max_tokens is {resolved.stop.max_tokens}")
    if not end_ids.isdisjoint(output_ids[:-1]):
        raise _bad_resume(f"output {index} goes on after an id that ended it: send the ids as they were received")
    if output.text_bytes and (resolved.ids_only or not len(ids)):
        raise _bad_resume(f"output {index} has {output.text_bytes} bytes of text that no id made")
    return Progress(ids=output_ids, text_bytes=output.text_bytes, is_finished=output.is_finished)


def _check_names(request_id: str, cache_salt: str, tenant: str, model: str) -> None:
    for field, value in (
        ("request_id", request_id),
        ("cache_salt", cache_salt),
        ("tenant", tenant),
        ("model", model),
    ):
        if len(value.encode()) > MAX_NAME_BYTES:
            raise _out_of_range(f"{field} (bytes)", len(value.encode()), 0, MAX_NAME_BYTES)


def is_pooled(task: common_pb2.Task) -> bool:
    """Whether the answer is one vector, and no tokens."""
    return task in (common_pb2.TASK_EMBED, common_pb2.TASK_SCORE)


def _check_offered(task: common_pb2.Task, has_grammar: bool) -> None:
    if task not in common_pb2.Task.values():
        message = f"task {task} is none that this router knows: generate, embed or score"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "task"})
    if has_grammar:
        message = "guided decoding is not offered yet: leave grammar unset"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "grammar"})


def _empty_prompt() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_EMPTY_PROMPT, "the prompt has no tokens: send at least one")


def _bad_resume(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_RESUME, message)


def _out_of_range(field: str, value: int, low: int, high: int) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
        f"{field} is {value}: choose a value in [{low}, {high}]",
        {"field": field, "min": str(low), "max": str(high)},
    )
