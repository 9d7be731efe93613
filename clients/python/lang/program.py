"""Programs: functions of a state, run once, in batches, or as a stream, with or without async."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from radixmesh.client.async_client import AsyncClient
from radixmesh.client.errors import InvalidRequestError
from radixmesh.client.lang.async_state import AsyncState
from radixmesh.client.lang.runtime import MAX_REQUESTS, Runtime
from radixmesh.client.lang.state import State
from radixmesh.client.options import Options
from radixmesh.client.sync_client import Client

MAX_BATCH = 100_000
# Programs of a batch at a time: each is a thread, or a task of an asynchronous function.
MAX_CONCURRENCY = 1024
_CONCURRENCY = 64


class Program:
    """A function whose first argument is the state; made by @function."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body
        self._is_async = inspect.iscoroutinefunction(body)
        self.__doc__ = body.__doc__

    def __call__(self, state: object, *args: object, **arguments: object) -> object:
        """Runs the function on the state of another program."""
        return self._body(state, *args, **arguments)

    def run(
        self, *args: object, client: Client, stream: bool = False, options: Options | None = None, **arguments: object
    ) -> State:
        """The state at the program's end. options: of all its generations.

        stream: returns at once, and text_iter() of the state follows the program. Raises what the function raised, or
        the first error of a generation; with stream the iteration does.
        """
        self._require(is_async=False)
        runtime = client.wait(_runtime(client.asynchronous, options))
        state = State(client, client.wait(_state(runtime)))
        if stream:
            target = self._stream
            threading.Thread(target=target, args=(state, runtime, client, args, arguments), daemon=True).start()
        else:
            self._run(state, runtime, client, args, arguments)
        return state

    def run_batch(
        self,
        batch: Sequence[Mapping[str, object]],
        *,
        client: Client,
        options: Options | None = None,
        concurrency: int = _CONCURRENCY,
        return_exceptions: bool = False,
    ) -> list[State]:
        """States of one run for each arguments of the batch, in order, so many at a time.

        return_exceptions: a run that failed has its `error` set; otherwise the first error is raised at the end.
        """
        self._require(is_async=False)
        _check_batch(batch, concurrency)
        slots = client.wait(_slots())

        def one(numbered: tuple[int, Mapping[str, object]]) -> State:
            number, arguments = numbered
            runtime = client.wait(_runtime(client.asynchronous, options, slots, (number,)))
            state = State(client, client.wait(_state(runtime)))
            try:
                self._run(state, runtime, client, (), arguments)
            except Exception as error:
                assert state.error is not None, error
            return state

        with ThreadPoolExecutor(min(concurrency, max(1, len(batch)))) as pool:
            states = list(pool.map(one, enumerate(batch)))
        _raise_first([state.error for state in states], return_exceptions)
        return states

    async def arun(
        self, *args: object, client: AsyncClient, options: Options | None = None, **arguments: object
    ) -> AsyncState:
        """As run, of an asynchronous function."""
        self._require(is_async=True)
        runtime = Runtime(client, options or {})
        return await _run_async(self._body, runtime, args, arguments)

    async def arun_batch(
        self,
        batch: Sequence[Mapping[str, object]],
        *,
        client: AsyncClient,
        options: Options | None = None,
        concurrency: int = _CONCURRENCY,
        return_exceptions: bool = False,
    ) -> list[AsyncState]:
        """As run_batch, of an asynchronous function."""
        self._require(is_async=True)
        _check_batch(batch, concurrency)
        slots, turns = asyncio.Semaphore(MAX_REQUESTS), asyncio.Semaphore(concurrency)

        async def one(number: int, arguments: Mapping[str, object]) -> AsyncState:
            runtime = Runtime(client, options or {}, slots=slots, path=(number,))
            state = AsyncState(runtime)
            async with turns:
                try:
                    return await _run_async(self._body, runtime, (), arguments, state)
                except Exception:
                    return state

        states = await asyncio.gather(*(one(number, arguments) for number, arguments in enumerate(batch)))
        _raise_first([state.error for state in states], return_exceptions)
        return states

    def _require(self, *, is_async: bool) -> None:
        if self._is_async != is_async:
            name = "arun or arun_batch" if self._is_async else "run or run_batch"
            raise TypeError(f"this program is {'async: ' if self._is_async else 'not async: '}call {name}")

    def _run(
        self, state: State, runtime: Runtime, client: Client, args: Sequence[object], arguments: Mapping[str, object]
    ) -> None:
        try:
            state.result = self._body(state, *args, **arguments)
            client.wait(runtime.drain())
            state.sync()
        except BaseException as error:
            # Before the end: an iteration over the text has to see it.
            state._core.error = state._core.error or error
            raise
        finally:
            client.wait(_end(runtime, state._core))

    def _stream(
        self, state: State, runtime: Runtime, client: Client, args: Sequence[object], arguments: Mapping[str, object]
    ) -> None:
        # The iteration over the text raises it.
        with contextlib.suppress(BaseException):
            self._run(state, runtime, client, args, arguments)


def function(body: Callable[..., Any]) -> Program:
    """Makes a program of a function whose first argument is the state; of an `async def` too."""
    return Program(body)


async def _run_async(
    body: Callable[..., Awaitable[object]],
    runtime: Runtime,
    args: Sequence[object],
    arguments: Mapping[str, object],
    state: AsyncState | None = None,
) -> AsyncState:
    state = state or AsyncState(runtime)
    try:
        await body(state, *args, **arguments)
        await runtime.drain()
        await state.sync()
    except BaseException as error:
        state.error = state.error or error
        raise
    finally:
        await _end(runtime, state)
    return state


async def _end(runtime: Runtime, state: AsyncState) -> None:
    await runtime.cancel()
    state.end()


async def _runtime(
    client: AsyncClient,
    options: Options | None,
    slots: asyncio.Semaphore | None = None,
    path: tuple[int, ...] = (),
) -> Runtime:
    return Runtime(client, options or {}, slots=slots, path=path)


async def _state(runtime: Runtime) -> AsyncState:
    # An event belongs to the loop that runs when it is made.
    return AsyncState(runtime)


async def _slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(MAX_REQUESTS)


def _check_batch(batch: Sequence[object], concurrency: int) -> None:
    if len(batch) > MAX_BATCH:
        message = f"a batch has {len(batch)} runs, at most {MAX_BATCH} are taken: run several"
        raise InvalidRequestError(message, "TOO_LARGE", {"max": str(MAX_BATCH)})
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise InvalidRequestError(f"concurrency is {concurrency}: choose 1 to {MAX_CONCURRENCY}", "INVALID_ARGUMENT")


def _raise_first(errors: Sequence[BaseException | None], return_exceptions: bool) -> None:
    first = next((error for error in errors if error is not None), None)
    if first is not None and not return_exceptions:
        raise first
