"""Scores of choices as continuations of a text, from logprobs of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, cast

from radixmesh.client.errors import InvalidRequestError
from radixmesh.client.lang.choices import Scored
from radixmesh.client.lang.expressions import Select
from radixmesh.client.lang.runtime import Runtime

if TYPE_CHECKING:
    from radixmesh.client.options import Options


async def score_choices(runtime: Runtime, prefix: str, part: Select, *, adds_special_tokens: bool) -> Scored:
    """Logprobs of each choice's tokens behind the prefix; of the prefix the cache's KV is enough.

    Where a choice's first letters join the prefix's last token to another one, that token counts as the choice's
    (SGLang's token healing). Raises InvalidRequestError for a choice whose first token nothing comes before.
    """
    texts = [prefix, *(prefix + choice for choice in part.choices)]
    known, *items = await runtime.encode(texts, add_special_tokens=adds_special_tokens)
    starts = [_first_of_choice(known.ids, item.ids) for item in items]
    if not all(starts):
        message = "select needs text before its choices: the first token of a prompt has no logprob"
        raise InvalidRequestError(message, "EMPTY_PROMPT")
    pairs = list(zip(items, starts, strict=True))
    conditional = await _all([_scored(runtime, item.ids, start) for item, start in pairs])
    if not part.method.needs_unconditional:
        return Scored(conditional)
    alone = await _all([_alone(runtime, item.ids[start:]) for item, start in pairs])
    return Scored(conditional, alone)


async def _all(works: Sequence[Coroutine[object, object, list[float]]]) -> list[list[float]]:
    """All results; the first error ends the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _alone(runtime: Runtime, ids: Sequence[int]) -> list[float]:
    """Logprobs without the prefix: nothing predicts the first, which counts as 0."""
    return [0.0, *(await _scored(runtime, ids, 1))] if len(ids) > 1 else [0.0]


async def _scored(runtime: Runtime, ids: Sequence[int], start: int) -> list[float]:
    options: Options = {
        **cast("Options", {name: value for name, value in runtime.shared_options.items() if name in _KEPT}),
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": True,
        "prompt_logprobs_start": start,
        "ids_only": True,
    }
    done = await runtime.complete(ids, options)
    assert done.prompt_logprobs is not None, "prompt logprobs were asked for"
    return done.prompt_logprobs.token_logprobs


# Options of the run that say where and for whom, and not how to sample.
_KEPT = frozenset(("model", "cache_salt", "priority", "tenant", "session", "deadline_s"))


def _first_of_choice(prefix: Sequence[int], whole: Sequence[int]) -> int:
    """Index of the first token that is not the prefix's; at least the last token is the choice's."""
    for index, (ours, theirs) in enumerate(zip(prefix, whole, strict=False)):
        if ours != theirs:
            return index
    return min(len(prefix), len(whole) - 1)
