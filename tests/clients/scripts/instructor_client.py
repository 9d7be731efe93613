"""instructor: plain answers through its client, and what it says where constraints are not offered."""

import sys

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Answer(BaseModel):
    name: str


plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Who are you?"}]
client = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
whole = client.chat.completions.create(model=MODEL, messages=messages, response_model=None, max_tokens=16)
assert whole.choices[0].message.content
for mode in (instructor.Mode.JSON, instructor.Mode.TOOLS):
    client = instructor.from_openai(plain, mode=mode)
    try:
        client.chat.completions.create(
            model=MODEL, messages=messages, response_model=Answer, max_retries=0, max_tokens=32
        )
    except Exception as error:
        said = str(error)
        assert "not offered" in said or "validation" in said.lower() or "JSON" in said, said
        print(mode, type(error).__name__, said[:120].replace("\n", " "))
    else:
        print(mode, "served")
