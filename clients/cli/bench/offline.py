"""`radixmesh bench one-batch` and `bench offline-throughput`: requests that are all there at once."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from radixmesh.cli.access import access_of, add_access_flags
from radixmesh.cli.bench.load_generator import LoadGenerator
from radixmesh.cli.bench.load_turn import LoadTurn, Prompt
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.serve_flags import count
from radixmesh.cli.bench.targets.target import Target, TargetError, TargetOptions, open_target
from radixmesh.cli.routers import find_routers
from radixmesh.cli.serve import serve_environment
from radixmesh.cli.serve.model_check import ModelCheckError
from radixmesh.cli.serve.model_source import ModelSourceError
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import ClusterError, NotRunningError

_Bench = Callable[[argparse.Namespace, Target, np.random.Generator, int | None], Awaitable[list[dict[str, object]]]]

_START_S = 900.0
_WARMUP_LEN = 8


def run_one_batch(arguments: list[str]) -> int:
    """Times prefill and decode of whole batches: 0 if all requests ended well."""
    parser = _parser("one-batch", "Time batches of equal requests that arrive together: prefill, then decode.")
    parser.add_argument("--batch-size", type=count, nargs="+", default=[1], metavar="N", help="one row each (1)")
    parser.add_argument("--input-len", type=count, nargs="+", default=[256], metavar="N", help="prompt tokens (256)")
    parser.add_argument("--output-len", type=count, nargs="+", default=[16], metavar="N", help="output tokens (16)")
    return _run(parser, arguments, _one_batches)


def run_offline_throughput(arguments: list[str]) -> int:
    """Tokens a second with every request there from the start: 0 if all ended well."""
    parser = _parser("offline-throughput", "Send all requests at once and measure the tokens a second.")
    parser.add_argument("--num-prompts", type=count, default=64, metavar="N", help="requests (64)")
    parser.add_argument("--input-len", type=count, default=256, metavar="N", help="prompt tokens of each (256)")
    parser.add_argument("--output-len", type=count, default=64, metavar="N", help="output tokens of each (64)")
    return _run(parser, arguments, _offline_throughput)


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"radixmesh bench {name}", description=f"{text} Prompts are random ids that share nothing."
    )
    parser.add_argument(
        "--model-path", help="folder or hub name: a mesh is started on it and stopped again; else one that runs is used"
    )
    parser.add_argument("--target", metavar="ADDRESS", help="grpc://host:port or http://host:port/v1 of one that runs")
    parser.add_argument("-p", "--project", help="which cluster, if several run here")
    parser.add_argument("--gpu", choices=("auto", "cpu", "cuda"), default="auto", help="with --model-path (auto)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (1)")
    parser.add_argument("--result-filename", type=Path, metavar="FILE", help="add a JSON line for each row there")
    add_access_flags(parser)
    return parser


def _run(parser: argparse.ArgumentParser, arguments: list[str], bench: _Bench) -> int:
    options = parser.parse_args(arguments)
    try:
        rows = asyncio.run(_measure(options, bench))
    except (TargetError, NotRunningError, ClusterError, ModelSourceError, ModelCheckError, OSError) as error:
        Terminal(sys.stderr).error(f"{parser.prog}: {error}")
        return 1
    terminal = Terminal()
    columns = tuple(rows[0])
    terminal.table(columns, [tuple(_shown(row[name]) for name in columns) for row in rows])
    if options.result_filename is not None:
        with options.result_filename.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


async def _measure(options: argparse.Namespace, bench: _Bench) -> list[dict[str, object]]:
    async with _address(options) as address, open_target(address, TargetOptions(tls=access_of(options).tls)) as target:
        vocab_size = await target.prepare()
        source = np.random.default_rng(options.seed)
        await _send(target, _turns(source, 2, _WARMUP_LEN, _WARMUP_LEN, vocab_size))
        return await bench(options, target, source, vocab_size)


@asynccontextmanager
async def _address(options: argparse.Namespace) -> AsyncIterator[str]:
    """The mesh to measure; one is started for --model-path, on free ports."""
    if options.model_path is None:
        yield options.target or "grpc://" + ",".join(find_routers([], options.project, access_of(options)))
        return
    # Reading compose files is slow to import.
    from radixmesh.daemons.cluster.local_cluster import LocalCluster

    compose_file = serve_environment(options.model_path, options.gpu)
    async with LocalCluster([compose_file], publish=False, project="radixmesh-bench") as cluster:
        await cluster.wait_healthy(_START_S)
        yield f"grpc://{cluster.address('router')}"


async def _one_batches(
    options: argparse.Namespace, target: Target, source: np.random.Generator, vocab_size: int | None
) -> list[dict[str, object]]:
    """As sglang.bench_one_batch_server names them: seconds, and tokens a second."""
    rows: list[dict[str, object]] = []
    for batch_size in options.batch_size:
        for input_len in options.input_len:
            for output_len in options.output_len:
                records = await _send(target, _turns(source, batch_size, input_len, output_len, vocab_size))
                started, ended = min(r.sent for r in records), max(r.ended for r in records)
                last_ttft = max(r.deliveries[0] for r in records) - started
                decode_s = ended - started - last_ttft
                num_decoded = batch_size * (output_len - 1)
                rows.append(
                    {
                        "batch_size": batch_size,
                        "input_len": input_len,
                        "output_len": output_len,
                        "latency": ended - started,
                        "last_ttft": last_ttft,
                        "input_throughput": batch_size * input_len / last_ttft,
                        "output_throughput": num_decoded / decode_s if num_decoded and decode_s > 0 else 0.0,
                        "overall_throughput": batch_size * (input_len + output_len) / (ended - started),
                    }
                )
    return rows


async def _offline_throughput(
    options: argparse.Namespace, target: Target, source: np.random.Generator, vocab_size: int | None
) -> list[dict[str, object]]:
    """As sglang.bench_offline_throughput names them."""
    turns = _turns(source, options.num_prompts, options.input_len, options.output_len, vocab_size)
    records = await _send(target, turns)
    seconds = max(r.ended for r in records) - min(r.sent for r in records)
    inputs, outputs = sum(r.prompt_tokens for r in records), sum(r.output_tokens for r in records)
    return [
        {
            "backend": "radixmesh",
            "successful_requests": len(records),
            "total_latency": seconds,
            "total_input_tokens": inputs,
            "total_output_tokens": outputs,
            "request_throughput": len(records) / seconds,
            "input_throughput": inputs / seconds,
            "output_throughput": outputs / seconds,
            "total_throughput": (inputs + outputs) / seconds,
        }
    ]


async def _send(target: Target, turns: Sequence[LoadTurn]) -> list[RequestRecord]:
    """All at once. Raises TargetError if one fails."""
    load = LoadGenerator(target, turns)
    await load.run()
    for record in load.records:
        if record.error:
            raise TargetError(f"a request failed: {record.error}")
    return load.records


def _turns(
    source: np.random.Generator, number: int, input_len: int, output_len: int, vocab_size: int | None
) -> list[LoadTurn]:
    low, high = 3, max(4, vocab_size or 256)
    prompts = [Prompt(ids=source.integers(low, high, input_len).astype(np.int32)) for _ in range(number)]
    return [LoadTurn(parent=None, added=prompt, out_len=output_len, delay_s=0.0) for prompt in prompts]


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"
