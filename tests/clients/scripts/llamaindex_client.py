"""LlamaIndex: chat, completion and streams of an OpenAI-like model, its tools and answers as models."""

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
options = {"model": MODEL, "api_base": URL, "api_key": "none", "temperature": 0.0, "max_tokens": 16, "max_retries": 0}
chat = OpenAILike(**options, is_chat_model=True, context_window=2048)
messages = [ChatMessage(role="user", content="Who are you?")]
whole = chat.chat(messages)
assert whole.message.content
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == whole.message.content
text = OpenAILike(**options, is_chat_model=False, context_window=2048)
assert text.complete("The Tyger").text
assert "".join(part.delta or "" for part in text.stream_complete("The Tyger")) == text.complete("The Tyger").text
print("checked text streams")


class Turn(BaseModel):
    """A side to turn to."""

    side: Literal["left", "right"]


def turn(side: Literal["left", "right"]) -> str:
    """Turns."""
    return f"turned {side}"


calling = OpenAILike(
    **{**options, "max_tokens": 400}, is_chat_model=True, is_function_calling_model=True, context_window=2048
)
tool = FunctionTool.from_defaults(turn)
answer = calling.chat_with_tools([tool], user_msg="Where?", tool_required=True, allow_parallel_tool_calls=False)
(call,) = calling.get_tool_calls_from_response(answer)
assert call.tool_name == "turn" and call.tool_kwargs["side"] in ("left", "right"), call
print("checked tools")
assert isinstance(calling.structured_predict(Turn, PromptTemplate("Where?")), Turn)
print("checked structured")
