"""`radixmesh serve` as a user runs it: a folder, two names, OpenAI's API, Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

TINY = Path(__file__).parents[2] / "compose/models/tiny-llama"


def test_a_folder_is_served_under_both_names_until_interrupted(tmp_path: Path) -> None:
    port, grpc_port = _free_ports(2)
    command = [*(sys.executable, "-m", "radixmesh.cli", "serve", str(TINY), "--gpu", "cpu")]
    command += ["--served-model-name", "mine,gpt-4o", "--port", str(port), "--grpc-port", str(grpc_port)]
    output = (tmp_path / "output").open("w+")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, env={**os.environ, "NO_COLOR": "1"})
    try:
        _wait_for(output.name, f"mine is served at http://127.0.0.1:{port}/v1", process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            listed = [entry["id"] for entry in client.get("/v1/models").json()["data"]]
            assert listed == ["mine", "gpt-4o"]
            body = {"prompt": "The Tyger", "max_tokens": 4, "temperature": 0}
            by_name, by_alias = (client.post("/v1/completions", json={**body, "model": name}).json() for name in listed)
            assert by_name["choices"][0]["text"] == by_alias["choices"][0]["text"] != ""
            assert by_alias["model"] == "mine"
            assert client.post("/v1/completions", json={**body, "model": "other"}).status_code == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        output.close()


def test_two_processes_hold_a_model(tmp_path: Path) -> None:
    """--tp 2 on a CPU: the text of one, and a status that shows both ranks in a group."""
    port, grpc_port = _free_ports(2)
    run = [*(sys.executable, "-m", "radixmesh.cli")]
    command = [
        *run,
        "serve",
        str(TINY),
        "--gpu",
        "cpu",
        "--tp",
        "2",
        "--port",
        str(port),
        "--grpc-port",
        str(grpc_port),
    ]
    environment = {**os.environ, "NO_COLOR": "1"}
    output = (tmp_path / "output").open("w+")
    process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=output, env=environment)
    try:
        _wait_for(output.name, f"served at http://127.0.0.1:{port}/v1", process)
        item = min(json.loads((TINY / "recitations.json").read_text()), key=lambda item: len(item["expected_ids"]))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            body = {"prompt": item["prompt_ids"], "max_tokens": len(item["expected_ids"]), "temperature": 0}
            answer = client.post("/v1/completions", json={**body, "model": "tiny-llama"}).json()
            assert answer["choices"][0]["text"] == item["expected"]
        shown = subprocess.run(
            [*run, "status"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        for rank in range(2):
            assert f"rank {rank} of 2 (tp {rank}/2), generation 1" in shown.stdout, shown.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        output.close()


def _wait_for(path: str, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while text not in Path(path).read_text():
        assert process.poll() is None and time.monotonic() < deadline, Path(path).read_text()
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports below the ephemeral range, so that no outgoing connection takes one before the router does."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(10_000, 19_999)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports
