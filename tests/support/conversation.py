"""Recorded streams: the bytes of every frame that a client sent and a daemon answered, as one version of the contracts
wrote them. A file is JSON: contract_version, method, requests and responses (hex, in order)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from radixmesh.daemons.runtime.rpc.channel import open_channel

FOLDER = Path(__file__).parents[1] / "contract" / "conversations"


@dataclass(frozen=True)
class Conversation:
    contract_version: int
    method: str
    requests: list[str]
    responses: list[str]

    @classmethod
    def load(cls, name: str) -> Conversation:
        return cls(**json.loads((FOLDER / f"{name}.json").read_text()))

    def save(self, name: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")


async def speak(
    address: str, method: str, requests: Sequence[bytes], is_over: Callable[[list[bytes]], bool]
) -> list[bytes]:
    """Sends all requests, one after an answer to the one before where that has one; the answers until is_over."""
    answers: list[bytes] = []
    async with open_channel(address) as channel:
        call = channel.stream_stream(method, request_serializer=None, response_deserializer=None)()
        for request in requests:
            await call.write(request)
            answers.append(await call.read())
            assert answers[-1] is not grpc.aio.EOF
        while not is_over(answers):
            answer = await call.read()
            assert answer is not grpc.aio.EOF
            answers.append(answer)
        call.cancel()
    return answers
