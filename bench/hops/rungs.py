"""The ladder: the same requests through more and more of the mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NamedTuple

from hops.one_process import OneProcess
from hops.serve_stream import ServeStream
from radixmesh.client import AsyncClient
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.sampling import Sampling, Stop


class Prompt(NamedTuple):
    """A text and what the tokenizer makes of it."""

    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung(ABC):
    """One way to run a request. pids: daemons that take part, by name; the client itself is this process."""

    name: str
    adds: str
    pids: dict[str, int]

    @abstractmethod
    def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[int]:
        """Greedy, to the end; number of tokens of each message as it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRung(Rung):
    """The planner in this process; its steps on a thread, or in a worker process."""

    engine: OneProcess

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[int]:
        stop = Stop(max_tokens=num_tokens, ignore_eos=True)
        async for delta in self.engine.generate(prompt.text, Sampling(temperature=0.0), stop):
            if delta.ids:
                yield len(delta.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRung(Rung):
    """Scheduler and worker processes; ids over Serve."""

    serve: ServeStream

    def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[int]:
        sampling = common_pb2.SamplingParams(temperature=0.0)
        return self.serve.generate(prompt.ids, sampling, common_pb2.StopParams(max_tokens=num_tokens, ignore_eos=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRung(Rung):
    """The Python client at a router: ids only, or the whole mesh with text."""

    client: AsyncClient
    is_text: bool

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[int]:
        stream = self.client.generate(
            prompt.text if self.is_text else prompt.ids,
            max_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0,
            ids_only=not self.is_text,
        )
        async for chunk in stream:
            if chunk.ids:
                yield len(chunk.ids)
