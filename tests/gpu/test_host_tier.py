"""KV of the GPU that goes to page-locked memory and comes back: the same tokens, by every write policy."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.planner_world import World

pytest.importorskip("triton")

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy
from radixmesh.daemons.worker.cuda.host_tier import host_pool
from radixmesh.daemons.worker.cuda.host_tier.page_copies import EngineCopies, KernelCopies, PageCopies, StagedCopies
from radixmesh.daemons.worker.cuda.load import load_cuda_runner
from radixmesh.daemons.worker.runner import ModelRunner

pytestmark = pytest.mark.gpu

MODELS = Path(__file__).parents[2] / "compose" / "models"


def _runner(model: str, page_size: int, num_tokens: int) -> ModelRunner:
    settings = replace(
        TINY_SETTINGS,
        attention_backend="triton",
        page_size=page_size,
        num_pages=num_tokens // page_size,
        cuda_graphs=True,
        use_pdl=True,
    )
    return load_cuda_runner(MODELS / model, settings)


def _texts(model: str) -> list[tuple[list[int], list[int]]]:
    """Prompts of 70 tokens and the eight that the model was taught to follow: rounding changes none."""
    entries = json.loads((MODELS / model / "recitations.json").read_text())
    ids = {tuple((entry["prompt_ids"] + entry["expected_ids"])[:78]): entry for entry in entries}
    return [(list(text[:70]), list(text[70:])) for text, e in ids.items() if len(text) == 78 > len(e["prompt_ids"])]


@pytest.fixture(params=["engines", "staged", "kernel"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[PageCopies]:
    """Of copying pages, whatever the rows are."""
    way = {"engines": EngineCopies, "staged": StagedCopies, "kernel": KernelCopies}[request.param]

    def only(planes: object, words: object, pages_together: int, call: object) -> list[PageCopies]:
        return [way(planes, words) if way is KernelCopies else way(planes, words, pages_together, call)]

    monkeypatch.setattr(host_pool, "ways_for", only)
    return way


@pytest.mark.parametrize(("model", "page_size"), [("tiny-llama", 1), ("tiny-llama", 16), ("tiny-deepseek", 4)])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_recitation_with_kv_that_comes_and_goes(model: str, page_size: int, policy: str, way: type[PageCopies]) -> None:
    tiers = TierSettings(policy=WritePolicy(policy))
    runner = _runner(model, page_size, 240)
    world = World(runner=runner, num_slots=4, num_host_pages=2048 // page_size, tiers=tiers)
    assert {type(copies) for copies in runner.host_pool.copies} == {way}  # type: ignore[union-attr]
    texts = _texts(model)[:12]
    assert len(texts) > 6
    for number in range(3):
        records = [world.submit(prompt) for prompt, _ in texts]
        world.run(2)
        for record, (_, wanted) in zip(records, texts, strict=True):
            # An end of the text is the output's end too.
            assert record.tokens == wanted[: len(record.tokens)] and record.tokens, number
    world.check_clean()
    state = world.planner.state
    assert state is not None and state.num_evicted and state.hosts[0].counters.loaded


def test_a_save_is_read_before_its_pages_are_written_again(way: type[PageCopies]) -> None:
    """Many times at once, with copies that last: what a save reads late is what the next writer left."""
    runner = _runner("tiny-llama", 16, 4096)
    runner.add_host_pool(2 << 20)
    pool, host = runner.pool, runner.host_pool  # type: ignore[attr-defined]
    num = min(host.num_pages, runner.num_pages)
    pages, words = np.arange(num, dtype=np.int32), pool.page_words()
    with runner.device.in_order():  # type: ignore[attr-defined]
        for value in range(1, 40):
            for plane in words.values():
                plane[:, :num] = value
            host.save(pages, pages)
            host.overwritten(as_ints([num // 2]))
            for plane in words.values():
                plane[:, :num] = -value
            event = host.load(pages, pages)
            event.wait()
            assert all(bool((plane[:, :num] == value).all()) for plane in words.values()), value
        torch.cuda.synchronize()
