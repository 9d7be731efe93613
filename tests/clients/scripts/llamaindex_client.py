"""LlamaIndex: chat, completion and streams of an OpenAI-like model."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

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
