"""Ranks of one model on two hosts (network namespaces), their scheduler on a third: they recite, and outlive a cut."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.cpu_ranks import MODELS, NUM_TOKENS, TIMEOUT_S, recited, texts
from support.net_hosts import NetHost, net_hosts
from support.running_daemon import Running, running
from support.serve_client import serve_client

from radixmesh.daemons.scheduler.__main__ import SchedulerDaemon
from radixmesh.daemons.scheduler.config import SchedulerSettings

_PORT = 50051


def worker(host: NetHost, model: str, log: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "radixmesh.cli", "worker", "--listen", f"{host.address}:{_PORT}"]
    command += ["--metrics-listen", "", "--model", str(MODELS / model), "--cpu-threads", "1", "--num-slots", "8"]
    command += ["--num-pages", str(NUM_TOKENS // 4), "--page-size", "4", *flags]
    with log.open("wb") as output:
        return host.start(command, stdout=output, stderr=output)


@asynccontextmanager
async def group_across(
    model: str, folder: Path, layout: str
) -> AsyncIterator[tuple[list[NetHost], Running[SchedulerDaemon]]]:
    """layout: "tp", or "dp" with experts shared."""
    async with AsyncExitStack() as stack:
        hosts = stack.enter_context(net_hosts(2))
        processes = []
        for rank, host in enumerate(hosts):
            flags = [f"--{layout}-size", "2", f"--{layout}-rank", str(rank)]
            flags += ["--ep-size", "2", "--ep-rank", str(rank)] if layout == "dp" else []
            processes.append(worker(host, model, folder / f"rank-{rank}.log", flags))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].send_signal, signal.SIGKILL)
        workers = tuple(f"{host.address}:{_PORT}" for host in hosts)
        settings = SchedulerSettings(workers=workers, chunk_tokens=7, check_invariants=True)
        daemon = await stack.enter_async_context(running(SchedulerDaemon, settings, instance_id="s"))
        yield hosts, daemon


def test_hosts_can_be_made_again_while_a_process_of_the_last_ones_is_there() -> None:
    """The kernel takes a namespace down some time after its last process has ended."""
    with net_hosts(2) as hosts:
        late = hosts[1].start(["sh", "-c", "echo started; exec sleep 60"], stdout=subprocess.PIPE)
        assert late.stdout is not None and late.stdout.readline() == b"started\n"
    try:
        with net_hosts(2) as hosts:
            asked = hosts[1].start(["ip", "-4", "addr", "show", "dev", "eth0"], stdout=subprocess.PIPE)
            told, _ = asked.communicate(timeout=30.0)
            assert hosts[1].address.encode() in told
    finally:
        late.kill()
        late.communicate()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "layout"),
    [("tiny-llama", "tp"), pytest.param("tiny-deepseek", "dp", marks=pytest.mark.full)],
)
async def test_ranks_on_two_hosts_recite(model: str, layout: str, tmp_path: Path) -> None:
    """They meet at addresses of their hosts: of `--listen`, since nobody said another one."""
    chosen = texts(model, 4)
    async with group_across(model, tmp_path, layout) as (_, daemon), serve_client(daemon.address) as client:
        await recited(client, chosen)


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_cut_between_hosts_stops_nothing_for_good(tmp_path: Path) -> None:
    chosen = texts("tiny-llama", 6)
    async with (
        group_across("tiny-llama", tmp_path, "tp") as (hosts, daemon),
        serve_client(daemon.address) as client,
    ):
        await recited(client, chosen[:1])
        reciting = asyncio.ensure_future(recited(client, chosen))
        await client.until(lambda: any(len(seen.tokens) > 5 for seen in client.seen.values()), TIMEOUT_S)
        hosts[1].cut()
        log = tmp_path / "rank-0.log"
        async with asyncio.timeout(TIMEOUT_S):
            while "rank_lost" not in log.read_text():
                await asyncio.sleep(0.1)
        hosts[1].mend()
        await reciting
        assert log.read_text().count("group_formed") > 1, "the ranks have met again"
