"""Language for programs of several generations: gen, select, fork, join, roles.

@function
def answer(s, question):
    s += user(question)
    s += assistant(gen("reasoning", max_tokens=64) + "\\nSo: " + select("verdict", ["yes", "no"]))

with Client(["127.0.0.1:50050"]) as client:
    print(answer.run("Is 7 prime?", client=client)["verdict"])
"""

from radixmesh.client.lang.async_state import AsyncState
from radixmesh.client.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from radixmesh.client.lang.expressions import Expression, assistant, gen, select, system, user
from radixmesh.client.lang.program import Program, function
from radixmesh.client.lang.state import Forks, State

__all__ = [
    "AsyncState",
    "Expression",
    "Forks",
    "Program",
    "State",
    "assistant",
    "function",
    "gen",
    "greedy_token_selection",
    "select",
    "system",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
]
