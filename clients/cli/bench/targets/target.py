"""Target of a load: a mesh by gRPC, or any server that speaks OpenAI's API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from radixmesh.cli.bench.load_turn import Prompt
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.daemons.runtime.security.tls_files import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options of every request. model: "" = the first. timeout_s: of one request. is_plain: nothing that OpenAI's API
    does not know. is_ids_only: no text is made (gRPC). tls: authorities of the server, and who this client is."""

    model: str = ""
    temperature: float = 0.0
    ignores_eos: bool = True
    timeout_s: float = 600.0
    api_key: str = ""
    tls: TlsFiles = TlsFiles()
    is_plain: bool = False
    is_ids_only: bool = False


class Target(ABC):
    """Takes requests. Use it as an async context manager."""

    async def __aenter__(self) -> Target:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def prepare(self) -> int | None:
        """Finds the model; its vocabulary's size, None if the server does not tell. Raises TargetError."""

    @property
    @abstractmethod
    def model(self) -> str:
        """Name of the model that answers."""

    @property
    def context(self) -> int | None:
        """Tokens of prompt and output together that the model takes; None if the server does not tell."""
        return None

    @abstractmethod
    async def send(self, prompt: Prompt, out_len: int, record: RequestRecord) -> None:
        """Runs one request to its end and writes all that it sees into `record`, failures included."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the connections."""


class TargetError(Exception):
    """The target cannot be measured: a sentence that says why."""


def open_target(address: str, options: TargetOptions) -> Target:
    """grpc://host:port[,host:port], host:port, unix:/path, or http(s)://host:port/v1. Raises TargetError for others."""
    # Imported when needed: neither client is small.
    scheme = urlsplit(address).scheme if "://" in address else "grpc"
    if scheme == "grpc":
        from radixmesh.cli.bench.targets.grpc_target import GrpcTarget

        return GrpcTarget([one for one in address.removeprefix("grpc://").split(",") if one], options)
    if scheme in ("http", "https"):
        from radixmesh.cli.bench.targets.openai_target import OpenAITarget

        return OpenAITarget(address, options)
    raise TargetError(f"{address!r} is no target: name grpc://host:port or http://host:port/v1")
