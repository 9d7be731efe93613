"""`radixmesh roll` on processes that do nothing but serve health: order, refusals, and what is left when one fails."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.fake_compose import fake_compose

from radixmesh.daemons.cluster.errors import RollAbortedError, RollRefusedError, UnknownServiceError
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.process_status import ProcessState
from radixmesh.daemons.cluster.roll.roller import RollEvent

REPOSITORY = Path(__file__).parents[2]
COMPOSE = fake_compose(grace="5s", timeout="1s", retries=100, start_period="60s", num_workers=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "fakes.yml").write_text(COMPOSE)
    return tmp_path / "fakes.yml"


@pytest_asyncio.fixture
async def cluster(path: Path, tmp_path: Path) -> AsyncIterator[LocalCluster]:
    # A folder whose name alone is longer than the path of a socket may be.
    folder = tmp_path / ".radixmesh" / "fakes" if len(str(tmp_path)) > 200 else tmp_path / ("f" * 120) / "fakes"
    async with LocalCluster(path, run_folder=folder) as cluster:
        await cluster.wait_healthy(60)
        yield cluster


async def test_dependencies_come_first_one_replica_after_the_other_as_the_file_says_now(
    cluster: LocalCluster, path: Path
) -> None:
    before, addresses = cluster.pids, [status.address for status in cluster.processes]
    most_away = 0
    events: list[tuple[str, str]] = []

    def on_event(event: RollEvent) -> None:
        nonlocal most_away
        events.append(event[:2])
        away = [status for status in cluster.processes if status.state is not ProcessState.HEALTHY]
        most_away = max(most_away, len(away))

    replaced = await cluster.prepare_roll(on_event=on_event).run()
    assert replaced == ["worker-1", "worker-2", "router-1"]
    assert [name for name, what in events if what == "ready"] == replaced
    assert most_away == 1
    assert not set(before.values()) & set(cluster.pids.values())
    assert [status.address for status in cluster.processes] == addresses
    assert {status.restarts for status in cluster.processes} == {1}

    path.write_text(COMPOSE.replace('FAKE_PEERS: "worker', 'FAKE_PEERS: "now worker'))
    assert await cluster.prepare_roll(["router"]).run() == ["router-1"]
    assert any("peers now" in line for line in cluster.recent_lines("router"))


async def test_one_that_does_not_start_ends_the_roll_and_has_its_old_settings_again(
    cluster: LocalCluster, path: Path
) -> None:
    before = cluster.pids
    path.write_text(
        COMPOSE.replace('{RADIXMESH_LISTEN: "0.0.0.0:50051"}', '{RADIXMESH_LISTEN: "0.0.0.0:50051", FAKE_CRASH: "7"}')
    )
    with pytest.raises(RollAbortedError) as ended:
        await cluster.prepare_roll().run()
    assert "worker-1 serves with its old settings again" in str(ended.value)
    assert "exited with code 7" in str(ended.value)
    assert "replaced: nothing; not replaced: worker-1, worker-2, router-1" in str(ended.value)
    assert all(status.state is ProcessState.HEALTHY for status in cluster.processes)
    assert {name: pid for name, pid in cluster.pids.items() if name != "worker-1"} == {
        name: pid for name, pid in before.items() if name != "worker-1"
    }
    path.write_text(COMPOSE)
    assert len(await cluster.prepare_roll(["worker"]).run()) == 2, "and the next roll does what this one could not"


async def test_what_cannot_be_rolled_is_refused_before_anything_is_done(cluster: LocalCluster, path: Path) -> None:
    before = cluster.pids
    with pytest.raises(UnknownServiceError, match="no service tokenizer"):
        cluster.prepare_roll(["tokenizer"])
    path.write_text(COMPOSE.replace("replicas: 2", "replicas: 3"))
    with pytest.raises(RollRefusedError, match="other services, replicas or ports"):
        cluster.prepare_roll()
    path.write_text(COMPOSE.replace("command: [python", "comand: [python"))
    with pytest.raises(Exception, match="comand"):
        cluster.prepare_roll()
    path.write_text(COMPOSE)
    cluster.kill("worker", 2)
    await cluster.wait_until("worker", lambda status: status.state is not ProcessState.HEALTHY, replica=2)
    with pytest.raises(RollRefusedError, match="not healthy: worker-2"):
        await cluster.prepare_roll().run()
    assert cluster.pids["worker-1"] == before["worker-1"]


async def test_one_that_dies_meanwhile_is_waited_for(cluster: LocalCluster) -> None:
    was_whole: list[bool] = []

    def on_event(event: RollEvent) -> None:
        if event[:2] == ("worker-1", "ready"):
            cluster.kill("router")
        if event[:2] == ("worker-2", "leaving"):
            was_whole.append(all(status.state is ProcessState.HEALTHY for status in cluster.processes))

    assert len(await cluster.prepare_roll(["worker"], on_event=on_event).run()) == 2
    assert was_whole == [True]


async def radixmesh(cwd: Path, *arguments: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RADIXMESH_")}
    environment["PYTHONPATH"] = str(REPOSITORY / "src")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radixmesh.cli", *arguments),
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_the_verb_asks_the_supervisor(path: Path, tmp_path: Path) -> None:
    async with LocalCluster(path, run_folder=tmp_path / ".radixmesh" / "fakes") as cluster:
        await cluster.wait_healthy(60)
        code, said = await radixmesh(tmp_path, "roll", "-f", str(path), "router", "--json")
        assert code == 0, said
        told = [json.loads(line) for line in said.splitlines()]
        assert [row["what"] for row in told] == ["leaving", "starting", "ready"]
        assert cluster.status("router").restarts == 1
        path.write_text(COMPOSE.replace('"worker:50051"}', '"worker:50051", FAKE_CRASH: "7"}'))
        code, said = await radixmesh(tmp_path, "roll", "-f", str(path))
        assert code == 3 and "replaced: worker-1, worker-2; not replaced: router-1" in said, said
        assert cluster.status("router").state is ProcessState.HEALTHY
        code, said = await radixmesh(tmp_path, "roll", "-f", str(path), "nothing")
        assert code == 1 and "no service nothing" in said
    code, said = await radixmesh(tmp_path, "roll", "-f", str(path))
    assert code == 1 and "radixmesh up" in said


async def test_the_control_socket_answers_nonsense_with_an_error(cluster: LocalCluster) -> None:
    assert (cluster.run_folder / "control.sock").stat().st_mode & 0o077 == 0
    for line in (b"\n", b"[]\n", b'{"roll": "router"}\n', b"x" * (1 << 21)):
        folder = os.open(cluster.run_folder, os.O_RDONLY)
        try:
            reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/control.sock")
        finally:
            os.close(folder)
        writer.write(line)
        answer = await asyncio.wait_for(reader.readline(), 60)
        assert b"no request that the supervisor knows" in answer
        writer.close()
    assert all(status.state is ProcessState.HEALTHY for status in cluster.processes)
