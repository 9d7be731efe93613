"""The text of a state, and the chat that its roles make of it. No I/O."""

from __future__ import annotations

from radixmesh.client.errors import InvalidRequestError
from radixmesh.client.lang.expressions import Role


class Transcript:
    """Text so far, and the messages of closed roles. role: the open one, None outside of roles."""

    def __init__(self) -> None:
        self.text = ""
        self.messages: list[dict[str, str]] = []
        self.role: Role | None = None
        self._role_start = 0

    def copy(self) -> Transcript:
        made = Transcript()
        made.text, made.messages, made.role = self.text, list(self.messages), self.role
        made._role_start = self._role_start
        return made

    @property
    def has_roles(self) -> bool:
        return self.role is not None or bool(self.messages)

    @property
    def open_content(self) -> str:
        """Content so far of the open message."""
        return self.text[self._role_start :]

    def add(self, text: str) -> None:
        """Raises InvalidRequestError for a text between two messages."""
        if self.role is None and self.messages and text:
            raise _misplaced("a text stands between two messages: put it into system(...), user(...) or assistant(...)")
        self.text += text

    def begin(self, role: Role) -> None:
        """Raises InvalidRequestError within another message, or after text without a role."""
        if self.role is not None:
            raise _misplaced(f"a message of {role} begins within one of {self.role}: end that one first")
        if self.text and not self.messages:
            raise _misplaced("a message begins after text without a role: use roles throughout, or not at all")
        self.role, self._role_start = role, len(self.text)

    def end(self, role: Role) -> None:
        if self.role != role:
            raise _misplaced(f"a message of {role} ends where none of it is open")
        self.messages.append({"role": role, "content": self.open_content})
        self.role = None

    def check_generates(self) -> None:
        """Raises InvalidRequestError where a model cannot generate."""
        if self.has_roles and self.role != "assistant":
            raise _misplaced("gen and select stand in assistant(...) once roles are used")


def _misplaced(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "INVALID_CHAT")
