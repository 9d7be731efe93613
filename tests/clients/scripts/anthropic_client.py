"""The Anthropic SDK: messages whole and streamed, blocks, schemas, tools, counted tokens, errors by its own types."""

import json
import sys

import anthropic

URL, MODEL = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Who are you?"}]
# Newer versions of the SDK have no argument for it.
options = {"model": MODEL, "max_tokens": 32, "extra_body": {"temperature": 0}}
whole = client.messages.create(messages=messages, **options)
assert whole.content[0].type == "text" and whole.content[0].text and whole.usage.output_tokens > 0
with client.messages.stream(messages=messages, **options) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text == final.content[0].text, (text, whole)
assert final.stop_reason == whole.stop_reason and final.usage.output_tokens == whole.usage.output_tokens
chat = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": whole.content},
    {"role": "user", "content": "And?"},
]
assert client.messages.create(messages=chat, system="Be brief.", **options).content
counted = client.messages.count_tokens(model=MODEL, messages=messages)
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
stopped = client.messages.create(messages=messages, stop_sequences=[text[2:4]], **options)
assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == text[2:4]
print("checked text streams")
schema = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
schema["additionalProperties"] = False
shape = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
shaped = client.messages.create(
    messages=messages, **{**options, "max_tokens": 400, "extra_body": {**shape, "temperature": 0}}
)
assert json.loads(shaped.content[0].text)["side"] in ("left", "right"), shaped
print("checked structured")
tool = {"name": "turn", "description": "Turns.", "input_schema": schema}
calling = {**options, "max_tokens": 400, "tools": [tool]}
calling["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
called = client.messages.create(messages=messages, **calling)
(use,) = [block for block in called.content if block.type == "tool_use"]
assert called.stop_reason == "tool_use" and use.name == "turn" and use.input["side"] in ("left", "right"), called
with client.messages.stream(messages=messages, **calling) as stream:
    pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
    (streamed,) = stream.get_final_message().content
assert streamed.input == use.input == json.loads(pieces), (streamed, use, pieces)
result = {"type": "tool_result", "tool_use_id": use.id, "content": "turned"}
history = [*messages, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
calling["tool_choice"] = {"type": "tool", "name": "turn", "disable_parallel_tool_use": True}
assert client.messages.create(messages=history, **calling).content[0].input["side"] in ("left", "right")
print("checked tools")
for wanted, fields in (
    (anthropic.NotFoundError, {"model": "nobody"}),
    (anthropic.BadRequestError, {"extra_body": {"temperature": -1}}),
):
    try:
        client.messages.create(messages=messages, **{**options, **fields})
    except wanted as error:
        print(wanted.__name__, error.message[:100])
    else:
        raise AssertionError(f"no {wanted.__name__}")
print("checked errors")
