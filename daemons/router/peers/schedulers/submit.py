"""A journalled output as the Submit that a scheduler gets."""

from __future__ import annotations

from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.sampling import sampling_to_proto, stop_to_proto
from radixmesh.scheduler.v1 import scheduler_pb2


def submit_of(output: Output, handle: int, sequence: int, *, with_blob: bool = False) -> scheduler_pb2.Submit:
    """The output as it stands now: rows continue after the ids that the journal has.

    with_blob: its grammar comes with it, for a scheduler that does not have it.
    """
    request, resolved = output.request, output.request.resolved
    submit = scheduler_pb2.Submit(
        handle=handle,
        request_id=resolved.request_id,
        index=output.index,
        attempt=output.attempt,
        sequence=sequence,
        model=resolved.model,
        task=int(resolved.task),  # type: ignore[arg-type]
        prompt_ids=resolved.prompt_ids,
        resumed_output_ids=output.ids.tobytes(),
        sampling=sampling_to_proto(resolved.sampling),
        stop=stop_to_proto(resolved.stop),
        logprobs_start=_logprobs_start(output),
        cache_salt=resolved.cache_salt,
        priority=resolved.priority,
        deadline_ms=_remaining_ms(request),
        tenant=resolved.tenant,
        trace_context=request.trace_context,
        transfer_id=output.transfer_id,
    )
    # The detokenizer looks for stop strings.
    submit.stop.ClearField("stop")
    if request.grammar is not None:
        submit.grammar_hash = request.grammar.hash
        if with_blob:
            submit.blobs.add(hash=request.grammar.hash, data=request.grammar.data)
    submit.sampling.seed = resolved.seeds[output.index]
    # Prompt logprobs are those of the prompt, whichever output computes it: output 0 does, until they are known.
    submit.sampling.prompt_logprobs = output.index == 0 and request.are_prompt_logprobs_due
    return submit


def sibling_of(output: Output, handle: int, sequence: int, shares_with: int) -> scheduler_pb2.Submit:
    """As submit_of(), but for what the submit of handle `shares_with`, of the same request and frame, says already."""
    request = output.request
    submit = scheduler_pb2.Submit(
        handle=handle,
        index=output.index,
        attempt=output.attempt,
        sequence=sequence,
        resumed_output_ids=output.ids.tobytes(),
        logprobs_start=_logprobs_start(output),
        shares_with=shares_with,
        transfer_id=output.transfer_id,
    )
    if request.grammar is not None:
        submit.grammar_hash = request.grammar.hash
    submit.sampling.seed = request.resolved.seeds[output.index]
    submit.sampling.prompt_logprobs = output.index == 0 and request.are_prompt_logprobs_due
    return submit


def prefill_of(
    output: Output, handle: int, sequence: int, target: scheduler_pb2.TransferTarget
) -> scheduler_pb2.Submit:
    """The prompt of an output that runs elsewhere, with the ids that it has, and its next token; the KV goes to
    `target`."""
    submit = submit_of(output, handle, sequence, with_blob=True)
    submit.ClearField("transfer_id")
    submit.send_kv_to.CopyFrom(target)
    # It is over when the first token is there: no room is kept for more than one behind it.
    most = len(output.ids) + 2
    submit.stop.max_tokens = min(submit.stop.max_tokens or most, most)
    submit.stop.min_tokens = min(submit.stop.min_tokens, submit.stop.max_tokens)
    return submit


def reservation_of(
    output: Output, transfer_id: str, lease_ms: int, granule: int, kv_heads: bytes
) -> scheduler_pb2.Reservation:
    """Asks the scheduler of an output for a place for the KV of its tokens. granule, kv_heads: of the prefill side."""
    resolved = output.request.resolved
    return scheduler_pb2.Reservation(
        transfer_id=transfer_id,
        lease_ms=lease_ms,
        prompt_ids=resolved.prompt_ids + output.ids.tobytes(),
        model=resolved.model,
        cache_salt=resolved.cache_salt,
        granule=granule,
        kv_heads=kv_heads,
    )


def _logprobs_start(output: Output) -> int:
    request = output.request
    if output.index == 0 and request.prompt_logprobs is not None and request.are_prompt_logprobs_due:
        return request.prompt_logprobs.end
    return request.num_prompt + len(output.ids)


def _remaining_ms(request: Request) -> int | None:
    return None if request.deadline is None else max(0, int(1000 * (request.deadline - request.clock())))
