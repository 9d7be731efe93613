"""State of a running program: what is appended runs in order, beside the program and beside other states."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TypeAlias

from radixmesh.client.errors import InvalidRequestError
from radixmesh.client.lang.choices import Scored
from radixmesh.client.lang.expressions import (
    Expression,
    Gen,
    Part,
    RoleBegin,
    Select,
    assistant,
    flat,
    system,
    user,
)
from radixmesh.client.lang.runtime import Runtime
from radixmesh.client.lang.scoring import score_choices
from radixmesh.client.lang.transcript import Transcript
from radixmesh.client.options import Options
from radixmesh.client.results import CompletionOutput, Usage

MAX_FORKS = 1024
Value: TypeAlias = "str | list[str]"


class AsyncState:
    """Append with `+=`, which returns at once; read with get(), text() and text_iter(), which wait for what they need.

    An error of a generation is raised by everything that waits, and by the run; what was appended behind it is dropped.
    """

    def __init__(self, runtime: Runtime, *, path: tuple[int, ...] = (), parent: AsyncState | None = None) -> None:
        self._runtime = runtime
        self._path = path
        self._transcript: Transcript = parent._transcript.copy() if parent is not None else Transcript()
        self._variables: dict[str, Value] = dict(parent._variables) if parent is not None else {}
        self._outputs: dict[str, CompletionOutput | Scored] = dict(parent._outputs) if parent is not None else {}
        # Variable -> its start in the text, and its end once it has one.
        self._spans: dict[str, tuple[int, int | None]] = dict(parent._spans) if parent is not None else {}
        self._queue: deque[Part] = deque()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._num_generated = 0
        self._num_forks = 0
        self._is_ended = False
        # The chat up to the open message as the model's template renders it, once the model was asked.
        self._rendered: str | None = parent._rendered if parent is not None else None
        self.error: BaseException | None = None

    def __iadd__(self, expression: Expression | str) -> AsyncState:
        self.append(flat(expression))
        return self

    def append(self, parts: Iterable[Part]) -> None:
        if self.error is None:
            self._queue.extend(parts)
            if self._task is None:
                self._task = self._runtime.start(self._run())

    def system(self, *parts: Expression | str) -> None:
        self.append(flat(system(*parts)))

    def user(self, *parts: Expression | str) -> None:
        self.append(flat(user(*parts)))

    def assistant(self, *parts: Expression | str) -> None:
        self.append(flat(assistant(*parts)))

    async def get(self, name: str) -> Value:
        """The value of a variable, once it is there. Raises KeyError if nothing appended so far makes it."""
        while name not in self._variables or self._is_open(name):
            if self._task is None:
                self._raise_error()
                raise KeyError(name)
            await self._changed.wait()
        return self._variables[name]

    async def output(self, name: str) -> CompletionOutput | Scored:
        """Ids, logprobs and ending of a generation, or the logprobs of a selection."""
        await self.get(name)
        return self._outputs[name]

    async def text(self) -> str:
        """All text, once everything appended so far has run; of chats the messages' contents one after the other."""
        await self.sync()
        return self._transcript.text

    async def messages(self) -> list[dict[str, str]]:
        """Whole messages of the chat so far."""
        await self.sync()
        return list(self._transcript.messages)

    async def sync(self) -> None:
        """Waits until everything appended so far has run. Raises its error."""
        while self._task is not None:
            await self._changed.wait()
        self._raise_error()

    async def fork(self, count: int) -> list[AsyncState]:
        """So many states that go on from here, beside each other. They share the prefix in the mesh's cache."""
        if not 1 <= count <= MAX_FORKS:
            raise InvalidRequestError(f"fork into 1 to {MAX_FORKS} states, not {count}", "INVALID_ARGUMENT")
        await self.sync()
        self._runtime.count_states(count)
        first, self._num_forks = self._num_forks, self._num_forks + count
        return [AsyncState(self._runtime, path=(*self._path, first + index), parent=self) for index in range(count)]

    async def join(self, forks: Sequence[AsyncState], mode: str = "gather_variable") -> None:
        """Waits for forks of this state. gather_variable: each variable that they made becomes the list of their
        values. concatenate: what each appended is appended here, one after the other."""
        if mode not in ("gather_variable", "concatenate"):
            raise InvalidRequestError(f"mode is {mode}: gather_variable or concatenate", "INVALID_ARGUMENT")
        await self.sync()
        for fork in forks:
            await fork.sync()
        if mode == "concatenate":
            start = len(self._transcript.text)
            for fork in forks:
                self += fork._transcript.text[start:]
            await self.sync()
            return
        known = set(self._variables)
        for name in dict.fromkeys(name for fork in forks for name in fork._variables if name not in known):
            values = [fork._variables[name] for fork in forks if name in fork._variables]
            self._variables[name] = [
                text for value in values for text in ([value] if isinstance(value, str) else value)
            ]

    async def text_iter(self, name: str = "") -> AsyncIterator[str]:
        """New text as it comes, until the program ends; with a name that variable's alone."""
        offset = 0
        while True:
            start, end = self._spans.get(name, (0, None)) if name else (0, None)
            if not name or name in self._spans:
                part = self._transcript.text[start + offset : end]
                offset += len(part)
                if part:
                    yield part
                    continue  # Much may have changed meanwhile.
            is_over = end is not None if name else False
            if is_over or (self._is_ended and self._task is None):
                self._raise_error()
                return
            if self._task is None and self.error is not None:
                self._raise_error()
            await self._changed.wait()

    @property
    def usage(self) -> Usage:
        """Tokens of all requests of the program so far, forks included."""
        return self._runtime.usage

    def end(self) -> None:
        """Nothing will be appended any more."""
        self._is_ended = True
        self._notify()

    def _is_open(self, name: str) -> bool:
        return name in self._spans and self._spans[name][1] is None

    def _raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._execute(self._queue.popleft())
        except asyncio.CancelledError as error:
            self.error = error
            raise
        except Exception as error:  # All that wait for this state raise it.
            self.error = error
        finally:
            self._queue.clear()
            self._task = None
            self._notify()

    async def _execute(self, part: Part) -> None:
        if isinstance(part, str):
            self._add(part)
        elif isinstance(part, Gen):
            await self._generate(part)
        elif isinstance(part, Select):
            await self._select(part)
        elif isinstance(part, RoleBegin):
            self._transcript.begin(part.role)
            self._rendered = None
        else:
            self._transcript.end(part.role)

    async def _generate(self, part: Gen) -> None:
        self._transcript.check_generates()
        prompt = await self._prompt()
        options = self._next_options(part.options)
        self._begin(part.name)
        output = CompletionOutput(index=0)
        async for chunk in self._runtime.stream(prompt, options):
            output.add(chunk)
            self._add(chunk.text)
        self._settle(part.name, output.text, output)

    async def _select(self, part: Select) -> None:
        self._transcript.check_generates()
        prefix = await self._prefix()
        is_text = self._rendered is None
        scored = await score_choices(self._runtime, prefix, part, adds_special_tokens=is_text)
        choice = part.choices[part.method.pick(scored)]
        self._begin(part.name)
        self._add(choice)
        self._settle(part.name, choice, scored)

    async def _prefix(self) -> str:
        """The text that the model continues: of a chat as the model's template renders it."""
        if self._transcript.role is None:
            return self._transcript.text
        if self._rendered is None:
            messages = self._transcript.messages
            if not messages:
                raise InvalidRequestError("a chat begins with system(...) or user(...)", "INVALID_CHAT")
            (item,) = await self._runtime.encode([messages])
            self._rendered = item.rendered
        return self._rendered + self._transcript.open_content

    async def _prompt(self) -> str | list[int]:
        text = await self._prefix()
        if self._rendered is None:
            return text
        # The template has written the special tokens.
        (item,) = await self._runtime.encode([text], add_special_tokens=False)
        return item.ids

    def _next_options(self, own: Options) -> Options:
        self._num_generated += 1
        return self._runtime.options_of(own, self._path, self._num_generated)

    def _add(self, text: str) -> None:
        if text:
            self._transcript.add(text)
            self._notify()

    def _begin(self, name: str) -> None:
        if name:
            self._spans[name] = (len(self._transcript.text), None)

    def _settle(self, name: str, value: str, output: CompletionOutput | Scored) -> None:
        if name:
            self._spans[name] = (self._spans[name][0], len(self._transcript.text))
            self._variables[name], self._outputs[name] = value, output
            self._notify()
