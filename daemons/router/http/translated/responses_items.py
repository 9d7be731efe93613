"""Output items of /v1/responses, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterable

from radixmesh.daemons.router.chat.parts import (
    ChatMessage,
    ChatPart,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from radixmesh.daemons.router.http.bodies.json_text import dump

JsonObject = dict[str, object]


class OutputItems:
    """Items in the order in which the model began them, made of parts. response_id: their ids are made of it."""

    def __init__(self, response_id: str) -> None:
        self._suffix = response_id.partition("_")[2] or response_id
        self.items: list[JsonObject] = []
        self._texts: list[str] = []
        self._kind = ""
        self._sequence = 0

    def event(self, kind: str, **fields: object) -> bytes:
        """One event, numbered."""
        data = dump({"type": kind, **fields, "sequence_number": self._sequence})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def add(self, parts: Iterable[ChatPart]) -> bytes:
        """Events of parts that follow."""
        return b"".join(map(self._add, parts))

    def close(self, status: str = "completed") -> bytes:
        """Events that end the open item."""
        if not self._kind:
            return b""
        kind, text, item = self._kind, "".join(self._texts), self.items[-1]
        self._kind, self._texts = "", []
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            done = self.event("response.function_call_arguments.done", **self._place(), arguments=text)
            return done + self._item_done(item)
        part = {**_EMPTY[kind], "text": text}
        item["content"] = [part]
        events = self.event(f"response.{part['type']}.done", **self._place(), content_index=0, text=text, **_more(kind))
        events += self.event("response.content_part.done", **self._place(), content_index=0, part=part)
        return events + self._item_done(item)

    def message(self) -> ChatMessage:
        """The items as one message of a chat."""
        made = ChatMessage()
        for item in self.items:
            if item["type"] == "function_call":
                made.tool_calls.append(ToolCall(str(item["call_id"]), str(item["name"]), str(item["arguments"])))
                continue
            content = item["content"]
            assert isinstance(content, list)
            text = "".join(part["text"] for part in content)
            if item["type"] == "message":
                made.content += text
            else:
                made.reasoning += text
        return made

    def _add(self, part: ChatPart) -> bytes:
        match part:
            case ContentDelta(text=text):
                return self._text("message", text)
            case ReasoningDelta(text=text):
                return self._text("reasoning", text)
            case ToolCallStart(id=call_id, name=name):
                call: JsonObject = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                return self._open("function_call", "fc", call)
            case ToolCallArguments(text=text):
                self._texts.append(text)
                return self.event("response.function_call_arguments.delta", **self._place(), delta=text)

    def _text(self, kind: str, text: str) -> bytes:
        events = b""
        if self._kind != kind:
            head: JsonObject = {"type": kind, "content": []}
            if kind == "message":
                events = self._open(kind, "msg", {**head, "role": "assistant"})
            else:
                events = self._open(kind, "rs", {**head, "summary": []})
            events += self.event(
                "response.content_part.added", **self._place(), content_index=0, part={**_EMPTY[kind], "text": ""}
            )
        self._texts.append(text)
        name = f"response.{_EMPTY[kind]['type']}.delta"
        return events + self.event(name, **self._place(), content_index=0, delta=text, **_more(kind))

    def _open(self, kind: str, prefix: str, fields: JsonObject) -> bytes:
        closed = self.close()
        self._kind = kind
        item = {"id": f"{prefix}_{self._suffix}_{len(self.items)}", **fields, "status": "in_progress"}
        self.items.append(item)
        return closed + self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _item_done(self, item: JsonObject) -> bytes:
        return self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _place(self) -> JsonObject:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


_EMPTY: dict[str, JsonObject] = {
    "message": {"type": "output_text", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text"},
}


def _more(kind: str) -> JsonObject:
    return {"logprobs": []} if kind == "message" else {}
