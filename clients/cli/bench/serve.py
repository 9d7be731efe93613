"""`radixmesh bench serve`: sends a workload to a running server and measures what its clients see."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from radixmesh.cli.access import Access, access_of
from radixmesh.cli.bench.datasets import make_turns, plain_turns
from radixmesh.cli.bench.load_generator import LoadGenerator
from radixmesh.cli.bench.load_turn import LoadTurn, Prompt, load_turns
from radixmesh.cli.bench.oracle import oracle_of
from radixmesh.cli.bench.progress_bar import ProgressBar
from radixmesh.cli.bench.request_record import RequestRecord
from radixmesh.cli.bench.serve_flags import serve_parser
from radixmesh.cli.bench.summary import Summary, summarise, summary_lines, summary_rows
from radixmesh.cli.bench.target import Target, TargetError, TargetOptions, open_target
from radixmesh.cli.bench.workloads import fixed_lengths
from radixmesh.cli.routers import find_routers
from radixmesh.cli.terminal import Terminal
from radixmesh.daemons.cluster.errors import NotRunningError

_WARMUP_SEED = 7_777_777


def run(arguments: list[str]) -> int:
    """Runs the load: 0 if all requests ended well, 1 if one failed or nothing could be measured, 130 if interrupted."""
    options = serve_parser().parse_args(arguments)
    try:
        return asyncio.run(_serve(options, arguments))
    except (TargetError, NotRunningError, ValueError, OSError) as error:
        Terminal(sys.stderr).error(f"radixmesh bench serve: {error}")
        return 1


async def _serve(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    address = options.target or "grpc://" + ",".join(find_routers([], options.project, access_of(options)))
    plot_load = _plotter() if options.plot is not None else None
    best = oracle_of(plain_turns(options)).hit_rate if options.oracle else None
    async with open_target(address, _target_options(options, address)) as target:
        vocab_size = await target.prepare()
        vocab_size = options.vocab_size or vocab_size
        turns = make_turns(options, vocab_size)
        await _warm_up(target, _warm_up_turns(turns[:1], options.warmup, vocab_size))
        load = LoadGenerator(target, turns, concurrency=options.concurrency, vocab_size=vocab_size)
        is_whole = await _run_load(load, shows_progress=not options.no_progress)
        model = target.model
    summary = summarise(load.records)
    _show(summary, load, best, Terminal())
    if options.json is not None:
        report = _report(options, arguments, address, model, load, summary, best)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if plot_load is not None:
        options.plot.write_text(plot_load(load.records, f"{options.dataset}, {model} at {address}"))
    if not is_whole:
        return 130
    return 0 if summary.num_done == len(turns) else 1


def _plotter() -> Callable[[Sequence[RequestRecord], str], str]:
    """Imported only for --plot, and before the load: a missing library must not cost an hour's figures."""
    from radixmesh.cli.bench.plots import plot_load

    return plot_load


def _target_options(options: argparse.Namespace, address: str) -> TargetOptions:
    access = access_of(options)
    return TargetOptions(
        model=options.model,
        temperature=options.temperature,
        ignores_eos=not options.respect_eos,
        timeout_s=options.timeout,
        api_key=options.api_key or _api_key_for(address, options, access),
        tls=access.tls,
        is_plain=options.plain,
        is_ids_only=options.ids_only,
    )


def _api_key_for(address: str, options: argparse.Namespace, access: Access) -> str:
    """By default a mesh's key goes to meshes alone, and OpenAI's to servers of that API."""
    is_http = address.startswith(("http://", "https://"))
    if is_http and options.api_key_file is None:
        return os.environ.get("OPENAI_API_KEY", "")
    return access.api_key


def _warm_up_turns(like: Sequence[LoadTurn], num: int, vocab_size: int | None) -> list[LoadTurn]:
    """`num` short turns in the form of `like`, which share nothing with any workload."""
    if not like or like[0].added.ids is not None:
        return load_turns(fixed_lengths(num, 64, 8, _WARMUP_SEED), vocab_size)
    texts = [f"{number}, and {_WARMUP_SEED + number}?" for number in range(num)]
    is_chat = like[0].added.messages is not None
    prompts = [
        Prompt(messages=({"role": "user", "content": text},)) if is_chat else Prompt(text=text) for text in texts
    ]
    return [LoadTurn(parent=None, added=prompt, out_len=8, delay_s=0.0) for prompt in prompts]


async def _warm_up(target: Target, turns: Sequence[LoadTurn]) -> None:
    """Uncounted requests. Raises TargetError if one fails."""
    load = LoadGenerator(target, turns)
    await load.run()
    for record in load.records:
        if record.error:
            raise TargetError(f"a warm-up request failed: {record.error}")


async def _run_load(load: LoadGenerator, *, shows_progress: bool) -> bool:
    """Runs the load; False if Ctrl-C ended it before its time. What was seen until then counts."""
    main = asyncio.create_task(load.run())
    bar = asyncio.create_task(ProgressBar(load, sys.stderr).watch()) if shows_progress else None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, main.cancel)
    try:
        await asyncio.wait([main])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        main.cancel()
        if bar is not None:
            bar.cancel()
            with suppress(asyncio.CancelledError):
                await bar
    if main.cancelled():
        return False
    main.result()
    return True


def _show(summary: Summary, load: LoadGenerator, best: float | None, terminal: Terminal) -> None:
    for line in summary_lines(summary):
        terminal.line(line)
    if load.num_skipped:
        terminal.line(f"{load.num_skipped} turns were not sent: an answer before them failed")
    if load.num_made_up:
        terminal.line(f"{load.num_made_up} turns continue made-up answers: the server tells no ids, its hits are fewer")
    if best is not None:
        terminal.line(f"an infinite cache would hit {100 * best:.1f}%")
    terminal.table(("", "mean", "p50", "p90", "p95", "p99", "max"), summary_rows(summary))


def _report(
    options: argparse.Namespace,
    arguments: Sequence[str],
    address: str,
    model: str,
    load: LoadGenerator,
    summary: Summary,
    best: float | None,
) -> dict[str, object]:
    report: dict[str, object] = {
        "command": ["radixmesh", "bench", "serve", *_without_key(arguments)],
        "target": address,
        "model": model,
        "dataset": options.dataset,
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "num_turns": load.num_turns,
        "num_skipped": load.num_skipped,
        "num_made_up": load.num_made_up,
        "oracle_hit_rate": best,
        "summary": summary.to_json(),
    }
    if options.details:
        started = min((record.sent for record in load.records), default=0.0)
        report["requests"] = [_details(record, started) for record in load.records]
    return report


def _details(record: RequestRecord, started: float) -> dict[str, object]:
    return {
        "index": record.index,
        "sent_s": record.sent - started,
        "ttft_s": record.ttft_s,
        "e2e_s": record.e2e_s if record.ended else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "deliveries_s": [moment - record.sent for moment in record.deliveries],
        "error": record.error,
    }


def _without_key(arguments: Sequence[str]) -> list[str]:
    """The command line as it may be shown."""
    shown, hides = [], False
    for argument in arguments:
        if hides or argument.startswith("--api-key="):
            shown.append("..." if hides else "--api-key=...")
        else:
            shown.append(argument)
        hides = argument == "--api-key"
    return shown
