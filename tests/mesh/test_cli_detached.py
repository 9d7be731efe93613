"""`up --detach`, `logs`, and what else the command has for programs and shells."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixmesh.cli.log_file import LogReader, LogWriter
from radixmesh.daemons.cluster.run_folder import read_state

REPOSITORY = Path(__file__).parents[2]
COMPOSE = f"""
name: fakes
services:
  router:
    command: [python, {Path(__file__).with_name("fake_daemon.py")}]
    restart: unless-stopped
    stop_grace_period: 1s
    environment: {{RADIXMESH_LISTEN: "0.0.0.0:50051"}}
    healthcheck:
      test: [CMD, radixmesh, health, "127.0.0.1:50051"]
      interval: 100ms
      timeout: 1s
      retries: 50
      start_period: 60s
      start_interval: 50ms
"""


def radixmesh(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RADIXMESH_")}
    command = [sys.executable, "-m", "radixmesh.cli", *arguments]
    environment["PYTHONPATH"] = str(REPOSITORY / "src")
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "fakes.yml").write_text(COMPOSE)
    yield tmp_path / "fakes.yml"
    radixmesh(tmp_path, "down")


def test_a_detached_cluster_runs_on_is_looked_at_and_stopped(compose: Path, tmp_path: Path) -> None:
    up = radixmesh(tmp_path, "up", "-f", str(compose), "--det")
    assert up.returncode == 0 and "radixmesh down" in up.stdout, up.stdout + up.stderr
    process = read_state(tmp_path / ".radixmesh" / "fakes").processes[0]
    assert f"router-1 {process.address}" in up.stdout
    status = radixmesh(tmp_path, "status", "--json")
    told = json.loads(status.stdout)
    assert status.returncode == 0 and (told["pid"], told["health"], told["restarts"]) == (process.pid, "serving", 0)
    assert isinstance(told["uptime_s"], float)
    for arguments in ((), ("router",), ("router-1",), ("-n", "50")):
        shown = radixmesh(tmp_path, "logs", *arguments)
        assert shown.returncode == 0 and f"router-1 | hello from {process.pid}\n" in shown.stdout, shown
    assert radixmesh(tmp_path, "logs", "-n", "0").stdout == ""
    unknown = radixmesh(tmp_path, "logs", "worker")
    assert unknown.returncode == 1 and "router-1" in unknown.stdout
    again = radixmesh(tmp_path, "up", "-f", str(compose), "--detach")
    assert again.returncode == 1 and "runs already" in again.stdout
    down = radixmesh(tmp_path, "down")
    assert (down.returncode, down.stdout) == (0, "fakes is stopped.\n")


def test_down_takes_the_file_that_up_took(compose: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yml"
    other.write_text(COMPOSE.replace("name: fakes", "name: others"))
    try:
        for file in (compose, other):
            assert radixmesh(tmp_path, "up", "-f", str(file), "--detach").returncode == 0
        several = radixmesh(tmp_path, "down")
        assert several.returncode == 1 and "several clusters run here (fakes, others)" in several.stdout
        down = radixmesh(tmp_path, "down", "-f", str(other))
        assert (down.returncode, down.stdout) == (0, "others is stopped.\n")
        again = radixmesh(tmp_path, "down", "-f", str(other))
        assert again.returncode == 1 and "no cluster 'others'" in again.stdout
        missing = radixmesh(tmp_path, "down", "-f", str(tmp_path / "missing.yml"))
        assert missing.returncode == 1 and "missing.yml" in missing.stdout
    finally:
        radixmesh(tmp_path, "down", "-p", "others")


def test_a_detached_start_that_fails_leaves_nothing(compose: Path, tmp_path: Path) -> None:
    compose.write_text(COMPOSE.replace("environment: {", 'environment: {FAKE_LOADING_S: "1000", '))
    late = radixmesh(tmp_path, "up", "-f", str(compose), "-d", "--wait-s", "3")
    assert late.returncode == 1 and "not healthy in time: router-1" in late.stdout, late
    assert "no cluster" in radixmesh(tmp_path, "status").stdout
    both = radixmesh(tmp_path, "up", "-f", str(compose), "-d", "--demo")
    assert both.returncode == 1 and "--demo" in both.stdout


def test_logs_follow_until_the_cluster_ends(compose: Path, tmp_path: Path) -> None:
    assert radixmesh(tmp_path, "up", "-f", str(compose), "--detach").returncode == 0
    pid = read_state(tmp_path / ".radixmesh" / "fakes").processes[0].pid
    assert pid is not None
    command = [sys.executable, "-m", "radixmesh.cli", "logs", "-f"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONUNBUFFERED": "1"}
    follower = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        for line in follower.stdout:
            if f"hello from {pid}" in line:
                break
        os.kill(pid, signal.SIGKILL)
        for line in follower.stdout:
            if "hello from" in line:
                break
        assert radixmesh(tmp_path, "down").returncode == 0
        assert "goodbye" in follower.stdout.read()
        assert follower.wait(60) == 0
    finally:
        follower.kill()
        follower.communicate()


def test_a_taken_port_says_which_flag_helps(compose: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        compose.write_text(COMPOSE.replace("    healthcheck:", f'    ports: ["{port}:50051"]\n    healthcheck:'))
        up = radixmesh(tmp_path, "up", "-f", str(compose))
        assert up.returncode == 1 and str(port) in up.stdout and "--no-publish" in up.stdout
        detached = radixmesh(tmp_path, "up", "-f", str(compose), "-d")
        assert detached.returncode == 1 and "--no-publish" in detached.stdout


def test_the_log_file_is_bounded_and_loses_no_line_to_a_reader(tmp_path: Path) -> None:
    writer, reader = LogWriter(tmp_path, max_bytes=2000), LogReader(tmp_path, lambda name: name == "a-1")
    read: list[tuple[str, str]] = []
    for number in range(500):
        writer.write("a-1", f"line {number}\nmore")
        writer.write("b-1", "other")
        if number % 5 == 0:
            read += reader.lines()
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * 2000 + 200
    writer.close()
    read += reader.lines()
    assert read == [("a-1", text) for number in range(500) for text in (f"line {number}", "more")]
    assert [text for _, text in LogReader(tmp_path, lambda name: True).lines()][-3:] == ["line 499", "more", "other"]
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    writer = LogWriter(tmp_path / "nowhere")
    writer.write("a-1", "a folder that is gone costs the line alone")


def complete(shell: str, script: Path, *words: str) -> list[str]:
    """Completions that Tab offers for the last word."""
    given = " ".join(f"'{word}'" for word in words)
    if shell == "bash":
        words_set = f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}"
        ask = f"source {script}; {words_set}; _radixmesh; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    elif shell == "fish":
        ask = f"source {script}; complete -C '{' '.join(words)}'"
    else:
        ask = f"""
            compdef() {{ :; }}; compadd() {{ [[ $1 == -- ]] && shift; print -l -- "$@"; }}; _files() {{ :; }}
            source {script}; words=({given}); CURRENT={len(words)}; _radixmesh"""
    environment = os.environ | {"PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", ask], env=environment, capture_output=True, text=True, timeout=60, check=True)
    return [line.split("\t")[0] for line in done.stdout.splitlines() if line.startswith(words[-1])]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_verbs_and_flags(shell: str, tmp_path: Path) -> None:
    printed = radixmesh(tmp_path, "completion", shell)
    assert printed.returncode == 0
    script, command = tmp_path / "script", tmp_path / "radixmesh"
    script.write_text(printed.stdout)
    command.write_text(f'#!/bin/sh\nPYTHONPATH={REPOSITORY}/src exec {sys.executable} -m radixmesh.cli "$@"\n')
    command.chmod(0o755)
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    assert set(complete(shell, script, "radixmesh", "s")) == {"serve", "status", "scheduler"}
    assert "--temperature" in complete(shell, script, "radixmesh", "generate", "--te")
    assert "--api-keys-file" in complete(shell, script, "radixmesh", "router", "--api")


def test_the_version_is_told(tmp_path: Path) -> None:
    import radixmesh as package

    assert radixmesh(tmp_path, "--version").stdout == f"radixmesh {package.__version__}\n"


def test_a_chosen_run_folder_is_found_again(compose: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "state"
    up = radixmesh(tmp_path, "up", "-f", str(compose), "--detach", "--run-folder", str(elsewhere))
    assert up.returncode == 0, up.stdout + up.stderr
    pid = read_state(elsewhere).processes[0].pid
    assert json.loads(radixmesh(tmp_path, "status", "--json").stdout)["pid"] == pid
    assert json.loads(radixmesh(tmp_path, "status", "--json", "-p", "fakes").stdout)["pid"] == pid
    assert "no cluster 'other'" in radixmesh(tmp_path, "status", "-p", "other").stdout
    assert (tmp_path / ".radixmesh" / ".gitignore").read_text() == "*\n"
    # A pointer that others can write is none.
    (pointer,) = (tmp_path / ".radixmesh").glob("*.folder")
    pointer.chmod(0o666)
    assert "no cluster" in radixmesh(tmp_path, "status").stdout
    pointer.chmod(0o600)
    down = radixmesh(tmp_path, "down")
    assert down.returncode == 0 and "fakes is stopped" in down.stdout, down.stderr
    assert not list((tmp_path / ".radixmesh").glob("*.folder"))


def test_a_model_is_named_by_a_folder_not_by_a_path_in_its_name(tmp_path: Path) -> None:
    def up(**variables: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), **variables}
        command = [sys.executable, "-m", "radixmesh.cli", "up", "-f", str(REPOSITORY / "compose/local.yml")]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        return done.stdout

    assert "set RADIXMESH_MODEL_FOLDER" in up(RADIXMESH_MODEL_NAME=str(tmp_path))
    for folder in ("models/mine", str(tmp_path / "nothing")):
        assert "no absolute path of a folder" in up(RADIXMESH_MODEL_FOLDER=folder)
