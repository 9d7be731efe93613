"""The openai SDK: chat, streams, tools in the history, logprobs, embeddings, models, raw headers, errors."""

import sys

import openai

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
assert client.models.retrieve(MODEL).id == MODEL and [model.id for model in client.models.list()] == [MODEL]
answer = client.responses.create(model=MODEL, input="Who are you?", temperature=0)
with client.responses.stream(model=MODEL, input="Who are you?", temperature=0) as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == stream.get_final_response().output_text == answer.output_text
went_on = client.responses.create(model=MODEL, input="And?", previous_response_id=answer.id, max_output_tokens=4)
assert went_on.usage.input_tokens > answer.usage.input_tokens and client.responses.retrieve(answer.id).id == answer.id
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
