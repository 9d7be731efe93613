"""Tracks a request's output: enough to continue it at any router, and to notice any gap or repetition."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from radixmesh.client.errors import BrokenStreamError
from radixmesh.client.results import Chunk, Finish, Logprobs
from radixmesh.router.v1 import router_pb2


@dataclass(slots=True)
class _Output:
    ids: array[int] = field(default_factory=lambda: array("i"))
    text_bytes: int = 0
    is_finished: bool = False


class Tracker:
    """Positions of all outputs. No I/O."""

    def __init__(self) -> None:
        self.resolved: router_pb2.Resolved | None = None
        self.prompt_logprobs: Logprobs | None = None
        self.resumption = 0
        self._outputs: list[_Output] = []

    @property
    def is_complete(self) -> bool:
        """True if every output has finished."""
        return bool(self._outputs) and all(output.is_finished for output in self._outputs)

    def take(self, response: router_pb2.GenerateResponse) -> list[Chunk]:
        """New chunks of a message, one per index. Raises BrokenStreamError for a gap or a repetition."""
        if response.HasField("resolved"):
            self._take_resolved(response.resolved)
        if response.HasField("prompt_logprobs"):
            self._take_prompt_logprobs(Logprobs.from_proto(response.prompt_logprobs), response.prompt_logprobs_start)
        deltas = {delta.index: delta for delta in response.deltas}
        finished = {finish.index: finish for finish in response.finished}
        return [self._chunk(index, deltas.get(index), finished.get(index)) for index in sorted({*deltas, *finished})]

    def resume(self) -> router_pb2.Resume:
        """The state for another router, as a higher resumption."""
        assert self.resolved is not None, "nothing has been received yet: send the request again"
        self.resumption += 1
        return router_pb2.Resume(
            resolved=self.resolved,
            outputs=[
                router_pb2.OutputProgress(
                    output_ids=output.ids.tobytes(), text_bytes=output.text_bytes, is_finished=output.is_finished
                )
                for output in self._outputs
            ],
            resumption=self.resumption,
        )

    def _take_resolved(self, resolved: router_pb2.Resolved) -> None:
        if self.resolved is None:
            self.resolved = resolved
            self._outputs = [_Output() for _ in resolved.seeds]
        elif resolved.request_id != self.resolved.request_id or resolved.seeds != self.resolved.seeds:
            raise BrokenStreamError("a resumed stream began with another request")

    def _take_prompt_logprobs(self, part: Logprobs, start: int) -> None:
        """Parts follow each other from the position that was asked for; a resumed stream begins with the first again.
        start 0: the first position, 1."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = Logprobs()
        num_known = len(self.prompt_logprobs.token_logprobs)
        asked = self.resolved.sampling.prompt_logprobs_start if self.resolved is not None else 1
        first = max(asked, 1)
        num_before = max(start, 1) - first
        if num_before > num_known:
            raise BrokenStreamError(f"prompt logprobs from {start} came where {num_known + first} was due")
        self.prompt_logprobs.extend(part.after(num_known - num_before))

    def _chunk(self, index: int, delta: router_pb2.Delta | None, finished: router_pb2.OutputFinished | None) -> Chunk:
        if index >= len(self._outputs):
            raise BrokenStreamError(f"output {index} of {len(self._outputs)}")
        output = self._outputs[index]
        if output.is_finished:
            raise BrokenStreamError(f"output {index} went on after its finish")
        text, ids, logprobs = "", array("i"), None
        if delta is not None:
            if (delta.first_output_index, delta.text_offset) != (len(output.ids), output.text_bytes):
                got = f"token {delta.first_output_index}, byte {delta.text_offset}"
                raise BrokenStreamError(f"{got} came where {len(output.ids)}, {output.text_bytes} were due")
            text = delta.text
            ids.frombytes(delta.ids)
            output.ids.extend(ids)
            output.text_bytes += len(text.encode())
            logprobs = Logprobs.from_proto(delta.logprobs) if delta.HasField("logprobs") else None
        if finished is not None:
            if (finished.num_output, finished.text_bytes) != (len(output.ids), output.text_bytes):
                got = f"{finished.num_output} tokens, {finished.text_bytes} bytes"
                raise BrokenStreamError(f"finished with {got} after {len(output.ids)}, {output.text_bytes}")
            output.is_finished = True
        return Chunk(
            index=index,
            text=text,
            ids=ids.tolist(),
            logprobs=logprobs,
            finish=Finish.from_proto(finished) if finished is not None else None,
        )
