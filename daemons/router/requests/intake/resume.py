"""Broken streams, as their clients describe them.

All of a resume is a client's claim: it is checked, and the request is rebuilt from what was checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.intake.resolver import (
    MAX_N,
    MAX_NAME_BYTES,
    check_followed,
    check_guided,
    check_ids,
    check_names,
    check_offered,
    check_options,
    check_pooled,
    check_prompt,
    end_ids_of,
    is_pooled,
)
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.guided.source import grammar_source
from radixmesh.daemons.runtime.request_ids import check_request_id
from radixmesh.daemons.runtime.sampling import sampling_from_proto, stop_from_proto
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.runtime.telemetry.tracing import is_traceparent
from radixmesh.router.v1 import router_pb2

MAX_RESUMPTION = 32_767
_COMPARED = ("model_fingerprint", "tokenizer_fingerprint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One output as far as the client has it."""

    ids: array[int]
    text_bytes: int
    is_finished: bool


def check_resume(request: router_pb2.GenerateRequest) -> None:
    """Checks what needs no model; cheap whatever was sent. Raises INVALID_RESUME, or what a fresh request would get."""
    resume, resolved = request.resume, request.resume.resolved
    identity = resolved.model_identity
    if not resume.HasField("resolved") or not resolved.request_id or not resolved.model:
        raise _bad_resume("send the first message of the broken stream, unchanged, as resume.resolved")
    check_request_id(resolved.request_id)
    check_names(cache_salt=resolved.cache_salt, session=resolved.session, tenant=resolved.tenant, model=resolved.model)
    if request.request_id and request.request_id != resolved.request_id:
        raise _bad_resume(f"request_id is not {resolved.request_id!r}, as the stream's was: leave it out")
    for name in _COMPARED:
        if len(getattr(identity, name)) > MAX_NAME_BYTES:
            raise _bad_resume(f"resolved.model_identity.{name} is no fingerprint that a router sent")
    if not 1 <= resume.resumption <= MAX_RESUMPTION:
        raise _bad_resume(f"resumption is {resume.resumption}: count from 1 to {MAX_RESUMPTION}")
    n = len(resolved.seeds)
    if not 1 <= n <= MAX_N or len(resume.outputs) != n:
        raise _bad_resume(f"{len(resume.outputs)} outputs for {n} seeds: send one per index, in order")
    if not identity.vocab_size or not identity.max_total_len:
        raise _bad_resume("resolved.model_identity lacks vocab_size or max_total_len")
    check_offered(resolved.task)
    if resolved.HasField("grammar"):
        check_guided(resolved.task, stop_from_proto(resolved.stop), resolved.grammar)
    max_tokens = resolved.stop.max_tokens
    room = identity.max_total_len - len(resolved.prompt_ids) // 4
    if resolved.prompt_ids and not 1 <= max_tokens <= room:
        raise _bad_resume("resolved.stop.max_tokens is unset or more than the context holds")
    for index, output in enumerate(resume.outputs):
        if len(output.output_ids) > 4 * max_tokens:
            num_ids = len(output.output_ids) // 4
            raise _bad_resume(f"output {index} has {num_ids} ids, max_tokens is {max_tokens}")


def rebuild(request: router_pb2.GenerateRequest, identity: ServedIdentity) -> tuple[ResolvedRequest, list[Progress]]:
    """A resume that check_resume() let pass, made anew for the model that is served.

    identity: of the served model: vocabulary and EOS ids are taken from here, never from the client. Raises
    INVALID_RESUME, or what resolve() raises.
    """
    claimed = request.resume.resolved
    check_prompt(claimed.prompt_ids, identity)
    if claimed.HasField("grammar"):
        check_followed(identity)
    sampling, stop = sampling_from_proto(claimed.sampling), stop_from_proto(claimed.stop)
    check_options(sampling, stop, identity)
    if claimed.ids_only and stop.stop:
        raise _bad_resume("ids_only with stop strings")
    task = Task(claimed.task or Task.GENERATE)
    if is_pooled(task):
        check_pooled(len(claimed.seeds), sampling, stop)
    resolved = ResolvedRequest(
        request_id=claimed.request_id,
        model=identity.name,
        model_identity=identity,
        prompt_ids=claimed.prompt_ids,
        seeds=tuple(claimed.seeds),
        sampling=replace(sampling, seed=None),
        stop=stop,
        grammar=grammar_source(claimed.grammar) if claimed.HasField("grammar") else None,
        ids_only=claimed.ids_only or is_pooled(task),
        cache_salt=claimed.cache_salt,
        priority=claimed.priority,
        tenant=claimed.tenant,
        task=task,
        session=claimed.session,
        trace_context=claimed.trace_context if is_traceparent(claimed.trace_context) else "",
    )
    end_ids = end_ids_of(resolved)
    outputs = request.resume.outputs
    return resolved, [_progress_of(output, index, resolved, end_ids) for index, output in enumerate(outputs)]


def _progress_of(
    output: router_pb2.OutputProgress, index: int, resolved: ResolvedRequest, end_ids: Collection[int]
) -> Progress:
    ids = unpack_ints(output.output_ids, f"resume.outputs[{index}].output_ids")
    check_ids(ids, resolved.model_identity.vocab_size, f"resume.outputs[{index}]")
    if np.isin(ids[:-1], list(end_ids)).any():
        raise _bad_resume(f"output {index} goes on after an id that ended it: send the ids as they were received")
    if output.text_bytes and (resolved.ids_only or not len(ids)):
        raise _bad_resume(f"output {index} has {output.text_bytes} bytes of text that no id made")
    return Progress(ids=array("i", output.output_ids), text_bytes=output.text_bytes, is_finished=output.is_finished)


def _bad_resume(message: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_RESUME, message)
