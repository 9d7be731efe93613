"""Ollama's Python client: chats and prompts, whole and streamed, schemas, tools, the list of models, errors."""

import json
import sys

import ollama

URL, MODEL = sys.argv[1:]
client = ollama.Client(host=URL.removesuffix("/v1"))
messages = [{"role": "user", "content": "Who are you?"}]
options = {"temperature": 0, "num_predict": 32}
whole = client.chat(model=MODEL, messages=messages, options=options)
assert whole.message.content and whole.done and whole.eval_count > 0
parts = list(client.chat(model=MODEL, messages=messages, options=options, stream=True))
assert "".join(part.message.content for part in parts) == whole.message.content and parts[-1].done
answer = client.generate(model=MODEL, prompt="Who are you?", options=options)
assert answer.response == whole.message.content
streamed = client.generate(model=MODEL, prompt="Who are you?", options=options, stream=True)
assert "".join(part.response for part in streamed) == answer.response
print("checked text streams")
schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
shaped = client.chat(model=MODEL, messages=messages, format=schema, options={"num_predict": 60})
assert json.loads(shaped.message.content)["a"] in (1, 2)
print("checked structured")


def turn(side: str) -> str:
    """Turns.

    Args:
        side: left or right
    """
    return f"turned {side}"


# Ollama has no choice of tools, so the format makes the model call.
side = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
call = {
    "type": "object",
    "properties": {"name": {"const": "turn"}, "parameters": {**side, "additionalProperties": False}},
}
call = {**call, "required": ["name", "parameters"], "additionalProperties": False}
asked = {
    "model": MODEL,
    "messages": messages,
    "tools": [turn],
    "format": call,
    "options": options | {"num_predict": 200},
}
called = client.chat(**asked).message
(use,) = called.tool_calls
assert use.function.name == "turn" and turn(**use.function.arguments).startswith("turned "), called
streamed = [use for part in client.chat(**asked, stream=True) for use in part.message.tool_calls or ()]
assert [use.function for use in streamed] == [use.function], streamed
history = [*messages, called, {"role": "tool", "tool_name": "turn", "content": "turned"}]
assert client.chat(**{**asked, "messages": history}).message.tool_calls
print("checked tools")
assert [model.model for model in client.list().models] == [MODEL]
assert client.show(MODEL).modelinfo["radixmesh.context_length"] > 0
assert [model.model for model in client.ps().models] == [MODEL]
for fields in ({"model": "nobody"}, {"options": {"top_p": 7}}):
    try:
        client.chat(**{"model": MODEL, "messages": messages, **fields})
    except ollama.ResponseError as error:
        print(error.status_code, error.error[:100])
        assert error.status_code in (400, 404)
    else:
        raise AssertionError(f"no error for {fields}")
print("checked errors")
