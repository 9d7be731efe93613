"""State of a program without async: what is appended runs in the background, reading waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from radixmesh.client.lang.async_state import AsyncState, Value
from radixmesh.client.lang.choices import Scored
from radixmesh.client.lang.expressions import Expression, Part, Role, RoleBegin, RoleEnd, assistant, flat, system, user
from radixmesh.client.results import CompletionOutput, Usage
from radixmesh.client.sync_client import Client


class State:
    """As AsyncState. `s["name"]` waits for a variable; result: of the program's function, once it has returned."""

    def __init__(self, client: Client, core: AsyncState) -> None:
        self._client = client
        self._core = core
        self.result: object = None

    def __iadd__(self, expression: Expression | str) -> State:
        self._append(list(flat(expression)))
        return self

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 (a text, or texts where forks were joined)
        """A text; a list of texts where forks were joined. Raises KeyError, or the error of its generation."""
        return self.get(name)

    def get(self, name: str) -> Value:
        """As `s[name]`."""
        return self._client.wait(self._core.get(name))

    def output(self, name: str) -> CompletionOutput | Scored:
        """Ids, logprobs and ending of a generation, or the logprobs of a selection."""
        return self._client.wait(self._core.output(name))

    def text(self) -> str:
        """All text, once everything appended so far has run."""
        return self._client.wait(self._core.text())

    def messages(self) -> list[dict[str, str]]:
        """Whole messages of the chat so far."""
        return self._client.wait(self._core.messages())

    def sync(self) -> None:
        """Waits until everything appended so far has run. Raises its error."""
        self._client.wait(self._core.sync())

    def fork(self, count: int) -> Forks:
        """So many states that go on from here, beside each other."""
        return Forks(self._client, self._core, self._client.wait(self._core.fork(count)))

    def text_iter(self, name: str = "") -> Iterator[str]:
        """New text as it comes, until the program ends; with a name that variable's alone."""
        parts = self._core.text_iter(name)

        async def following() -> str | None:
            return await anext(parts, None)

        while (part := self._client.wait(following())) is not None:
            yield part

    @property
    def usage(self) -> Usage:
        """Tokens of all requests of the program so far, forks included."""
        return self._core.usage

    @property
    def error(self) -> BaseException | None:
        """The error that ended this state, None if none did."""
        return self._core.error

    def system(self, *parts: Expression | str) -> contextlib.AbstractContextManager[None]:
        """Appends a message; without parts it is a context manager around what is appended meanwhile."""
        return self._message("system", system, parts)

    def user(self, *parts: Expression | str) -> contextlib.AbstractContextManager[None]:
        """As system()."""
        return self._message("user", user, parts)

    def assistant(self, *parts: Expression | str) -> contextlib.AbstractContextManager[None]:
        """As system()."""
        return self._message("assistant", assistant, parts)

    def _message(
        self, role: Role, make: Callable[..., Expression], parts: Sequence[Expression | str]
    ) -> contextlib.AbstractContextManager[None]:
        if parts:
            self._append(list(flat(make(*parts))))
            return contextlib.nullcontext()
        return self._around(role)

    @contextlib.contextmanager
    def _around(self, role: Role) -> Iterator[None]:
        self._append([RoleBegin(role)])
        yield
        self._append([RoleEnd(role)])

    def _append(self, parts: list[Part]) -> None:
        self._client.call(partial(self._core.append, parts))


class Forks:
    """Forks of one state. `forks += expression` appends to each."""

    def __init__(self, client: Client, parent: AsyncState, cores: Sequence[AsyncState]) -> None:
        self._client = client
        self._parent = parent
        self._cores = cores
        self._states = [State(client, core) for core in cores]

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __getitem__(self, index: int) -> State:
        return self._states[index]

    def __setitem__(self, index: int, state: State) -> None:
        # `forks[0] += ...` assigns what __iadd__ returned.
        assert state is self._states[index], "a fork cannot be replaced"

    def __iadd__(self, expression: Expression | str) -> Forks:
        for state in self._states:
            state += expression
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Waits for all. gather_variable: each variable that the forks made becomes, in the state that was forked, the
        list of their values; concatenate: what each of them appended is appended there."""
        self._client.wait(self._parent.join(self._cores, mode))
