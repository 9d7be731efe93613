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
from radixmesh.cli.bench.context_fit import fitting_share, longest_of, scaled_plain, scaled_turns
from radixmesh.cli.bench.datasets import make_turns, plain_turns, why_fewer
from radixmesh.cli.bench.load_generator import LoadGenerator
from radixmesh.cli.bench.load_turn import LoadTurn, Prompt, load_turns
from radixmesh.cli.bench.oracle import oracle_of
from radixmesh.cli.bench.progress_bar import ProgressBar
from radixmesh.cli.bench.report.request_record import RequestRecord
from radixmesh.cli.bench.report.sglang_report import sglang_details, sglang_report
from radixmesh.cli.bench.report.summary import Summary, summarise, summary_lines, summary_rows
from radixmesh.cli.bench.serve_flags import serve_parser
from radixmesh.cli.bench.targets.target import Target, TargetError, TargetOptions, open_target
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
    _check_folders(options)
    address = options.target or "grpc://" + ",".join(find_routers([], options.project, access_of(options)))
    plot_load = _plotter() if options.plot is not None else None
    plain = plain_turns(options) if options.oracle else None
    terminal = Terminal()
    async with open_target(address, target_options(options, address)) as target:
        vocab_size = await target.prepare()
        vocab_size = options.vocab_size or vocab_size
        turns, share = _fitting_turns(options, vocab_size, target.context, terminal)
        best = oracle_of(scaled_plain(plain, share)).hit_rate if plain is not None else None
        await _warm_up(target, _warm_up_turns(turns[:1], options.warmup, vocab_size))
        load = LoadGenerator(target, turns, concurrency=options.concurrency, vocab_size=vocab_size)
        is_whole = await _run_load(load, shows_progress=not options.no_progress)
        model = target.model
    summary = summarise(load.records)
    if not is_whole:
        terminal.line(_interrupted(load))
    _show(summary, load, best, terminal)
    if options.json is not None:
        report = _report(options, arguments, address, model, load, summary, best)
        report |= {"is_interrupted": not is_whole, "length_share": share}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.output_file is not None:
        _add_line(options, load.records, summary)
    if plot_load is not None:
        options.plot.write_text(plot_load(load.records, f"{options.dataset}, {model} at {address}"))
    if not is_whole:
        return 130
    return 0 if summary.num_done == len(turns) else 1


def _check_folders(options: argparse.Namespace) -> None:
    """Raises ValueError for a file that could not be written after the load."""
    for flag in ("json", "plot", "output-file"):
        path = getattr(options, flag.replace("-", "_"))
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"--{flag} {path}: there is no folder {path.parent}")


def _fitting_turns(
    options: argparse.Namespace, vocab_size: int | None, context: int | None, terminal: Terminal
) -> tuple[list[LoadTurn], float]:
    """The turns, and the share of their lengths with which the model's context holds them; says what is changed."""
    turns = make_turns(options, vocab_size)
    if options.num_requests is not None and len(turns) < options.num_requests:
        terminal.line(f"{len(turns)} requests, not {options.num_requests}: {why_fewer(options)}")
    share = fitting_share(turns, context)
    if share < 1:
        terminal.line(
            f"all lengths times {share:.2f}: the longest prompt and output are {longest_of(turns)} tokens together, "
            f"the model's context is {context}"
        )
        turns = scaled_turns(turns, share)
    return turns, share


def _interrupted(load: LoadGenerator) -> str:
    num_ended = sum(record.ended > 0 for record in load.records)
    num_running, num_planned = len(load.records) - num_ended, load.num_turns
    return (
        f"interrupted: of {num_planned} planned requests {num_ended} had ended, {num_running} were running, "
        f"{num_planned - len(load.records)} were not sent"
    )


def _plotter() -> Callable[[Sequence[RequestRecord], str], str]:
    """Imported only for --plot, and before the load: a missing library must not cost an hour's figures."""
    from radixmesh.cli.bench.report.plots import plot_load

    return plot_load


def target_options(options: argparse.Namespace, address: str) -> TargetOptions:
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
    if summary.num_done:
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


def _add_line(options: argparse.Namespace, records: Sequence[RequestRecord], summary: Summary) -> None:
    line = sglang_report(
        records,
        summary,
        dataset=options.dataset,
        request_rate=options.request_rate,
        concurrency=options.concurrency,
    )
    with options.output_file.open("a") as file:
        file.write(json.dumps(line | (sglang_details(records) if options.output_details else {})) + "\n")


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
