"""Requests whose whole answer is known beforehand, for tests that disturb the mesh while it answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from radixmesh.client import AsyncClient
from radixmesh.client.results import Completion
from radixmesh.daemons.runtime.model_folder.fingerprint import read_model_identity
from radixmesh.daemons.runtime.sampling import output_seed
from radixmesh.daemons.worker.simulated.token_source import Alphabet, simulated_continuation

if TYPE_CHECKING:
    from radixmesh.client.options import Message, Options

MODELS = Path(__file__).parents[2] / "compose" / "models"
MODEL = MODELS / "tiny-llama"
STOP_ID_REASON, LENGTH_REASON = "stop", "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One output, whole."""

    ids: tuple[int, ...]
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request and, once known, its answers in order of index."""

    name: str
    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    options: Options = field(default_factory=dict)  # type: ignore[assignment]
    answers: tuple[Answer, ...] = ()

    async def run(self, client: AsyncClient) -> tuple[Answer, ...]:
        """The mesh's answers."""
        return answers_of(await client.complete(self.prompt, messages=self.messages, **self.options))

    def learned(self, answers: tuple[Answer, ...]) -> Job:
        return replace(self, answers=answers)


def answers_of(completion: Completion) -> tuple[Answer, ...]:
    answers = []
    for output in completion.outputs:
        assert output.finish is not None, f"output {output.index} of {completion.request_id} has no finish"
        answers.append(Answer(ids=tuple(output.ids), text=output.text, reason=output.finish.reason))
    return tuple(answers)


def recitations(model: str = "tiny-llama", *, with_sampled: bool = True) -> list[Job]:
    """Text that a tiny model was trained to give: greedy, so the manifest (made by transformers) is the oracle.

    `with_sampled` adds requests at temperature 1 with n = 2, a stop string and penalties, whose answers are not in the
    manifest.
    """
    jobs = []
    for entry in json.loads((MODELS / model / "recitations.json").read_text()):
        answer = Answer(ids=tuple(entry["expected_ids"]), text=entry["expected"], reason=STOP_ID_REASON)
        jobs.append(
            Job(
                name=entry["name"],
                prompt=entry.get("prompt"),
                messages=entry.get("messages"),
                options={"temperature": 0.0},
                answers=(answer,),
            )
        )
    if with_sampled:
        jobs += sampled_recitations()
    return jobs


def recited_ids(name: str, model: str = "tiny-llama") -> list[int]:
    """Prompt and answer of a recitation."""
    entries = {entry["name"]: entry for entry in json.loads((MODELS / model / "recitations.json").read_text())}
    return [*entries[name]["prompt_ids"], *entries[name]["expected_ids"]]


def sampled_recitations() -> list[Job]:
    """Requests whose answers depend on the noise, the penalties, or a stop string."""
    at_one: Options = {"temperature": 1.0, "n": 2, "max_tokens": 160, "ignore_eos": True}
    # Answers to these seeds stay where weights change by 1e-6 of themselves: a GPU rounds otherwise in other batches.
    return [
        Job(name="sampled.tyger", prompt="The Tyger", options={**at_one, "seed": 11}),
        Job(name="sampled.lorelei", prompt="Lorelei", options={**at_one, "seed": 22, "top_p": 0.95}),
        Job(name="sampled.genesis", prompt="Genesis 1", options={**at_one, "seed": 13, "top_k": 20}),
        Job(
            name="sampled.penalties",
            prompt="The Twelve Days",
            options={
                **at_one,
                "seed": 14,
                "temperature": 1.2,
                "repetition_penalty": 1.1,
                "frequency_penalty": 0.2,
                "presence_penalty": 0.1,
                "min_p": 0.01,
            },
        ),
        Job(name="stopped.jabberwocky", prompt="Jabberwocky", options={"temperature": 0.0, "stop": ["vorpal sword"]}),
    ]


def simulated_jobs(
    num: int, *, num_tokens: int = 300, seed: int = 5, prompt_lens: tuple[int, int] = (5, 200)
) -> list[Job]:
    """Made-up prompts for a simulated worker on the tiny model's vocabulary, outputs of num_tokens / 2 to num_tokens.

    Every second prompt is a text, for the tokenizer; every fourth request has n = 2 and is sampled.
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    alphabet = simulated_alphabet()
    random = np.random.default_rng(seed)
    jobs = []
    for number in range(num):
        prompt_ids = random.choice(alphabet.ordinary, int(random.integers(*prompt_lens))).tolist()
        prompt: str | list[int] = prompt_ids
        if number % 2:
            prompt = tokenizer.decode(prompt_ids)
            prompt_ids = tokenizer.encode(prompt).ids
        length = int(random.integers(num_tokens // 2, num_tokens + 1))
        is_sampled = number % 4 == 0
        num_outputs = 2 if is_sampled else 1
        options: Options = {
            "temperature": 1.0 if is_sampled else 0.0,
            "n": num_outputs,
            "seed": number,
            "max_tokens": length,
        }
        answers = []
        for index in range(num_outputs):
            ids = simulated_continuation(
                prompt_ids,
                length,
                alphabet=alphabet,
                temperature=1.0 if is_sampled else 0.0,
                seed=output_seed(number, index),
            )
            text = tokenizer.decode(ids, skip_special_tokens=True)
            answers.append(Answer(ids=tuple(ids), text=text, reason=LENGTH_REASON))
        jobs.append(Job(name=f"simulated.{number}", prompt=prompt, options=options, answers=tuple(answers)))
    return jobs


def simulated_alphabet() -> Alphabet:
    """The ids that a simulated worker samples with the tiny model's folder."""
    identity = read_model_identity(MODEL)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    special = [id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    return Alphabet.of(identity.vocab_size, special_ids=special, eos_ids=identity.eos_ids)
