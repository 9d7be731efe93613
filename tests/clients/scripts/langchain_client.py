"""LangChain: invoke, stream, batch, a bound tool, embeddings, and the error of a prompt that is too long."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
options = {"base_url": URL, "api_key": "none", "model": MODEL, "max_retries": 0}
chat = ChatOpenAI(**options, temperature=0, max_tokens=16, stream_usage=True)
whole = chat.invoke("Who are you?")
assert whole.content and whole.usage_metadata["output_tokens"] > 0
chunks = list(chat.stream("Who are you?"))
assert "".join(chunk.content for chunk in chunks) == whole.content, chunks
assert any(chunk.usage_metadata for chunk in chunks)
assert [answer.content for answer in chat.batch(["Who are you?"] * 3)] == [whole.content] * 3
print("checked text streams")


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


assert chat.bind_tools([weather]).invoke("How is the weather?") is not None


@tool
def turn(side: Literal["left", "right"]) -> str:
    """Turns."""
    return f"turned {side}"


class Turn(BaseModel):
    """A side to turn to."""

    side: Literal["left", "right"]


guided = ChatOpenAI(**options, temperature=0, max_tokens=150)
for method in ("json_schema", "function_calling"):
    assert isinstance(guided.with_structured_output(Turn, method=method).invoke("Where?"), Turn), method
print("checked structured")
for choice in ("any", "turn"):
    called = guided.bind_tools([turn], tool_choice=choice, parallel_tool_calls=False).invoke("Where?")
    (call,) = called.tool_calls
    answer = turn.invoke(call)
    assert answer.content.startswith("turned "), answer
    history = [HumanMessage("Where?"), called, answer]
    assert guided.bind_tools([turn], tool_choice=choice, parallel_tool_calls=False).invoke(history).tool_calls
parts = list(guided.bind_tools([turn], tool_choice="turn").stream("Where?"))
whole_call = parts[0]
for part in parts[1:]:
    whole_call += part
assert whole_call.tool_calls[0]["args"]["side"] in ("left", "right"), whole_call
print("checked tools")
assert chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
embeddings = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
assert len(embeddings.embed_documents(["The Tyger", "Lorelei"])) == 2
assert len(embeddings.embed_query("The Tyger")) > 8
print("checked embeddings")
try:
    chat.invoke("word " * 5000)
except Exception as error:
    assert "context" in str(error).lower() and type(error).__name__ in (
        "OpenAIContextOverflowError",
        "BadRequestError",
    ), type(error)
    print("checked errors")
else:
    raise AssertionError("a prompt beyond the context was taken")
