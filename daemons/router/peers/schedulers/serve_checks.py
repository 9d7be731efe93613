"""Checks of a scheduler's frames: anything else ends its stream before it reaches a client, or fills the journal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.requests.journal import Request
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.kv_share import unpack_shares
from radixmesh.scheduler.v1 import scheduler_pb2

# An embedding of 262,144 numbers: several times the widest model's.
_MAX_VECTOR_BYTES = 1 << 20
_FEW_IDS = 64
_REASONS = frozenset(map(int, FinishReason)) - {int(FinishReason.HANDED_OVER)}
_MAX_NAMES, _MAX_NAME_CHARS, _MAX_EOS_IDS = 4096, 256, 4096


class ServeChecks:
    """Of the stream to one scheduler. Every check raises PROTOCOL_VIOLATION, or MALFORMED_MESSAGE for broken arrays."""

    def __init__(self, address: str) -> None:
        self._address = address

    def broken(self, message: str) -> MeshError:
        return MeshError(ErrorReason.ERROR_REASON_PROTOCOL_VIOLATION, message, {"daemon": self._address})

    def hello(self, hello: scheduler_pb2.SchedulerHello) -> None:
        """A hello that every request would fail by is refused as a whole."""
        identity = hello.hello.model
        if not identity.name or not identity.vocab_size or not identity.max_total_len:
            message = "a scheduler says name, vocab_size and max_total_len of its model in its hello"
            raise MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, message, {"field": "hello.hello.model"})
        names = (identity.name, *hello.adapters)
        num_eos = len(unpack_ints(identity.eos_ids, "hello.hello.model.eos_ids"))
        if len(names) > _MAX_NAMES or max(map(len, names)) > _MAX_NAME_CHARS or num_eos > _MAX_EOS_IDS:
            raise self.broken(f"more than {_MAX_NAMES} names of {_MAX_NAME_CHARS}, or {_MAX_EOS_IDS} eos ids")
        unpack_shares(hello.kv_heads, "hello.kv_heads")

    def batch(
        self,
        handles: Sequence[int],
        attempts: Sequence[int],
        firsts: Sequence[int],
        counts: Sequence[int],
        ids: bytes,
        vocab_size: int,
    ) -> None:
        """Columns of a token batch. The hot path: once per step."""
        if not len(handles) == len(attempts) == len(firsts) == len(counts) or 4 * sum(counts) != len(ids):
            raise self.broken("the arrays of a token batch do not fit each other")
        if not handles:
            return
        if min(counts) < 1 or min(firsts) < 0 or len(set(handles)) != len(handles):
            raise self.broken("a token batch has a row without tokens, before the output, or twice")
        # Negative ids are large ones without a sign. Of few ids a loop costs less than numpy's call.
        found = memoryview(ids).cast("I")
        if (max(found) if len(found) <= _FEW_IDS else int(np.asarray(found).max())) >= vocab_size:
            raise self.broken(f"token ids outside the vocabulary of {vocab_size}")

    def width(self, logprobs: common_pb2.Logprobs, request: Request) -> None:
        most = request.resolved.sampling.num_top_logprobs or 0
        if logprobs.num_top > most:
            raise self.broken(f"{logprobs.num_top} alternatives where {most} were asked for")

    def prompt_logprobs(self, prompt: scheduler_pb2.PromptLogprobs, request: Request) -> None:
        self.width(prompt.logprobs, request)
        if prompt.first_position + len(prompt.logprobs.token_logprobs) // 4 > request.num_prompt:
            raise self.broken(f"prompt logprobs go on after the prompt's {request.num_prompt} tokens")

    def vector(self, vector: scheduler_pb2.OutputVector, request: Request) -> None:
        size = len(vector.values)
        if not 0 < size <= _MAX_VECTOR_BYTES or size % 4 or not request.resolved.is_pooled:
            raise self.broken(f"a vector of {size} bytes is not what was asked for")

    def reason(self, finished: scheduler_pb2.Finished) -> None:
        # Only prefills are asked to hand over, and those are no outputs.
        if finished.reason not in _REASONS:
            raise self.broken(f"an output finished for reason {finished.reason}, which is none")
