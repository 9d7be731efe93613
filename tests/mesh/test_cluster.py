"""The supervisor with real processes: what dies or hangs comes back, and nothing is ever left behind."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_compose import fake_compose

from radixmesh.daemons.cluster.errors import AlreadyRunningError, ComposeError, NoRestartCuresError, StartTimeoutError
from radixmesh.daemons.cluster.local_cluster import LocalCluster
from radixmesh.daemons.cluster.processes.hang_detector import HangDetector
from radixmesh.daemons.cluster.processes.process_status import ProcessState
from radixmesh.daemons.cluster.run_folder import find_run_folder, is_supervised, read_state

REPOSITORY = Path(__file__).parents[2]
COMPOSE = fake_compose()


class Journal:
    """Output of a cluster: lines of its processes, and states in order."""

    def __init__(self):
        self.lines = []
        self.states = []

    def take_line(self, name, line):
        self.lines.append((name, line))

    def take_status(self, status):
        self.states.append((status.name, status.state.value, status.detail))


@pytest.fixture
def compose_path(tmp_path):
    path = tmp_path / "fakes.yml"
    path.write_text(COMPOSE)
    return path


@pytest.fixture
def journal():
    return Journal()


@pytest.fixture
def make_cluster(compose_path, journal):
    def make(**options):
        return LocalCluster(compose_path, on_line=journal.take_line, on_status=journal.take_status, **options)

    return make


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_gone(pids, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


async def wait_restarted(cluster, service, restarts, timeout_s=30.0):
    async with asyncio.timeout(timeout_s):
        return await cluster.wait_until(
            service, lambda status: status.restarts >= restarts and status.state is ProcessState.HEALTHY
        )


async def test_dependants_start_after_their_dependencies_are_healthy_and_know_their_addresses(make_cluster, journal):
    async with make_cluster(scale={"worker": 2}, environment={"worker": {"FAKE_LOADING_S": "0.5"}}) as cluster:
        await cluster.wait_healthy(30)
        order = [(name, state) for name, state, _ in journal.states]
        for worker in ("worker-1", "worker-2"):
            assert order.index((worker, "healthy")) < order.index(("router-1", "starting"))
        addresses = f"{cluster.address('worker', 1)},{cluster.address('worker', 2)}"
        assert ("router-1", f"peers {addresses}") in journal.lines
        pids = cluster.pids
        assert sorted(pids) == ["router-1", "worker-1", "worker-2"]
        assert ("worker-1", f"hello from {pids['worker-1']}") in journal.lines
    assert wait_gone(pids.values()) == []
    stopped = [name for name, state, _ in journal.states if state == "stopped"]
    assert stopped[0] == "router-1" and len(stopped) == 3
    assert ("router-1", "goodbye") in journal.lines


async def test_a_killed_process_comes_back_fast_at_the_same_address(make_cluster, journal):
    async with make_cluster() as cluster:
        await cluster.wait_healthy(30)
        address, pid, bystander = cluster.address("worker"), cluster.pids["worker-1"], cluster.pids["router-1"]
        killed_at = time.monotonic()
        assert cluster.kill("worker")
        status = await wait_restarted(cluster, "worker", 1)
        assert time.monotonic() - killed_at < 40
        assert status.address == address and status.pid not in (None, pid)
        assert cluster.pids["router-1"] == bystander and cluster.status("router").restarts == 0
        details = [detail for name, state, detail in journal.states if (name, state) == ("worker-1", "backoff")]
        assert details == ["killed by SIGKILL; restart 1 in 0.1 s"]


async def test_a_stopped_process_is_killed_after_the_window_and_restarted(make_cluster, journal):
    async with make_cluster(hang_window_s=1.0) as cluster:
        await cluster.wait_healthy(30)
        pid = cluster.pids["worker-1"]
        stopped_at = time.monotonic()
        cluster.kill("worker", number=signal.SIGSTOP)
        await wait_restarted(cluster, "worker", 1)
        assert not is_alive(pid)
        assert time.monotonic() - stopped_at >= 1.0
        details = [detail for name, state, detail in journal.states if (name, state) == ("worker-1", "backoff")]
        assert len(details) == 1 and details[0].startswith("hung: silent for 1 s; killed; restart 1")
        assert cluster.status("router").restarts == 0


def starve(pid, cpu):
    """Leaves a process next to nothing of one CPU, once others compute there."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cpu})
        os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
    group = Path(f"/proc/{pid}/autogroup")  # If the kernel shares CPUs by session, priorities are of sessions.
    if group.exists():
        group.write_text("19")


async def test_a_process_without_a_cpu_is_left_alone(make_cluster, journal):
    cpu = min(os.sched_getaffinity(0))
    busy = [sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"]
    others = []
    async with make_cluster(hang_window_s=3.0) as cluster:
        await cluster.wait_healthy(60)
        pid = cluster.pids["worker-1"]
        starve(pid, cpu)
        others = [subprocess.Popen(busy) for _ in range(2)]
        try:
            await asyncio.sleep(
                5.0
            )  # A third of what it takes to be found hung, as this process may be late too: all checks unanswered.
            assert cluster.pids.get("worker-1") == pid, journal.states
        finally:
            for process in others:
                process.kill()
                process.wait()
        async with asyncio.timeout(60):
            await cluster.wait_until("worker", lambda status: status.state is ProcessState.HEALTHY)
        assert cluster.status("worker").restarts == 0


async def test_a_stall_is_blamed_on_its_root_alone(make_cluster, tmp_path):
    """Router and worker both stop making progress; only the worker, on which the router waits, is killed."""
    worker_stall, router_stall = tmp_path / "worker", tmp_path / "router"
    environment = {"worker": {"FAKE_STALL_FILE": str(worker_stall)}, "router": {"FAKE_STALL_FILE": str(router_stall)}}
    async with make_cluster(hang_window_s=1.0, environment=environment) as cluster:
        await cluster.wait_healthy(30)
        router_stall.touch()
        await asyncio.sleep(0.5)
        worker_stall.touch()
        async with asyncio.timeout(30):
            await cluster.wait_until("worker", lambda status: status.restarts == 1)
        assert cluster.status("router").restarts == 0
        worker_stall.unlink()
        router_stall.unlink()
        await wait_restarted(cluster, "worker", 1)
        async with asyncio.timeout(60):
            await cluster.wait_until("router", lambda status: status.state is ProcessState.HEALTHY)
        assert cluster.status("router").restarts == 0
        router_stall.touch()
        async with asyncio.timeout(30):
            await cluster.wait_until("router", lambda status: status.restarts == 1)


async def test_a_crash_loop_backs_off_and_says_why_nothing_is_healthy(make_cluster, journal):
    async with make_cluster(environment={"worker": {"FAKE_CRASH": "3"}}) as cluster:

        def crashes():
            return [detail for name, state, detail in journal.states if (name, state) == ("worker-1", "backoff")]

        async with asyncio.timeout(60):
            while len(crashes()) < 3:
                await asyncio.sleep(0.02)
        with pytest.raises(StartTimeoutError) as caught:
            await cluster.wait_healthy(0.1)
        assert "worker-1 is" in str(caught.value) and "hello from" in str(caught.value)
        assert crashes() == [
            f"exited with code 3; restart {n + 1} in {0.1 * 2**n:.1f} s" for n in range(len(crashes()))
        ]
        assert cluster.status("router").state is ProcessState.WAITING


async def test_a_policy_of_no_restart_ends_the_process_and_the_wait(compose_path, make_cluster):
    compose_path.write_text(COMPOSE.replace("unless-stopped", "on-failure"))
    async with make_cluster(environment={"worker": {"FAKE_CRASH": "0"}}) as cluster:
        with pytest.raises(StartTimeoutError, match="worker-1 is ended exited with code 0"):
            await cluster.wait_healthy(60)


async def test_a_missing_command_is_reported_in_the_output(compose_path, make_cluster, journal):
    compose_path.write_text("services: {a: {command: no-such-command-anywhere}}")
    # Without a health check what has been started is healthy: on a busy machine for longer than it takes to look.
    async with make_cluster(), asyncio.timeout(60):
        while not any("no-such-command-anywhere" in line and "PATH" in line for _, line in journal.lines):
            await asyncio.sleep(0.02)
        while not any(name == "a-1" and state == "ended" for name, state, _ in journal.states):
            await asyncio.sleep(0.02)


def told_end(pid):
    """The end of its predecessor as a process was told it."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return [v.decode().partition("=")[2] for v in variables if v.startswith(b"RADIXMESH_PREDECESSOR_END=")]


async def test_a_process_is_told_how_the_one_before_it_ended(make_cluster):
    async with make_cluster(hang_window_s=1.0) as cluster, asyncio.timeout(120):
        await cluster.wait_healthy(60)
        assert told_end(cluster.pids["worker-1"]) == []
        for number, (signum, expected) in enumerate(
            [
                (signal.SIGKILL, "from-outside"),
                (signal.SIGSEGV, "by-itself"),
                (signal.SIGTERM, "from-outside"),
                (signal.SIGSTOP, "by-itself"),  # It hung, and the supervisor killed it.
            ],
            start=1,
        ):
            cluster.kill("worker", number=signum)
            await cluster.wait_until(
                "worker", lambda status, n=number: status.restarts == n and status.state is ProcessState.HEALTHY
            )
            assert told_end(cluster.pids["worker-1"]) == [expected], signum


async def test_children_of_a_process_die_with_it(make_cluster, tmp_path):
    child_file = tmp_path / "child"
    async with make_cluster(environment={"worker": {"FAKE_CHILD_FILE": str(child_file)}}) as cluster:
        await cluster.wait_healthy(30)
        first = int(child_file.read_text())
        cluster.kill("worker")
        status = await cluster.wait_until("worker", lambda status: status.restarts == 1)
        assert status.detail.startswith("killed by SIGKILL")
        await wait_restarted(cluster, "worker", 1)
        assert wait_gone([first]) == []
        second = int(child_file.read_text())
        assert is_alive(second)
    assert wait_gone([second]) == []


async def test_stopping_kills_what_ignores_the_request_or_is_stopped(make_cluster):
    async with make_cluster(environment={"worker": {"FAKE_IGNORE_TERM": "1"}}) as cluster:
        await cluster.wait_healthy(30)
        pids = cluster.pids
        cluster.kill("router", number=signal.SIGSTOP)
        started = time.monotonic()
    assert time.monotonic() - started < 40
    assert wait_gone(pids.values()) == []


async def test_the_environment_is_the_files_own(make_cluster, compose_path, monkeypatch, journal):
    monkeypatch.setenv("RADIXMESH_LISTEN", "stray")
    monkeypatch.setenv("RADIXMESH_STRAY", "1")
    compose_path.write_text("""services: {a: {command: [python, -c, "import os; print(sorted(k for k in os.environ
      if k.startswith('RADIXMESH'))); import radixmesh"], environment: {RADIXMESH_OWN: 1}}}""")
    async with make_cluster() as cluster:
        async with asyncio.timeout(30):
            status = await cluster.wait_until("a", lambda status: status.state is ProcessState.ENDED)
        assert status.detail == "exited with code 0"
    assert ("a-1", "['RADIXMESH_OWN']") in journal.lines


async def test_the_state_file_follows_and_one_project_runs_once(make_cluster, tmp_path):
    folder = tmp_path / ".radixmesh" / "fakes"
    async with make_cluster(run_folder=folder) as cluster:
        await cluster.wait_healthy(30)
        assert find_run_folder(None, tmp_path, {}) == folder
        assert find_run_folder("fakes", tmp_path / "deeper" / "still", {}) == folder
        state = read_state(folder)
        assert state.processes == cluster.processes and state.supervisor_pid == os.getpid()
        assert json.loads((folder / "state.json").read_text())["processes"][0]["state"] == "healthy"
        with pytest.raises(AlreadyRunningError, match="radixmesh down"):
            await make_cluster(run_folder=folder).start()
        assert cluster.pids
    assert not is_supervised(folder) and not (folder / "state.json").exists()


def test_a_missing_model_folder_is_named_before_anything_starts(compose_path):
    compose_path.write_text("services: {a: {command: x, volumes: ['./nowhere:/models']}}")
    with pytest.raises(ComposeError, match=r"nowhere does not exist"):
        LocalCluster(compose_path)


def start_up(compose_path, tmp_path, *arguments):
    command = [sys.executable, "-m", "radixmesh.cli", "up", "-f", str(compose_path), *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(process, pattern, timeout_s=30.0):
    """Reads output to the first line that matches; the test's own time limit guards against silence."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"{pattern!r} was not printed:\n{''.join(lines)}")


@pytest.fixture
def running_up(compose_path, tmp_path):
    process = start_up(compose_path, tmp_path)
    try:
        lines = read_until(process, "All 2 processes are healthy")
        state = read_state(tmp_path / ".radixmesh" / "fakes")
        yield process, [status.pid for status in state.processes], lines
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_up_shows_progress_and_prefixed_output(running_up):
    _, pids, lines = running_up
    text = "".join(lines)
    assert re.search(r"^worker-1 +\| starting +pid \d+, will serve at 127\.0\.0\.1:\d+ +\[0/2 healthy\]$", text, re.M)
    assert re.search(r"^worker-1 +\| healthy +after [\d.]+ s +\[1/2 healthy\]$", text, re.M)
    assert re.search(r"^router-1 +\| healthy +after [\d.]+ s +\[2/2 healthy\]$", text, re.M)
    assert re.search(rf"^router-1 +\| hello from {pids[0]}$", text, re.M)
    assert "\x1b[" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_no_process_behind(running_up, number):
    process, pids, _ = running_up
    # As a terminal does it: to the whole process group.
    os.killpg(process.pid, number)
    assert process.wait(20) == 0
    assert wait_gone(pids, 0.0) == []
    assert "goodbye" in process.stdout.read()


def test_ctrl_c_while_starting_leaves_no_process_behind(compose_path, tmp_path):
    compose_path.write_text(COMPOSE.replace("FAKE_PEERS", 'FAKE_LOADING_S: "100", FAKE_PEERS'))
    process = start_up(compose_path, tmp_path)
    try:
        read_until(process, r"router-1 +\| hello")
        pids = [status.pid for status in read_state(tmp_path / ".radixmesh" / "fakes").processes]
        assert all(is_alive(pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert wait_gone(pids, 0.0) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_ctrl_c_kills_at_once(compose_path, tmp_path):
    patient = COMPOSE.replace("stop_grace_period: 1s", "stop_grace_period: 1h")
    compose_path.write_text(patient.replace("FAKE_PEERS", 'FAKE_IGNORE_TERM: "1", FAKE_PEERS'))
    process = start_up(compose_path, tmp_path)
    try:
        read_until(process, "All 2 processes are healthy")
        pids = [status.pid for status in read_state(tmp_path / ".radixmesh" / "fakes").processes]
        process.send_signal(signal.SIGINT)
        read_until(process, "Stopping")
        assert all(is_alive(pid) for pid in pids)
        process.send_signal(signal.SIGINT)
        process.wait(10)
        assert wait_gone(pids, 0.0) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_sigkill_of_the_supervisor_leaves_no_process_behind(running_up):
    process, pids, _ = running_up
    os.kill(pids[0], signal.SIGSTOP)
    process.kill()
    process.wait()
    assert wait_gone(pids) == []


def test_down_stops_a_cluster_from_elsewhere(running_up, tmp_path):
    process, pids, _ = running_up
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}
    command = [sys.executable, "-m", "radixmesh.cli", "down"]
    down = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert (down.returncode, down.stdout) == (0, "fakes is stopped.\n")
    assert process.wait(10) == 0
    assert wait_gone(pids, 0.0) == []
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert again.returncode == 1 and "no cluster" in again.stdout


def test_health_verb_answers_with_its_exit_code(running_up, tmp_path):
    _, _, _ = running_up
    state = read_state(tmp_path / ".radixmesh" / "fakes")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src")}

    def ask(address):
        command = [sys.executable, "-m", "radixmesh.cli", "health", address]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    up = ask(state.processes[0].address)
    assert (up.returncode, up.stdout) == (0, "SERVING\n")
    gone = ask("127.0.0.1:1")
    assert gone.returncode == 1 and "UNAVAILABLE" in gone.stderr


ROUTER = """
import asyncio, os
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.rpc.health.service import HealthService
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.server import MeshServer
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

class Router(router_pb2_grpc.RouterServiceServicer):
    async def Generate(self, request, context):
        yield router_pb2.GenerateResponse(deltas=[router_pb2.Delta(text=f" echoed {request.text}")])
        if "FAIL" not in os.environ:
            done = router_pb2.OutputFinished(reason=common_pb2.FINISH_REASON_STOP)
            yield router_pb2.GenerateResponse(finished=[done])
            return
        raise ValueError("on purpose")

async def main():
    progress = Progress()
    progress.loaded()
    server = MeshServer(HealthService(progress))
    server.add(router_pb2_grpc.add_RouterServiceServicer_to_server, Router())
    await server.start([os.environ["RADIXMESH_LISTEN"]])
    await asyncio.Event().wait()

asyncio.run(main())
"""


def start_demo(compose_path, tmp_path, environment):
    (tmp_path / "router.py").write_text(ROUTER)
    compose_path.write_text(f"""services: {{router: {{command: [python, /code/router.py],
        environment: {{RADIXMESH_LISTEN: "0.0.0.0:50051"{environment}}}, stop_grace_period: 1s, volumes: [".:/code"],
        healthcheck: {{test: [CMD, radixmesh, health, "127.0.0.1:50051"], start_period: 30s}}}}}}""")
    return start_up(compose_path, tmp_path, "--demo", "say it")


def test_a_demonstration_follows_health_and_the_cluster_serves_on(compose_path, tmp_path):
    process = start_demo(compose_path, tmp_path, "")
    try:
        lines = "".join(read_until(process, "^Try: "))
        assert re.search(r"1 process is healthy\. The router is at 127\.0\.0\.1:\d+\.\n", lines)
        assert '$ radixmesh generate --temperature 0 "say it"\nsay it echoed say it\n' in lines
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_failed_demonstration_stops_everything_with_its_reason(compose_path, tmp_path):
    process = start_demo(compose_path, tmp_path, ", FAIL: 1")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the demonstration failed" in output and "INTERNAL" in output


def test_usage_errors_of_up_are_messages(tmp_path, compose_path):
    for arguments, hint in ((["--scale", "worker"], "SERVICE=N"), (["--scale", "nobody=2"], "router, worker")):
        process = start_up(compose_path, tmp_path, *arguments)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 1 and hint in output and "Traceback" not in output


def test_an_overlay_of_images_runs_the_rest_and_says_what_it_does_without(tmp_path, compose_path):
    overlay = tmp_path / "observe.yml"
    overlay.write_text("""services:
  worker: {environment: {FAKE_STORE: "http://store:4317"}}
  store: {image: somewhere/store, x-local: skip, ports: ["4317:4317"]}
""")
    process = start_up(compose_path, tmp_path, "-f", str(overlay))
    try:
        text = "".join(read_until(process, "All 2 processes are healthy"))
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        process.stdout.close()
    assert re.search(r"images only: store\.$", text, re.M)
    assert re.search(r"Left out, .*: worker\.environment\.FAKE_STORE\.$", text, re.M)


DAEMONS = """
name: vain
x-daemon: &daemon
  restart: unless-stopped
  healthcheck: {test: [CMD, radixmesh, health, "127.0.0.1:50051"], start_period: 60s, interval: 1s, timeout: 1s}
services:
  worker:
    <<: *daemon
    command: [radixmesh, worker]
    environment: {RADIXMESH_LISTEN: "0.0.0.0:50051", RADIXMESH_BACKEND: simulated}
  scheduler:
    <<: *daemon
    command: [radixmesh, scheduler]
    environment: {RADIXMESH_LISTEN: "0.0.0.0:50051", RADIXMESH_WORKERS: "worker:50051"}
"""


@pytest.mark.parametrize(
    ("settings", "num_starts", "said"),
    [
        ({"RADIXMESH_NUM_SLOTS": "many"}, 1, "RADIXMESH_NUM_SLOTS"),
        ({"RADIXMESH_MODEL": "/nowhere"}, 2, "/nowhere"),
    ],
)
async def test_a_daemon_that_can_never_start_is_given_up_with_its_reason(
    compose_path, make_cluster, journal, settings, num_starts, said
):
    compose_path.write_text(DAEMONS)
    async with make_cluster(environment={"worker": settings}) as cluster:
        async with asyncio.timeout(120):
            with pytest.raises(NoRestartCuresError, match="worker-1 cannot start") as caught:
                await cluster.wait_healthy(float("inf"))
        assert said in str(caught.value) and "\n" not in str(caught.value)
        starts = [state for name, state, _ in journal.states if (name, state) == ("worker-1", "starting")]
        assert len(starts) == num_starts
        assert cluster.status("worker").state is ProcessState.ENDED


async def test_a_supervision_that_fails_says_so_and_leaves_nothing_running(make_cluster, journal, monkeypatch):
    async with make_cluster() as cluster:
        await cluster.wait_healthy(60)
        pid = cluster.pids["worker-1"]

        def broken(self, answer, **observed):
            raise OSError("no more files")

        monkeypatch.setattr(HangDetector, "observe", broken)
        async with asyncio.timeout(60):
            await cluster.wait_until("worker", lambda status: status.state is ProcessState.ENDED)
        assert wait_gone([pid]) == []
        with pytest.raises(NoRestartCuresError, match=r"not supervised any more .OSError: no more files."):
            await cluster.wait_healthy(60)
        assert any("Traceback" in line for name, line in journal.lines if name == "worker-1")


async def test_a_daemon_that_has_served_is_started_again_whatever_its_code(compose_path, make_cluster):
    compose_path.write_text(DAEMONS)
    async with make_cluster(environment={}) as cluster, asyncio.timeout(120):
        await cluster.wait_healthy(60)
        supervisor = cluster.supervisor("worker", 1)
        supervisor.exit_codes.extend([3, 3])
        cluster.kill("worker")
        await wait_restarted(cluster, "worker", 1)


def test_two_workers_of_one_scheduler_are_refused_with_the_reason(compose_path, make_cluster):
    compose_path.write_text(DAEMONS)
    with pytest.raises(ComposeError, match=r"scale\.yml") as caught:
        make_cluster(scale={"worker": 2})
    assert caught.value.where == "services.scheduler.environment.RADIXMESH_WORKERS"
