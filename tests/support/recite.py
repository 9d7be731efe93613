"""Checks that a runner of the tiny model, driven by plans, still gives the texts that the model was taught."""

from __future__ import annotations

import json

from radixmesh.daemons.worker.runner import ModelRunner
from support.llama_folders import TINY_LLAMA
from support.plan_driver import GREEDY, PlanDriver

_MOST_TOKENS = 60
_NUM_TEXTS = 8


def recited_wrongly(runner: ModelRunner, *, lag: int, chunk_len: int, is_alone: bool = False) -> tuple[int, int]:
    """Tokens that are not those of the text, of how many: of short texts, one after the other if is_alone, else their
    prompts in chunks beside the decodes of those before. A request that errs once may err to its end."""
    items = json.loads((TINY_LLAMA / "recitations.json").read_text(encoding="utf-8"))
    texts = [item for item in items if len(item["expected_ids"]) <= _MOST_TOKENS][:_NUM_TEXTS]
    groups = [[text] for text in texts] if is_alone else [texts]
    num_wrong = num_tokens = 0
    for group in groups:
        runner.clear()
        driver = PlanDriver(runner, lag=lag)
        for slot, text in enumerate(group):
            driver.add(slot, text["prompt_ids"], GREEDY, chunk_len=chunk_len, num_out=2 * _MOST_TOKENS)
        driver.finish(_MOST_TOKENS)
        for slot, text in enumerate(group):
            want = text["expected_ids"]
            num_wrong += sum(a != b for a, b in zip(driver.tokens[slot][: len(want)], want, strict=True))
            num_tokens += len(want)
    return num_wrong, num_tokens
