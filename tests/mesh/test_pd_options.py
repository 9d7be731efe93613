"""Everything that a request may ask for, through a pair: the answers are those of one group, to the bit of logprobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mesh.test_pd import CHECKED, check_nothing_is_left, state_of
from support.mesh import running_mesh

from radixmesh.client.results import Completion

PROMPTS = ("Tyger Tyger, burning bright, In the forests of the night; ", "On the first day of Christmas my true love ")
REQUESTS: dict[str, dict[str, Any]] = {
    "several outputs": {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 24},
    "logprobs of the first token on": {"logprobs": 3, "temperature": 1.0, "seed": 6, "max_tokens": 16},
    "logprobs of several": {"logprobs": 2, "n": 2, "temperature": 0.7, "seed": 7, "max_tokens": 12},
    "prompt logprobs, which run in place": {
        "logprobs": 1,
        "prompt_logprobs": True,
        "temperature": 0.0,
        "max_tokens": 8,
    },
    "guided": {"regex": "([a-f]{3} ){6,9}end", "temperature": 1.0, "seed": 8, "max_tokens": 60},
    "guided, several": {"regex": "(yes|no)( and (yes|no)){3}", "n": 3, "temperature": 1.0, "seed": 9, "max_tokens": 40},
    "penalties": {"temperature": 1.0, "seed": 10, "presence_penalty": 1.5, "repetition_penalty": 1.2, "max_tokens": 24},
    "a least length": {"temperature": 1.0, "seed": 11, "min_tokens": 10, "max_tokens": 20},
    "a stop string": {"temperature": 0.0, "stop": ["e"], "max_tokens": 40},
    "one token": {"temperature": 0.0, "max_tokens": 1},
    "two tokens": {"temperature": 1.0, "seed": 12, "max_tokens": 2},
}
NGRAM = {"speculative_algorithm": "ngram", "speculative_num_steps": 3, "speculative_adaptive": "false"}


def seen(done: Completion) -> list[tuple[object, ...]]:
    """All that is the same whatever computes it."""
    return [
        (
            tuple(output.ids),
            output.text,
            None if output.finish is None else output.finish.reason,
            None if output.logprobs is None else tuple(output.logprobs.token_logprobs),
            None if output.logprobs is None else tuple(map(tuple, output.logprobs.top_ids)),
        )
        for output in done.outputs
    ]


async def answers(client: Any) -> dict[tuple[str, str], list[tuple[object, ...]]]:
    keys = [(name, prompt) for name in REQUESTS for prompt in PROMPTS]
    done = await asyncio.gather(*(client.complete(prompt, cache_salt=name, **REQUESTS[name]) for name, prompt in keys))
    return {key: seen(completion) for key, completion in zip(keys, done, strict=True)}


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("speculation", [{}, NGRAM], ids=["plain", "drafts"])
async def test_what_a_request_asks_for_holds_through_a_pair(speculation: dict[str, object]) -> None:
    async with running_mesh("cpu") as mesh:
        expected = await answers(mesh.client)
    services = {**CHECKED, "worker-prefill": {"cpu_threads": 1, "page_size": 4, **speculation}}
    async with running_mesh("pd", worker=speculation, services=services) as mesh:
        found = await answers(mesh.client)
        assert found == expected
        await check_nothing_is_left(mesh)
        # No two share a cache: all but those that ask for the prompt's logprobs came over.
        assert (await state_of(mesh, "scheduler")).num_kv_arrived >= 2 * (len(REQUESTS) - 1) - 4
        assert mesh.bugs == []
