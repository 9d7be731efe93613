"""`radixmesh status` against servers of each kind, and with nobody there."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from radixmesh.cli.daemon_report import ask_daemon
from radixmesh.daemons.cluster.processes.process_status import ProcessState, ProcessStatus
from radixmesh.daemons.cluster.run_folder import ClusterState, RunFolder
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from radixmesh.worker.v1 import worker_pb2, worker_pb2_grpc

REPOSITORY = Path(__file__).parents[2]


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def GetState(self, request, context):
        load = scheduler_pb2.Load(
            num_running=3, num_waiting=2, total_pages=100, free_pages=60, cached_pages=30, epoch=7
        )
        load.group = scheduler_pb2.GROUP_STATE_SERVING
        return scheduler_pb2.GetStateResponse(load=load, quarantined_pages=1, expert_balancedness=0.913)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def GetCapabilities(self, request, context):
        what = worker_pb2.Capabilities(backend="cpu", num_slots=8, num_pages=100, rank=1, world_size=2)
        what.layout.MergeFrom(worker_pb2.RankLayout(tp_rank=1, tp_size=2, dp_size=1, ep_rank=1, ep_size=2))
        what.group_generation = 3
        transfers = worker_pb2.TransferCounts(
            num_sending=2,
            num_receiving=1,
            quarantined_bytes=64,
            num_failed=3,
            hand_over_bytes=500_000_000,
            hand_over_us=2_000,
        )
        return worker_pb2.GetCapabilitiesResponse(highest_epoch=6, capabilities=what, transfers=transfers)


class RouterAdmin(router_pb2_grpc.RouterAdminServiceServicer):
    async def ListSchedulers(self, request, context):
        infos = [router_pb2.SchedulerInfo(is_connected=True, num_running=4), router_pb2.SchedulerInfo(num_running=1)]
        return router_pb2.ListSchedulersResponse(schedulers=infos)


async def start_server(add=None, servicer=None, progress=None):
    if progress is None:
        progress = Progress()
        progress.loaded()
    server = MeshServer(HealthService(progress))
    if add is not None:
        server.add(add, servicer)
    (address,) = await server.start(["127.0.0.1:0"])
    return server, address


async def report_of(*arguments):
    server, address = await start_server(*arguments)
    try:
        report = await ask_daemon(address, 5.0)
        return report.health, report.epoch, report.load
    finally:
        await server.stop(0)


async def test_every_kind_of_daemon_is_recognised_by_its_services():
    scheduler = await report_of(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, Scheduler())
    load = "group serving, 3 running 2 waiting, pages 60 free 30 cached of 100, 1 quarantined, experts balanced 0.91"
    assert scheduler == ("serving", 7, load)
    worker = await report_of(worker_pb2_grpc.add_WorkerServiceServicer_to_server, Worker())
    load = "cpu, 8 slots, 100 pages, rank 1 of 2 (tp 1/2 ep 1/2), generation 3, KV 2 sending 1 receiving, 3 failed"
    assert worker == ("serving", 6, f"{load}, 64 bytes quarantined, hand-overs at 250 GB/s")
    router = await report_of(router_pb2_grpc.add_RouterAdminServiceServicer_to_server, RouterAdmin())
    assert router == ("serving", None, "5 running, schedulers 1 of 2 connected")
    assert await report_of() == ("serving", None, "")


async def test_figures_for_programs_are_numbers():
    server, address = await start_server(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, Scheduler())
    try:
        figures = (await ask_daemon(address, 5.0)).figures
    finally:
        await server.stop(0)
    assert figures["expert_balancedness"] == 0.913 and figures["free_pages"] == 60
    server, address = await start_server(worker_pb2_grpc.add_WorkerServiceServicer_to_server, Worker())
    try:
        figures = (await ask_daemon(address, 5.0)).figures
    finally:
        await server.stop(0)
    assert figures["kv_hand_over_bytes"] == 500_000_000 and figures["kv_hand_over_gb_s"] == 250.0


async def test_a_daemon_that_does_not_serve_says_why():
    progress = Progress()
    assert (await report_of(None, None, progress))[0] == "loading"
    progress.loaded()
    progress.drain()
    assert (await report_of(None, None, progress))[0] == "draining"


async def test_refused_and_silent_are_told_apart():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert (await ask_daemon(address, 2.0)).health == "refused"
        # Accepts connections in the kernel and never answers, like a stopped process.
        listener.listen()
        assert (await ask_daemon(address, 0.5)).health == "silent"


async def run_status(cwd, *arguments):
    command = [sys.executable, "-m", "radixmesh.cli", "status", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_the_verb_reads_the_cluster_that_runs_here(tmp_path):
    server, address = await start_server(scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, Scheduler())
    folder = RunFolder(tmp_path / ".radixmesh" / "one")
    folder.claim()
    common = {"replica": 1, "restarts": 2, "detail": "", "started_at": None}
    processes = (
        ProcessStatus(service="scheduler", state=ProcessState.HEALTHY, address=address, pid=123, **common),
        ProcessStatus(service="worker", state=ProcessState.BACKOFF, address="127.0.0.1:1", pid=None, **common),
    )
    try:
        folder.write(ClusterState(project="one", compose_file="x", supervisor_pid=os.getpid(), processes=processes))
        code, output = await run_status(tmp_path)
        header, scheduler, worker = output.splitlines()
        assert code == 1
        assert header.split() == ["NAME", "STATE", "HEALTH", "ADDRESS", "PID", "RESTARTS", "EPOCH", "LOAD"]
        assert scheduler.split()[:7] == ["scheduler-1", "healthy", "serving", address, "123", "2", "7"]
        assert worker.split() == ["worker-1", "backoff", "refused", "127.0.0.1:1", "2"]
        code, output = await run_status(tmp_path, "--json", address)
        named = json.loads(output)
        assert code == 0 and (named["epoch"], named["name"], named["address"]) == (7, None, address)
        code, output = await run_status(tmp_path, "--json")
        first, second = (json.loads(line) for line in output.splitlines())
        load = first.pop("load")
        assert load["kind"] == "scheduler" and (load["running"], load["free_pages"]) == (3, 60)
        assert first == {
            "name": "scheduler-1", "service": "scheduler", "replica": 1, "state": "healthy", "health": "serving",
            "address": address, "pid": 123, "restarts": 2, "uptime_s": None, "epoch": 7,
        }  # fmt: skip
        assert (second["health"], second["pid"], second["epoch"], second["load"]) == ("refused", None, None, {})
    finally:
        folder.release()
        await server.stop(0)
    code, output = await run_status(tmp_path)
    assert code == 1 and "radixmesh up" in output
