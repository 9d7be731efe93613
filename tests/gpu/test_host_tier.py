"""KV of the GPU that goes to page-locked memory and comes back: the same tokens, by every write policy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.planner_world import World

from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.scheduler.tiers.host_cache import TierSettings, WritePolicy
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


def _prompts(num: int) -> list[list[int]]:
    return [[10 + (7 * i + j * j) % 90 for j in range(70)] for i in range(num)]


def _outputs(world: World, times: int, depth: int) -> list[list[int]]:
    outputs: list[list[int]] = []
    for _ in range(times):
        records = [world.submit(prompt) for prompt in _prompts(12)]
        world.run(depth)
        outputs += [record.tokens for record in records]
    return outputs


@pytest.mark.parametrize(("model", "page_size"), [("tiny-llama", 1), ("tiny-llama", 16), ("tiny-deepseek", 4)])
def test_tokens_are_those_of_a_device_with_room_for_all(model: str, page_size: int) -> None:
    whole = World(runner=_runner(model, page_size, 2048), num_slots=4)
    wanted = _outputs(whole, 1, 1) * 3
    for policy in ("write_through", "write_back"):
        tiers = TierSettings(policy=WritePolicy(policy))
        world = World(runner=_runner(model, page_size, 240), num_slots=4, num_host_pages=2048 // page_size, tiers=tiers)
        assert _outputs(world, 3, 2) == wanted, policy
        world.check_clean()
        (host,) = world.planner.state.hosts
        assert host.counters.loaded and world.planner.state.num_evicted


def test_a_save_is_read_before_its_pages_are_written_again() -> None:
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
