"""The Anthropic SDK: whole and streamed messages, blocks, schemas, counted tokens, and errors by its own types."""

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
schema = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
schema["additionalProperties"] = False
shape = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
shaped = client.messages.create(
    messages=messages, **{**options, "max_tokens": 400, "extra_body": {**shape, "temperature": 0}}
)
assert json.loads(shaped.content[0].text)["side"] in ("left", "right"), shaped
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
print("done")
