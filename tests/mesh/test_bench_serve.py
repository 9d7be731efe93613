"""`radixmesh bench serve` as its users run it, against a live mesh with the simulated worker."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.mesh import running_mesh

SRC = Path(__file__).parents[2] / "src"
SHARED = "--dataset shared-prefix --prefix-len 160 --question-len 16 --per-group 8 --output-len 12 --num-requests 32"
FAST = {"simulated_base_us": 2000, "simulated_prefill_token_us": 5, "num_pages": 60_000, "max_total_len": 8192}


async def start(*flags: str, verb: str = "serve") -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radixmesh.cli", "bench", verb, *flags),
        env={"PYTHONPATH": str(SRC)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def bench(*flags: str, verb: str = "serve") -> tuple[int | None, str, str]:
    process = await start(*flags, verb=verb)
    out, err = await asyncio.wait_for(process.communicate(), 200)
    return process.returncode, out.decode(), err.decode()


@pytest.mark.slow
async def test_loads_by_grpc_and_http(tmp_path: Path) -> None:
    async with running_mesh("simulated", worker=FAST) as mesh:
        http = mesh.cluster.address("router", 1, 8000)
        files = ("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg"), "--details", "--oracle")
        grpc = f"grpc://{mesh.routers[0]}"
        code, out, err = await bench("--target", grpc, *SHARED.split(), "--concurrency", "4", *files)
        assert code == 0, err
        assert "32 of 32 requests in " in out and "ttft (ms)" in out and "an infinite cache would hit" in out
        report = json.loads((tmp_path / "a.json").read_text())
        summary = report["summary"]
        assert (summary["num_done"], summary["output_tokens"], summary["is_exact"]) == (32, 32 * 12, True)
        assert (summary["prompt_tokens"], summary["max_running"]) == (32 * 176, 4)
        # Four at a time: of a group's eight requests only those that run at once can miss its prefix.
        assert 0.5 * report["oracle_hit_rate"] < summary["hit_rate"] <= report["oracle_hit_rate"]
        assert 0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"] <= summary["e2e_ms"]["max"]
        assert summary["tpot_ms"]["p50"] >= 2.0, "a step takes two simulated milliseconds"
        assert sorted(request["index"] for request in report["requests"]) == list(range(32))
        ElementTree.parse(tmp_path / "a.svg")

        # The same by HTTP: what the first load left in the cache is found by all.
        code, out, err = await bench(
            "--target", f"http://{http}/v1", *SHARED.split(), "--json", str(tmp_path / "b.json")
        )
        assert code == 0, (out, err)
        over_http = json.loads((tmp_path / "b.json").read_text())["summary"]
        assert (over_http["num_done"], over_http["output_tokens"], over_http["is_exact"]) == (32, 32 * 12, True)
        assert over_http["prompt_tokens"] == 32 * 176 and over_http["hit_rate"] > 0.95

        # Chats: every turn after the answer before it, which is part of the next prompt.
        chat = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "x" * 60}] * 3
        (tmp_path / "chats.json").write_text(json.dumps([{"conversations": chat}] * 4))
        for target in (grpc, f"http://{http}/v1"):
            dataset = ("--dataset", "sharegpt", "--file", str(tmp_path / "chats.json"), "--chat")
            code, _, err = await bench("--target", target, *dataset, "--json", str(tmp_path / "c.json"), "--details")
            assert code == 0, err
            requests = sorted(json.loads((tmp_path / "c.json").read_text())["requests"], key=lambda r: r["index"])
            for first, second, third in zip(requests[::3], requests[1::3], requests[2::3], strict=True):
                assert first["prompt_tokens"] < second["prompt_tokens"] < third["prompt_tokens"]
                assert first["sent_s"] + first["e2e_s"] <= second["sent_s"] <= third["sent_s"] - second["e2e_s"]

        # A workload with delays of its own, in a fifth of their time; outputs are continued by ids.
        code, out, _ = await bench(
            *("--target", grpc, "--dataset", "multi-turn", "--num-requests", "24", "--time-scale", "0.05"),
            *("--json", str(tmp_path / "d.json")),
        )
        turns = json.loads((tmp_path / "d.json").read_text())
        assert (code, turns["num_turns"], turns["num_made_up"]) == (0, 24, 0), out
        assert turns["summary"]["hit_rate"] > 0.7

        # Ctrl-C: what was seen until then is told.
        long = ("--dataset", "none", "--num-requests", "64", "--request-rate", "4")
        process = await start("--target", grpc, *long, "--json", str(tmp_path / "e.json"))
        await asyncio.sleep(5)
        process.send_signal(signal.SIGINT)
        out_bytes, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 130 and b"requests/s" in out_bytes
        assert 0 < json.loads((tmp_path / "e.json").read_text())["summary"]["num_done"] < 64
        async with asyncio.timeout(60):
            while (await mesh.scheduler_state()).load.num_running:
                await asyncio.sleep(0.05)


async def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    for flags, wrong in (
        (("--target", "ftp://x"), "is no target: name grpc://host:port"),
        (("--target", "grpc://127.0.0.1:1"), "radixmesh bench serve: "),
        (("--target", "127.0.0.1:1", "--dataset", "sharegpt", "--oracle"), "sharegpt has texts"),
        (("--plot", "x.png"), "plots are SVG: name it x.svg"),
        (("--request-rate", "0"), "more than 0"),
    ):
        code, out, err = await bench(*flags)
        assert code in (1, 2) and wrong in err and "Traceback" not in err and out == "", (flags, err)


# As sglang.bench_serving 0.5 writes them, but for what it says of its own server and flags.
SGLANG_KEYS = {
    *("tag", "backend", "dataset_name", "request_rate", "max_concurrency", "duration", "completed", "concurrency"),
    *("total_input_tokens", "total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens"),
    *("total_output_tokens_retokenized", "request_throughput", "input_throughput", "output_throughput"),
    *("total_throughput", "accept_length", "max_concurrent_requests"),
    *(
        f"{figure}_{name}_ms"
        for figure in ("mean", "median", "std", "p90", "p95", "p99")
        for name in ("e2e_latency", "ttft", "tpot", "itl")
    ),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}


async def test_figures_under_sglangs_names_and_whole_batches(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    rows = ("--result-filename", str(tmp_path / "rows.jsonl"))
    async with running_mesh("simulated", worker=FAST) as mesh:
        target = ("--target", f"grpc://{mesh.routers[0]}")
        for more in ((), ("--output-details",)):
            code, _, err = await bench(*target, *SHARED.split(), "--output-file", str(lines), *more)
            assert code == 0, err
        batches = ("--batch-size", "1", "4", "--input-len", "64", "--output-len", "9")
        code, out, err = await bench(*target, *batches, *rows, verb="one-batch")
        assert code == 0 and "last_ttft" in out, err
        offline = ("--num-prompts", "20", "--input-len", "64", "--output-len", "8")
        code, out, err = await bench(*target, *offline, *rows, verb="offline-throughput")
        assert code == 0 and "total_throughput" in out, err
    plain, detailed = (json.loads(line) for line in lines.read_text().splitlines())
    assert plain.keys() == SGLANG_KEYS and detailed.keys() == SGLANG_KEYS | DETAILS
    assert (plain["completed"], plain["total_output_tokens"], plain["total_input_tokens"]) == (32, 32 * 12, 32 * 176)
    assert detailed["output_lens"] == [12] * 32 and all(len(gaps) == 11 or gaps for gaps in detailed["itls"])
    one, four, whole = (json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    assert [(row["batch_size"], row["input_len"], row["output_len"]) for row in (one, four)] == [(1, 64, 9), (4, 64, 9)]
    for row in (one, four):
        assert 0 < row["last_ttft"] < row["latency"] and row["output_throughput"] > 0
    assert (whole["successful_requests"], whole["total_output_tokens"]) == (20, 160)
    code, _, err = await bench("--target", "grpc://127.0.0.1:1", verb="one-batch")
    assert code == 1 and err.count("\n") <= 2, err
