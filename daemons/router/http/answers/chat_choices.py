"""Parsed chats in the form of OpenAI's chat completions: deltas of chunks, whole messages, why they ended."""

from __future__ import annotations

from radixmesh.daemons.router.chat.parts import (
    ChatMessage,
    ChatPart,
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from radixmesh.daemons.router.http.answers.usage import FINISH_REASONS
from radixmesh.daemons.router.requests.updates import Finished
from radixmesh.daemons.runtime.finish_reason import FinishReason

JsonObject = dict[str, object]


def delta_of(part: ChatPart) -> JsonObject:
    """The `delta` of a chunk."""
    match part:
        case ContentDelta(text=text):
            return {"content": text}
        case ReasoningDelta(text=text):
            return {"reasoning_content": text}
        case ToolCallStart(call=call, id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(call=call, text=text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def message_of(message: ChatMessage) -> JsonObject:
    """The `message` of a whole answer. content is null beside calls where there is none."""
    told: JsonObject = {"role": "assistant", "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.tool_calls:
        told["content"] = message.content or None
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return told


def finish_reason(finished: Finished, num_calls: int) -> str:
    """tool_calls for an answer with calls that ended by itself."""
    if num_calls and finished.reason == FinishReason.STOP:
        return "tool_calls"
    return FINISH_REASONS[finished.reason]
