"""Updates as the messages that gRPC clients get."""

from __future__ import annotations

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.messages import resolved_to_proto
from radixmesh.daemons.router.requests.updates import Finished, Logprobs, Update
from radixmesh.router.v1 import router_pb2


def response_of(update: Update) -> router_pb2.GenerateResponse:
    """The update as a message. The hot path of gRPC: once per message."""
    if update.resolved is not None:
        return router_pb2.GenerateResponse(resolved=resolved_to_proto(update.resolved))
    response = router_pb2.GenerateResponse()
    for delta in update.deltas:
        message = response.deltas.add(
            index=delta.index,
            first_output_index=delta.first_output_index,
            text_offset=delta.text_offset,
            ids=delta.ids,
            text=delta.text,
            weights_version=delta.weights_version,
            vector=delta.vector,
        )
        if delta.logprobs is not None:
            message.logprobs.CopyFrom(_logprobs_of(delta.logprobs))
    if update.prompt_logprobs is not None:
        response.prompt_logprobs.CopyFrom(_logprobs_of(update.prompt_logprobs))
        response.prompt_logprobs_start = update.prompt_logprobs_start
    if update.finished:
        response.finished.extend(map(_finished_of, update.finished))
    return response


def _logprobs_of(logprobs: Logprobs) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(**logprobs._asdict())


def _finished_of(finished: Finished) -> router_pb2.OutputFinished:
    return router_pb2.OutputFinished(
        index=finished.index,
        reason=int(finished.reason),  # type: ignore[arg-type]
        num_output=finished.num_output,
        text_bytes=finished.text_bytes,
        stop_id=finished.stop_id,
        stop=finished.stop,
        usage=common_pb2.Usage(
            prompt_tokens=finished.prompt_tokens,
            output_tokens=finished.num_output,
            cached_tokens=finished.cached_tokens,
            accepted_prediction_tokens=finished.accepted_predictions,
            rejected_prediction_tokens=finished.rejected_predictions,
        ),
        error=finished.error.to_proto() if finished.error is not None else None,
    )
