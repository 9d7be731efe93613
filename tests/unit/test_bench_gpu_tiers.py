"""The bench of chats with a host tier, on a simulated device: it counts what was computed, cached and loaded."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace

import pytest
from support.bench_modules import bench_imports

pytest.importorskip("triton")

from radixmesh.daemons.worker.simulated.clock import VirtualClock
from radixmesh.daemons.worker.simulated.latency import LatencyModel
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner
from radixmesh.daemons.worker.simulated.token_source import Alphabet

with bench_imports():
    import tier_model
    from gpu.launch_watch import LaunchWatch
    from gpu.tiers import Chats, _saving_cost

ARGS = Namespace(
    slots=8,
    depth=1,
    working_set=6.0,
    clients=0,
    least_chat_tokens=None,
    turns=3,
    message_tokens=20,
    output_tokens=8,
    chunk_tokens=128,
)


def _chats(policy: str) -> Chats:
    runner = SimulatedRunner(
        page_size=4,
        num_pages=256,
        vocab_size=32_000,
        max_total_len=300,
        alphabet=Alphabet.of(32_000, eos_ids=[1], eos_rate=0.0),
        latency=LatencyModel(),
        clock=VirtualClock(),
    )
    runner.add_host_pool(4 * 8 * 2048)
    return Chats(runner, ARGS, policy, 256)


def test_chats_come_back_from_the_host() -> None:
    chats = _chats("write_through")
    assert (chats.num_chats, chats.clients) == (24, 4)
    first, second, third = chats.fill(), chats.turn(), chats.turn()
    assert first["requests"] == 24 and first["hit_rate"] == 0
    # All but the last output token and the page that is not full.
    assert 0.95 < second["hit_rate"] < 1 and 0.95 < third["hit_rate"] < 1 and second["load_mean_ms"] > 0
    assert {len(history) for history in chats.histories} == {256}
    loads = chats.planner.loads
    assert 24 <= loads.num_loads <= 48 and not loads.num_late
    kinds = third["launches"]["kinds"]
    assert sum(kind["launches"] for what, kind in kinds.items() if what.startswith("chunks")) <= 24
    assert any("starts loads" in what or "saves and loads" in what for what in kinds), kinds
    num_decodes = sum(count * int(rows) for kind in third["decodes"].values() for rows, (count, _, _) in kind.items())
    assert num_decodes > 24 * 4


def test_the_device_alone_computes_nearly_all_of_every_turn() -> None:
    chats = _chats("device")
    first, second = chats.fill(), chats.turn()
    # The others would have been evicted by these.
    assert first["requests"] == 12 and second["requests"] == 24
    assert second["hit_rate"] < 0.2 and not chats.planner.loads.num_loads
    assert {len(history) for history in chats.histories} == {256 - 28}


def test_saves_cost_what_steps_beside_them_took_longer() -> None:
    decodes = {"none": {4: [2.0, 2.0]}, "saves": {4: [3.0], 5: [9.0]}, "after_saves": {4: [2.0]}, "loads": {4: [8.0]}}
    assert _saving_cost(decodes) == pytest.approx(1 / 9, abs=1e-3)
    assert _saving_cost({"saves": {4: [3.0]}}) is None


def test_the_model_knows_what_a_bus_allows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--kv-gb", "0.54", "--host-gb", "6", "--chat-tokens", "1024", "--output-tokens", "8", "--turns", "2"]

    def tokens_a_second(*more: str) -> tuple[float, float]:
        tier_model.main([*arguments, *more])
        turns = json.loads(capsys.readouterr().out)["chats of 1024"]
        return turns["device"]["tok_s"], turns["write_through"]["tok_s"]

    alone, tiered = tokens_a_second()
    assert tiered > 1.5 * alone
    same, slower = tokens_a_second("--bus-gbps", "2")
    assert same == alone and slower < 0.8 * tiered
    # Prompts that are launched late keep chats in lock step: loads wait for each other.
    for late in ("--launch-ms", "--upload-ms"):
        assert tokens_a_second("--bus-gbps", "5", late, "40")[1] < 0.9 * tokens_a_second("--bus-gbps", "5")[1]


def test_long_launches_are_told_with_where_they_were() -> None:
    watch, is_copying = LaunchWatch(time.perf_counter), threading.Event()
    copier = threading.Thread(target=is_copying.wait, name="kv-loads")
    copier.start()
    with watch.running():
        with watch.launching("chunks"):
            time.sleep(0.06)
        for _ in range(3):
            with watch.launching("decodes"):
                pass
    is_copying.set()
    copier.join()
    told = watch.summary()
    assert {what: kind["launches"] for what, kind in told["kinds"].items()} == {"chunks": 1, "decodes": 3}
    assert told["kinds"]["chunks"]["ms"] == {">=50": 1}
    [longest] = told["longest"]
    assert longest["what"] == "chunks" and longest["ms"] >= 60 and longest["cpu_ms"] < 30
    assert all("test_long_launches_are_told" in line for line in told["where"]) and told["where"]
    assert told["copiers"] and all(line.startswith("kv-loads ") for line in told["copiers"])
