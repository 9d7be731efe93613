"""litellm: chat, streams, schemas, tool calls, text, embeddings, and errors by its own types."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

URL, MODEL = sys.argv[1:]
options = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0, "max_retries": 0}
messages = [{"role": "user", "content": "Who are you?"}]
whole = litellm.completion(messages=messages, temperature=0, max_tokens=16, **options)
assert whole.choices[0].message.content and whole.usage.completion_tokens
parts = litellm.completion(
    messages=messages, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True}, **options
)
texts = [part.choices[0].delta.content or "" for part in parts if part.choices]
assert "".join(texts) == whole.choices[0].message.content
print("checked text streams")
schema = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
schema["additionalProperties"] = False
shape = {"type": "json_schema", "json_schema": {"name": "turn", "schema": schema, "strict": True}}
shaped = litellm.completion(messages=messages, response_format=shape, temperature=0, max_tokens=400, **options)
assert json.loads(shaped.choices[0].message.content)["side"] in ("left", "right")
print("checked structured")
tool = {"type": "function", "function": {"name": "turn", "description": "Turns.", "parameters": schema}}
called = litellm.completion(messages=messages, tools=[tool], tool_choice="required", temperature=0, **options)
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "turn" and json.loads(call.function.arguments)["side"] in ("left", "right"), called
history = [*messages, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "turned"}]
asked = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "turn"}}, "temperature": 0}
assert litellm.completion(messages=history, **asked, **options).choices[0].message.tool_calls
print("checked tools")
text_options = {**options, "model": f"text-completion-openai/{MODEL}"}
assert litellm.text_completion(prompt="The Tyger", max_tokens=8, **text_options).choices[0].text
vectors = litellm.embedding(input=["The Tyger", "Lorelei"], **options)
assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) > 8
print("checked embeddings")
for wanted, more in (
    (litellm.ContextWindowExceededError, {"messages": [{"role": "user", "content": "word " * 5000}]}),
    (litellm.BadRequestError, {"messages": messages, "temperature": -1}),
    (litellm.NotFoundError, {"messages": messages, "model": "openai/nobody"}),
):
    try:
        litellm.completion(**{**options, **more})
    except wanted as error:
        print(wanted.__name__, str(error)[:100])
    else:
        raise AssertionError(f"no {wanted.__name__}")
print("checked errors")
