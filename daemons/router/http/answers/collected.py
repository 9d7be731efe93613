"""Answers put together again from their deltas, for clients that want them whole."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from radixmesh.daemons.router.http.answers.request_group import RequestGroup
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.updates import Finished, Logprobs, Update
from radixmesh.daemons.runtime.finish_reason import FinishReason


@dataclass(slots=True, kw_only=True)
class LogprobRun:
    """Logprobs of consecutive tokens: one value a token, num_top alternatives each (flat, most likely first)."""

    values: array[float] = field(default_factory=lambda: array("f"))
    num_top: int = 0
    top_ids: array[int] = field(default_factory=lambda: array("i"))
    top_values: array[float] = field(default_factory=lambda: array("f"))

    def add(self, logprobs: Logprobs) -> None:
        self.values.frombytes(logprobs.token_logprobs)
        self.num_top = logprobs.num_top or self.num_top
        self.top_ids.frombytes(logprobs.top_ids)
        self.top_values.frombytes(logprobs.top_logprobs)

    @classmethod
    def of(cls, logprobs: Logprobs | None) -> LogprobRun:
        run = cls()
        if logprobs is not None:
            run.add(logprobs)
        return run

    def cut(self, num_top: int) -> LogprobRun:
        """The same with at most so many alternatives a token."""
        if num_top >= self.num_top:
            return self
        starts = range(0, len(self.top_ids), self.num_top)
        ids = array("i", [token for at in starts for token in self.top_ids[at : at + num_top]])
        values = array("f", [value for at in starts for value in self.top_values[at : at + num_top]])
        return LogprobRun(values=self.values, num_top=num_top, top_ids=ids, top_values=values)

    def top(self, index: int) -> list[tuple[int, float]]:
        """Alternatives of the token at that index, most likely first."""
        start, end = index * self.num_top, (index + 1) * self.num_top
        return list(zip(self.top_ids[start:end], self.top_values[start:end], strict=True))


@dataclass(slots=True, kw_only=True)
class CollectedOutput:
    """One output. finished: None until it has. num_forgotten: ids that were here and are not any more."""

    ids: array[int] = field(default_factory=lambda: array("i"))
    texts: list[str] = field(default_factory=list)
    logprobs: LogprobRun = field(default_factory=LogprobRun)
    vector: bytes = b""
    weights_version: int = 0
    num_forgotten: int = 0
    finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ending(self) -> Finished:
        assert self.finished is not None, "an output without an end"
        return self.finished


@dataclass(slots=True, kw_only=True)
class CollectedRequest:
    """The answer to one prompt. first_token: when its first output came, by the monotonic clock; None until then."""

    _resolved: ResolvedRequest | None = None
    outputs: list[CollectedOutput] = field(default_factory=list)
    prompt_logprobs: LogprobRun | None = None
    first_token: float | None = None

    @property
    def resolved(self) -> ResolvedRequest:
        """The request as it was answered: the first update brings it."""
        assert self._resolved is not None, "nothing of the answer is there"
        return self._resolved

    def add(self, update: Update) -> None:
        """Raises the error of an output that failed."""
        if update.resolved is not None:
            self._resolved = update.resolved
            self.outputs = [CollectedOutput() for _ in update.resolved.seeds]
        if update.prompt_logprobs is not None:
            if self.prompt_logprobs is None:
                self.prompt_logprobs = LogprobRun()
            self.prompt_logprobs.add(update.prompt_logprobs)
        if update.deltas and self.first_token is None:
            self.first_token = time.monotonic()
        for delta in update.deltas:
            output = self.outputs[delta.index]
            output.ids.frombytes(delta.ids)
            output.texts.append(delta.text)
            output.weights_version = delta.weights_version
            output.vector = delta.vector or output.vector
            if delta.logprobs is not None:
                output.logprobs.add(delta.logprobs)
        for finished in update.finished:
            raise_failure(finished)
            self.outputs[finished.index].finished = finished


async def collect(group: RequestGroup, num_requests: int) -> list[CollectedRequest]:
    """All answers whole, in the order of the prompts. Raises MeshError when any output fails."""
    collected = [CollectedRequest() for _ in range(num_requests)]
    while (item := await group.next()) is not None:
        index, update = item
        collected[index].add(update)
    return collected


def raise_failure(finished: Finished) -> None:
    """Raises the error of an output that did not end by itself."""
    if finished.error is not None:
        raise finished.error
    assert finished.reason in (FinishReason.STOP, FinishReason.LENGTH), finished
