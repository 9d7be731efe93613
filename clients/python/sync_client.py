"""The client without async: AsyncClient on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from radixmesh.client.async_client import AsyncClient, AsyncStream
from radixmesh.client.options import Message, Options
from radixmesh.client.results import Chunk, Completion, Logprobs, Model
from radixmesh.daemons.runtime.security.tls_files import TlsFiles

if TYPE_CHECKING:
    from typing import Unpack

_T = TypeVar("_T")


class Client:
    """As AsyncClient; may be shared by threads. Use it as a context manager, or close() it."""

    def __init__(
        self,
        routers: Sequence[str],
        *,
        resume_timeout_s: float = 120.0,
        api_key: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="radixmesh-client", daemon=True)
        self._thread.start()
        try:
            self._client = self.wait(_make_client(routers, resume_timeout_s, api_key, tls))
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connections, and with them all streams. Idempotent."""
        if not self._loop.is_closed():
            self.wait(self._client.close())
            self._end_loop()

    def generate(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """Starts a request; see AsyncClient.generate."""
        return Stream(self, self._client.generate(prompt, messages=messages, **options))

    def complete(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Message] | None = None,
        **options: Unpack[Options],
    ) -> Completion:
        """Runs a request to its end."""
        return self.wait(self._client.complete(prompt, messages=messages, **options))

    @property
    def asynchronous(self) -> AsyncClient:
        """The client beneath, for coroutines that wait() runs."""
        return self._client

    def call(self, function: Callable[[], object]) -> None:
        """Has the event loop call a function, behind what it was told before; returns at once."""
        self._loop.call_soon_threadsafe(function)

    def abort(self, request_id: str) -> str:
        """Ends a request: "found", "finished" or "unknown"."""
        return self.wait(self._client.abort(request_id))

    def tokenize(self, text: str | None = None, *, messages: Sequence[Message] | None = None) -> list[int]:
        """Token ids of a text or chat."""
        return self.wait(self._client.tokenize(text, messages=messages))

    def models(self) -> list[Model]:
        """The models that can be asked for."""
        return self.wait(self._client.models())

    def wait(self, work: Coroutine[object, object, _T]) -> _T:
        """Runs work of the asynchronous client to its end, on its event loop."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the waiting thread: the request must not run on.
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Stream:
    """One request; see AsyncStream. Use it as a context manager to abort what is left early."""

    def __init__(self, client: Client, stream: AsyncStream) -> None:
        self._client = client
        self._stream = stream

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        chunk = self._client.wait(_next_or_none(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Aborts the request unless it has ended."""
        self._client.wait(self._stream.aclose())

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def model(self) -> str:
        return self._stream.model

    @property
    def prompt_ids(self) -> list[int]:
        return self._stream.prompt_ids

    @property
    def prompt_logprobs(self) -> Logprobs | None:
        return self._stream.prompt_logprobs

    @property
    def num_resumptions(self) -> int:
        return self._stream.num_resumptions


async def _make_client(
    routers: Sequence[str], resume_timeout_s: float, api_key: str, tls: TlsFiles | None
) -> AsyncClient:
    # grpc binds a channel to the loop that runs when it is made.
    return AsyncClient(routers, resume_timeout_s=resume_timeout_s, api_key=api_key, tls=tls)


async def _next_or_none(stream: AsyncStream) -> Chunk | None:
    return await anext(aiter(stream), None)
