"""instructor: answers as its models in JSON and TOOLS modes, guided by the mesh."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Turn(BaseModel):
    side: Literal["left", "right"]


plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
messages = [{"role": "user", "content": "Where?"}]
client = instructor.from_openai(plain, mode=instructor.Mode.MD_JSON)
whole = client.chat.completions.create(model=MODEL, messages=messages, response_model=None, max_tokens=16)
assert whole.choices[0].message.content
print("checked text")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(plain, mode=mode)
    turn = client.chat.completions.create(
        model=MODEL, messages=messages, response_model=Turn, max_retries=0, max_tokens=400, temperature=0
    )
    assert isinstance(turn, Turn)
    parts = client.chat.completions.create_partial(
        model=MODEL, messages=messages, response_model=Turn, max_retries=0, max_tokens=400, temperature=0
    )
    assert list(parts)[-1].side in ("left", "right")
    print("checked streams", "tools" if mode is instructor.Mode.TOOLS else "structured")
