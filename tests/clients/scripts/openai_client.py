"""The openai SDK: chat, streams, schemas, tool calls, logprobs, embeddings, models, raw headers, errors."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Who are you?"}]
whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16)
stream = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=16, stream=True)
texts = [part.choices[0].delta.content or "" for part in stream if part.choices]
assert "".join(texts) == whole.choices[0].message.content
scored = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=2, max_tokens=4)
assert len(scored.choices[0].logprobs.content[0].top_logprobs) == 2
assert client.completions.create(model=MODEL, prompt=["a", "b"], n=2, max_tokens=4).choices[3].index == 3
vector = client.embeddings.create(model=MODEL, input="The Tyger", dimensions=16)
assert len(vector.data[0].embedding) == 16
print("checked text streams embeddings")
assert client.models.retrieve(MODEL).id == MODEL and [model.id for model in client.models.list()] == [MODEL]
answer = client.responses.create(model=MODEL, input="Who are you?", temperature=0)
with client.responses.stream(model=MODEL, input="Who are you?", temperature=0) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == stream.get_final_response().output_text == answer.output_text
went_on = client.responses.create(model=MODEL, input="And?", previous_response_id=answer.id, max_output_tokens=4)
assert went_on.usage.input_tokens > answer.usage.input_tokens and client.responses.retrieve(answer.id).id == answer.id


class Turn(BaseModel):
    """A side to turn to."""

    side: Literal["left", "right"]


SIDES = ("left", "right")
parsed = client.chat.completions.parse(
    model=MODEL, messages=messages, response_format=Turn, temperature=0, max_tokens=400
)
assert parsed.choices[0].message.parsed.side in SIDES
shaped = client.responses.parse(model=MODEL, input="Where?", text_format=Turn, temperature=0, max_output_tokens=400)
assert shaped.output_parsed.side in SIDES
print("checked structured")
tool = openai.pydantic_function_tool(Turn)
asked = {"model": MODEL, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
answered = client.chat.completions.create(messages=messages, **asked).choices[0]
(call,) = answered.message.tool_calls
assert answered.finish_reason == "tool_calls" and json.loads(call.function.arguments)["side"] in SIDES, answered
with client.chat.completions.stream(messages=messages, **asked) as stream:
    events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
assert [event.parsed_arguments.side in SIDES for event in events] == [True]
history = [*messages, answered.message, {"role": "tool", "tool_call_id": call.id, "content": "turned"}]
assert client.chat.completions.create(messages=history, **asked).choices[0].message.tool_calls
print("checked tools")
raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=2, user="me")
assert raw.headers["x-request-id"] and "user" in raw.headers["x-radixmesh-ignored-fields"]
for wanted, more in (
    (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    (openai.BadRequestError, {"response_format": {"type": "json_object"}, "temperature": 3e9}),
    (openai.NotFoundError, {"model": "nobody"}),
):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": messages, "max_tokens": 2, **more})
    except wanted as error:
        print(type(error).__name__, error.code, error.param)
    else:
        raise AssertionError(f"no {wanted.__name__}")
print("checked errors")
