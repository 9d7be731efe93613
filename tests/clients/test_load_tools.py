"""Tools that measure and evaluate OpenAI servers, against a mesh on the tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from support.client_environments import PythonEnvironment, run_client
from support.client_list import CLIENTS, Record
from support.http import http_address
from support.mesh import COMPOSE, Mesh

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.full, pytest.mark.timeout(2400)]
SCRIPTS = Path(__file__).with_name("scripts")
MODEL = "tiny-llama"
FOLDER = COMPOSE / "models" / MODEL
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_OFFLINE": "1"}
NUM_REQUESTS = 12


class Tool(PythonEnvironment):
    """The environment of a listed client, which runs from now on."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(folder, *CLIENTS[name].packages)
        self._name, self._started = name, time.monotonic()

    def passed(self, record: Record) -> None:
        client = CLIENTS[self._name]
        record(self._name, self.version(client.packages[0]), time.monotonic() - self._started, set(client.checks))


async def test_sglangs_bench_serving(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    tool = Tool("sglang", tmp_path)
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        result = tmp_path / f"{backend}.jsonl"
        command = [str(tool.bin / "python"), "-m", "sglang.bench_serving", "--backend", backend]
        command += ["--base-url", f"http://{http_address(mesh)}", "--model", MODEL, "--tokenizer", str(FOLDER)]
        command += ["--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", "8"]
        command += ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4", "--flush-cache"]
        await asyncio.to_thread(run_client, [*command, "--output-file", str(result)], tmp_path, OFFLINE)
        assert json.loads(result.read_text().splitlines()[-1])["completed"] == NUM_REQUESTS, backend
    tool.passed(record)


async def test_aiperf(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    tool = Tool("aiperf", tmp_path)
    command = [str(tool.bin / "aiperf"), "profile", "-m", MODEL, "--tokenizer", str(FOLDER)]
    command += ["--url", f"http://{http_address(mesh)}", "--endpoint-type", "chat", "--streaming"]
    command += ["--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--ui", "none"]
    command += ["--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    # Told to stay offline, it takes a tokenizer's folder for a name on the hub.
    await asyncio.to_thread(run_client, [*command, "--artifact-dir", str(tmp_path / "out")], tmp_path)
    report = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == NUM_REQUESTS, report
    tool.passed(record)


async def test_guidellm(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    tool = Tool("guidellm", tmp_path)
    command = [str(tool.bin / "guidellm"), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target=http://{http_address(mesh)},model={MODEL}"]
    command += ["--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={FOLDER}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    await asyncio.to_thread(run_client, command, tmp_path, OFFLINE)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    tool.passed(record)


async def test_locust(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    tool = Tool("locust", tmp_path)
    command = [str(tool.bin / "locust"), "-f", str(SCRIPTS / "locustfile.py"), "--headless", "--only-summary"]
    command += ["-u", "4", "-r", "4", "-t", "300", "--stop-timeout", "60", "--host", f"http://{http_address(mesh)}"]
    # Its CSV file is seconds old when it ends.
    command += ["--json-file", str(tmp_path / "locust")]
    await asyncio.to_thread(run_client, command, tmp_path, {"MODEL": MODEL, "NUM_REQUESTS": "40"})
    found = json.loads((tmp_path / "locust.json").read_text())
    assert {entry["name"] for entry in found} == {"/v1/completions", "/v1/chat/completions"}
    assert sum(entry["num_requests"] for entry in found) >= 40, found
    assert not any(entry["num_failures"] for entry in found), found
    tool.passed(record)


async def test_lm_eval(mesh: Mesh, tmp_path: Path, record: Record) -> None:
    """Choices by the logprobs of a prompt that is echoed."""
    tool = Tool("lm_eval", tmp_path)
    rows = [("The Tyger, burning", [" bright", " xylophone"]), ("I met a", [" traveller", " zebra"])]
    data = [{"question": question, "choices": choices, "answer": 0} for question, choices in rows]
    (tmp_path / "data.json").write_text(json.dumps(data))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.json")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tiny.yaml").write_text(json.dumps(task))
    model = f"model={MODEL},base_url=http://{http_address(mesh)}/v1/completions,tokenizer={FOLDER}"
    command = [str(tool.bin / "lm_eval"), "--model", "local-completions", "--tasks", "tiny"]
    command += ["--model_args", f"{model},tokenized_requests=True,num_concurrent=2", "--include_path", str(tmp_path)]
    output = await asyncio.to_thread(run_client, command, tmp_path, OFFLINE)
    assert "|acc   |↑  |    1|" in output, output[-2000:]
    tool.passed(record)
