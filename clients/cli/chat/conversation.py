"""Conversation of a chat: the messages that go to the model with the next question. No I/O."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from radixmesh.client.options import Message


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Questions and answers in turn, behind an optional system message.

    The last question may be without an answer (it failed, or was stopped at once): the next one replaces it.
    """

    system: str = ""
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """True if the last question has no answer."""
        return len(self.questions) > len(self.answers)

    @property
    def messages(self) -> list[Message]:
        """System message, questions and answers, in the order in which they were said."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for number, question in enumerate(self.questions):
            messages.append({"role": "user", "content": question})
            if number < len(self.answers):
                messages.append({"role": "assistant", "content": self.answers[number]})
        return messages

    def ask(self, question: str) -> None:
        """Adds a question, in place of one that got no answer."""
        if self.is_open:
            self.questions.pop()
        self.questions.append(question)

    def answer(self, text: str) -> None:
        """Adds the answer to the last question; an empty one leaves it open."""
        assert self.is_open, "an answer without a question"
        if text:
            self.answers.append(text)

    def reopen(self) -> bool:
        """Takes the last answer back, so that its question can be asked again; False if nothing was asked yet."""
        if not self.is_open and self.answers:
            self.answers.pop()
        return self.is_open

    def clear(self) -> None:
        """Forgets questions and answers; the system message stays."""
        self.questions.clear()
        self.answers.clear()

    def transcript(self, *, as_json: bool) -> str:
        """The conversation for a file: a JSON list of messages, or text to read."""
        if as_json:
            return json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
        parts = [f"{message['role']}:\n{message['content']}\n" for message in self.messages]
        return "\n".join(parts)
