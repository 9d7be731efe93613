"""Requests checked and made whole: every default filled in, so that any router can run them again exactly."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import IntArray, unpack_ints, unpack_list
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.source import grammar_source
from radixmesh.daemons.runtime.model_folder.generation_config import with_sampling_defaults
from radixmesh.daemons.runtime.sampling import (
    Sampling,
    Stop,
    output_seed,
    sampling_from_proto,
    stop_from_proto,
    with_seed,
)
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.router.v1 import router_pb2

MAX_N = 128
MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request whose options are in order; prompt and model are still to be looked at."""

    n: int
    sampling: Sampling
    stop: Stop


def check_request(request: router_pb2.GenerateRequest) -> Draft:
    """Checks all that can be checked without model and prompt. Raises MeshError naming the field."""
    check_names(cache_salt=request.cache_salt, session=request.session, tenant=request.tenant, model=request.model)
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
    check_offered(request.task)
    if request.HasField("grammar"):
        check_guided(request.task, stop, request.grammar)
    if is_pooled(request.task):
        check_pooled(n, sampling, stop)
    return Draft(n=n, sampling=sampling, stop=stop)


def resolve(
    request: router_pb2.GenerateRequest,
    draft: Draft,
    *,
    request_id: str,
    prompt_ids: bytes,
    identity: ServedIdentity,
    default_request_len: int = 0,
    refuses_cut: bool = False,
) -> ResolvedRequest:
    """The request for one model. A seed is chosen where none is given. Raises MeshError naming the field.

    prompt_ids: little-endian int32 bytes. max_tokens and min_tokens are cut to what the context holds.
    refuses_cut: max_tokens beyond that raises INVALID_ARGUMENT instead.
    default_request_len: prompt and output together where max_tokens is not given, 0 = as much as the context holds.
    """
    room = check_prompt(prompt_ids, identity)
    if request.HasField("grammar"):
        check_followed(identity)
    sampling = draft.sampling
    if identity.default_sampling:
        sampling = sampling_from_proto(with_sampling_defaults(request.sampling, identity.default_sampling))
    check_options(sampling, draft.stop, identity)
    default = max(1, (default_request_len or identity.max_total_len) - len(prompt_ids) // 4)
    if refuses_cut and (draft.stop.max_tokens or 0) > room:
        raise _too_many_tokens(draft.stop.max_tokens or 0, len(prompt_ids) // 4, identity.max_total_len)
    max_tokens = min(draft.stop.max_tokens or default, room)
    stop = draft.stop
    if max_tokens != stop.max_tokens or stop.min_tokens > max_tokens:
        stop = replace(stop, max_tokens=max_tokens, min_tokens=min(stop.min_tokens, max_tokens))
    task = Task(request.task or Task.GENERATE)
    seed = sampling.seed
    if seed is None:
        seed = 0 if is_pooled(task) else secrets.randbits(64)
    return ResolvedRequest(
        request_id=request_id,
        model=identity.name,
        model_identity=identity,
        prompt_ids=prompt_ids,
        seeds=tuple(output_seed(seed, index) for index in range(draft.n)),
        sampling=with_seed(sampling, None),
        stop=stop,
        grammar=grammar_source(request.grammar) if request.HasField("grammar") else None,
        ids_only=request.ids_only or is_pooled(task),
        cache_salt=request.cache_salt,
        priority=request.priority,
        tenant=request.tenant,
        task=task,
        session=request.session,
    )


def check_pooled(n: int, sampling: Sampling, stop: Stop) -> None:
    asked = {"n": n > 1, "sampling.logprobs": sampling.wants_logprobs, "stop.stop": bool(stop.stop)}
    for field, is_asked in asked.items():
        if is_asked:
            message = f"embed and score tasks make one vector and no tokens: leave {field} out"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def end_ids_of(resolved: ResolvedRequest) -> frozenset[int]:
    """Ids that end an output: stop ids, and EOS unless ignored."""
    end_ids = set(resolved.stop.stop_ids)
    if not resolved.stop.ignore_eos:
        end_ids.update(unpack_list(resolved.model_identity.eos_ids, "eos_ids"))
    return frozenset(end_ids)


def check_ids(ids: IntArray, vocab_size: int, what: str) -> None:
    """Raises TOKEN_OUT_OF_VOCABULARY, naming the first id outside [0, vocab_size)."""
    # Negative ids are large ones without a sign.
    if not len(ids) or ids.view(np.uint32).max() < vocab_size:
        return
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        position = int(outside[0])
        token = int(ids[position])
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
            f"id {token} in {what} is outside the vocabulary: ids are 0 to {vocab_size - 1}",
            {"field": what, "position": str(position), "id": str(token), "vocab_size": str(vocab_size)},
        )


def check_prompt(prompt_ids: bytes, identity: ServedIdentity) -> int:
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


def check_options(sampling: Sampling, stop: Stop, identity: ServedIdentity) -> None:
    if sampling.logit_bias:
        bias_ids = np.asarray([token for token, _ in sampling.logit_bias], np.int32)
        check_ids(bias_ids, identity.vocab_size, "logit_bias_ids")
    if stop.stop_ids:
        check_ids(np.asarray(stop.stop_ids, np.int32), identity.vocab_size, "stop_ids")


def check_names(**names: str) -> None:
    """Raises INVALID_ARGUMENT naming the first that is longer than MAX_NAME_BYTES or cannot be printed."""
    for field, value in names.items():
        # UTF-8 has at least a byte a character: what is too long is not encoded.
        num_bytes = len(value) if len(value) > MAX_NAME_BYTES else len(value.encode())
        if num_bytes > MAX_NAME_BYTES:
            raise _out_of_range(f"{field} (bytes)", num_bytes, 0, MAX_NAME_BYTES)
        if field not in ("cache_salt", "session") and not value.isprintable():
            message = f"{field} has characters that cannot be printed: leave them out"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def is_pooled(task: int) -> bool:
    """True if the answer is one vector, and no tokens."""
    return task in (Task.EMBED, Task.SCORE)


def check_guided(task: int, stop: Stop, grammar: common_pb2.Grammar) -> None:
    """Raises MISSING_FIELD or INVALID_GRAMMAR for a source that is none, INVALID_ARGUMENT for what excludes one."""
    grammar_source(grammar)
    asked = {"task": is_pooled(task), "stop.ignore_eos": bool(stop.ignore_eos)}
    for field, is_asked in asked.items():
        if is_asked:
            message = f"an output that follows a grammar ends where the grammar does: leave {field} out"
            raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})


def check_followed(identity: ServedIdentity) -> None:
    """Raises UNSUPPORTED where the model's workers follow no grammars."""
    if not identity.grammar_format:
        message = f"the workers of {identity.name!r} follow no grammar: leave it out (docs/http.md says what they need)"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "grammar"})


def check_offered(task: int) -> None:
    if task and task not in tuple(Task):
        message = f"task {task} is none that this router knows: generate, embed or score"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "task"})


def _empty_prompt() -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_EMPTY_PROMPT, "the prompt has no tokens: send at least one")


def _too_many_tokens(max_tokens: int, num_prompt: int, context: int) -> MeshError:
    message = (
        f"max_tokens is too large: {max_tokens}. The context holds {context} tokens and the prompt has {num_prompt}: "
        f"choose at most {context - num_prompt}, or leave it out"
    )
    metadata = {"field": "max_tokens", "min": "1", "max": str(context - num_prompt)}
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, metadata)


def _out_of_range(field: str, value: int, low: int, high: int) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
        f"{field} is {value}: choose a value in [{low}, {high}]",
        {"field": field, "min": str(low), "max": str(high)},
    )
