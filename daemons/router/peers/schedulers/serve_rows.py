"""Token rows, logprobs and vectors of a scheduler, checked and appended to the journal."""

from __future__ import annotations

from collections.abc import Mapping

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.serve_checks import ServeChecks
from radixmesh.daemons.router.requests.journal import Output, OutputState
from radixmesh.daemons.router.requests.updates import Logprobs
from radixmesh.daemons.runtime.arrays import unpack_list
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.scheduler.v1 import scheduler_pb2


class ServeRows:
    """Of the stream to one scheduler. running: by handle, the outputs that are there; prefills: prompts for outputs
    elsewhere; the link keeps both.

    A row counts only if it is of the output's current attempt and of the next position. One that the journal has
    already is dropped; a gap raises PROTOCOL_VIOLATION, and so does all that was not asked for.
    """

    def __init__(
        self, running: Mapping[int, Output], prefills: Mapping[int, RemotePrompt], checks: ServeChecks
    ) -> None:
        self._running = running
        self._prefills = prefills
        self._checks = checks
        self._changed_prompts: list[RemotePrompt] = []

    def take_tokens(self, batch: scheduler_pb2.TokenBatch, vocab_size: int) -> tuple[list[Output], int]:
        """Appends a batch; outputs with new ids and the number of these. The hot path: once per step."""
        handles = unpack_list(batch.handles, "tokens.handles")
        attempts = unpack_list(batch.attempts, "tokens.attempts")
        firsts = unpack_list(batch.first_output_indexes, "tokens.first_output_indexes")
        counts = unpack_list(batch.counts, "tokens.counts")
        self._checks.batch(handles, attempts, firsts, counts, batch.ids, vocab_size)
        ids, running, version = batch.ids, self._running, batch.weights_version
        is_running = OutputState.RUNNING
        changed: list[Output] = []
        by_row: dict[int, Output] = {}
        prompts: dict[int, RemotePrompt] = {}
        end = num_tokens = 0
        try:
            for row, (handle, attempt, first, count) in enumerate(zip(handles, attempts, firsts, counts, strict=True)):
                start, end = end, end + 4 * count
                output = running.get(handle)
                if output is None or output.state is not is_running or output.attempt != attempt:
                    prompt = self._prefills.get(handle)
                    due = -1 if prompt is None or prompt.attempt != attempt else prompt.num_before + len(prompt.ids)
                    if prompt is not None and first == due:
                        self._take_prompt(prompt, ids[start:end], version)
                        prompts[row] = prompt
                    continue
                if first > len(output.ids):
                    raise self._checks.broken(f"tokens from {first} where {len(output.ids)} was due")
                if first < len(output.ids):
                    continue
                if first + count > output.max_ids:
                    raise self._checks.broken(f"{first + count} tokens where {output.max_ids} were asked for")
                output.ids.frombytes(ids[start:end])
                output.weights_version = version
                num_tokens += count
                changed.append(output)
                if output.logprobs is not None:
                    by_row[row] = output
            if by_row:
                self._take_logprobs(batch, by_row)
            for entry in batch.logprobs if prompts else ():
                if (prompt := prompts.get(entry.row)) is not None:
                    self._checks.width(entry.logprobs, prompt.output.request)
                    prompt.logprobs.append(_logprobs_of(entry.logprobs))
            self._changed_prompts += prompts.values()
        except MeshError:
            # The stream ends with this frame. No id stays without the logprob that was asked for, nor the other way
            # round: what comes after the next submit would be one off for good.
            for output in by_row.values():
                output.level_logprobs()
            raise
        return changed, num_tokens

    def take_changed_prompts(self) -> list[RemotePrompt]:
        """Prompts for outputs elsewhere that have new ids; each is told once."""
        changed, self._changed_prompts = self._changed_prompts, []
        return changed

    def take_prompt_logprobs(self, prompt: scheduler_pb2.PromptLogprobs) -> Output | None:
        """Appends prompt logprobs; the output that they are for, None if they are not new."""
        output = self._running.get(prompt.handle)
        track = output.request.prompt_logprobs if output is not None else None
        if output is None or track is None or prompt.first_position < track.end:
            return None
        self._checks.prompt_logprobs(prompt, output.request)
        if prompt.first_position > track.end:
            raise self._checks.broken(f"prompt logprobs from {prompt.first_position} where {track.end} was due")
        track.append(_logprobs_of(prompt.logprobs))
        return output

    def output_of_vector(self, vector: scheduler_pb2.OutputVector) -> Output | None:
        """The output whose vector this is, None if it is not there any more."""
        output = self._running.get(vector.handle)
        if output is not None:
            self._checks.vector(vector, output.request)
        return output

    def _take_prompt(self, prompt: RemotePrompt, ids: bytes, version: int) -> None:
        if prompt.num_before + len(prompt.ids) + len(ids) // 4 > prompt.output.request.max_tokens:
            raise self._checks.broken("more tokens of a prompt than were asked for")
        prompt.ids.frombytes(ids)
        prompt.weights_version = version

    def _take_logprobs(self, batch: scheduler_pb2.TokenBatch, by_row: Mapping[int, Output]) -> None:
        for entry in batch.logprobs:
            output = by_row.get(entry.row)
            if output is not None and output.logprobs is not None:
                self._checks.width(entry.logprobs, output.request)
                output.logprobs.append(_logprobs_of(entry.logprobs))
        for output in by_row.values():
            if output.logprobs is not None and output.logprobs.end != len(output.ids):
                raise self._checks.broken(f"logprobs end at {output.logprobs.end}, tokens at {len(output.ids)}")


def _logprobs_of(message: common_pb2.Logprobs) -> Logprobs:
    return Logprobs(message.token_logprobs, message.num_top, message.top_ids, message.top_logprobs)
