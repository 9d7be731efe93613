"""Client of the radixmesh router: streams that survive the death of a router.

    async with AsyncClient(["127.0.0.1:50050"]) as client:
        async for chunk in client.generate("Once upon a time", max_tokens=64):
            print(chunk.text, end="")

`Client` is the same without async.
"""

from radixmesh.client.async_client import AsyncClient, AsyncStream
from radixmesh.client.errors import (
    AbortedError,
    AuthenticationError,
    BrokenStreamError,
    ClientStalledError,
    DeadlineExceededError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
    OverloadedError,
    RadixMeshError,
    UnavailableError,
    UnsupportedError,
)
from radixmesh.client.results import Chunk, Completion, CompletionOutput, Finish, Logprobs, Model, Usage
from radixmesh.client.sync_client import Client, Stream
from radixmesh.client.tools import NamedTool, Thought, Tool, ToolCall, ToolChoice, tool_calls
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

__all__ = [
    "AbortedError",
    "AsyncClient",
    "AsyncStream",
    "AuthenticationError",
    "BrokenStreamError",
    "Chunk",
    "Client",
    "ClientStalledError",
    "Completion",
    "CompletionOutput",
    "DeadlineExceededError",
    "Finish",
    "InvalidRequestError",
    "Logprobs",
    "MismatchError",
    "Model",
    "NamedTool",
    "NotFoundError",
    "OverloadedError",
    "RadixMeshError",
    "Stream",
    "Thought",
    "TlsFiles",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
    "tool_calls",
]
