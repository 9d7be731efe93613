"""The ladder: the same requests through more and more of the mesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hop_ladder.one_process import OneProcess
from hop_ladder.serve_stream import ServeStream
from radixmesh.client import AsyncClient
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.sampling import Sampling, Stop


class Prompt(NamedTuple):
    """A text and what the tokenizer makes of it."""

    text: str
    ids: list[int]


class Message(NamedTuple):
    """One message to a client. text is empty where a rung makes none."""

    ids: list[int]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung(ABC):
    """One way to run a request. pids: daemons that take part, by name; the client itself is this process."""

    name: str
    adds: str
    pids: dict[str, int]

    @abstractmethod
    def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[Message]:
        """Greedy, to the end; each message as it comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRung(Rung):
    """The planner in this process; its steps on a thread, or in a worker process."""

    engine: OneProcess

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[Message]:
        stop = Stop(max_tokens=num_tokens, ignore_eos=True)
        async for delta in self.engine.generate(prompt.text, Sampling(temperature=0.0), stop):
            yield Message(delta.ids, delta.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRung(Rung):
    """Scheduler and worker processes; ids over Serve."""

    serve: ServeStream

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[Message]:
        sampling = common_pb2.SamplingParams(temperature=0.0)
        stop = common_pb2.StopParams(max_tokens=num_tokens, ignore_eos=True)
        async for ids in self.serve.generate(prompt.ids, sampling, stop):
            yield Message(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRung(Rung):
    """The Python client at a router: ids only, or the whole mesh with text."""

    client: AsyncClient
    is_text: bool

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncIterator[Message]:
        stream = self.client.generate(
            prompt.text if self.is_text else prompt.ids,
            max_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0,
            ids_only=not self.is_text,
        )
        async for chunk in stream:
            yield Message(chunk.ids, chunk.text)


async def check_equal(rungs: Sequence[Rung], prompt: Prompt, num_tokens: int) -> None:
    """Raises RuntimeError unless all rungs give the same tokens, and those with text the same text."""
    first: tuple[list[int], str] | None = None
    for rung in rungs:
        messages = [message async for message in rung.stream(prompt, num_tokens)]
        ids, text = [i for message in messages for i in message.ids], "".join(message.text for message in messages)
        first = first or (ids, text)
        if ids != first[0] or text not in ("", first[1]):
            raise RuntimeError(f"{rung.name} gave {ids} {text!r}, {rungs[0].name} {first[0]} {first[1]!r}")
