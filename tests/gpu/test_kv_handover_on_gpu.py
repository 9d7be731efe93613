"""Prefill and decode by two workers on one GPU: KV goes through staging in host memory, and the output is the text."""

from __future__ import annotations

import json

import pytest
from mesh.test_kv_handover import pair, until
from support.runner_contract import MODEL

from radixmesh.common.v1 import common_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.mark.parametrize("sizes", [(1, 1), (16, 4)])
async def test_the_output_is_the_text(sizes: tuple[int, int]) -> None:
    entries = json.loads((MODEL / "recitations.json").read_text(encoding="utf-8"))
    entry = next(e for e in entries if len(e["prompt_ids"]) < 30 and len(e["expected_ids"]) > 70)
    ids = entry["prompt_ids"] + entry["expected_ids"]
    prompt, expected = ids[:60], ids[60:72]
    async with pair("cuda", sizes) as both:
        result = await both.reserve("t", prompt)
        assert result.target.num_tokens == len(prompt) // max(sizes) * max(sizes)
        first = await both.prefill(result.target, prompt)
        assert first.finished.reason == common_pb2.FINISH_REASON_HANDED_OVER
        rest = await both.decode(first.tokens, "t", prompt)
        assert first.tokens + rest.tokens == expected
        assert rest.finished.usage.cached_tokens == result.target.num_tokens
        await until(both.is_clean)
