"""Prompts computed by some GPUs, outputs decoded by others, against as many GPUs that do both: a mesh of
`compose/pd.yml` under loads of ids.

    python bench/gpu/pd_load.py --shape llama-3.1-8b --loads hand-over prompts --rates 0 1 2 3
    python bench/gpu/pd_load.py --shape llama-3.1-8b --pairs 2 --loads streams --streams 64 --prompt 4096 --out 256
    python bench/gpu/pd_load.py --backend cpu --model compose/models/tiny-llama --loads hand-over prompts streams
        --streams 4 --decode-prompt 4 --prompt 40 --out 20 --rates 0 4 --seconds 6
    python bench/gpu/pd_load.py --backend simulated --model compose/models/tiny-llama --loads streams --streams 32
        --requests 96 --prompt 1024 --out 64 --staging-bytes 58000 --worker simulated_base_us=56000
        simulated_decode_row_us=80 simulated_prefill_token_us=190 max_tokens_per_step=2048 num_slots=128
        num_pages=200000 max_total_len=2048

--pairs K: K prefill workers and K decode workers, each with a scheduler of its own and, on GPUs, a GPU of its own.
--layouts: `pairs`, and `mixed`: the same daemons, whose schedulers get the role `both` while they run: replicas with
chunked prefill behind the router. Every load runs through each layout.

Loads: `hand-over`: one prompt of --handover-prompt tokens at a time; beyond_ms is the time through a pair beyond that
of one replica, to the first, second and third token; trace: when the last transfers, and the steps with chunks behind
them, came to which point, ms. With --handover-beside N others decode all the time: give them more --decode-out than
comes in --seconds.
`prompts`: --streams outputs of --decode-out tokens, one after the other, and prompts of --prompt tokens at a pace of
each of --rates a second, with --out tokens of output, for --seconds. good_s: requests a second whose first token came
within 1 s and whose gaps are at most 20 ms, by their mean and by their p99. `streams`: --requests outputs of --out
tokens, by --streams clients.

Weights of a shape are random, and its tokenizer made up. ITL is the time between two messages with tokens of one
output. transfers: as daemons count them, since their start, failed ones by reason and seconds by stage; sent and
received from the first chunk on, with the steps of the prefill between chunks. gb_s: GB a second by stage; hand_over:
of the chunk that moves behind its prefill, gather, scatter and all messages included (with --scheduler
transfer_chunk_tokens=0 that is the whole prompt). --results: file of what is known so far, after each load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
import torch
from gpu import pd_clients
from gpu.kept import Kept
from gpu.mesh import gpu_name
from gpu.pd_clients import ANY_NUMBER, Answer, Clients
from gpu.shapes import SHAPES, write_shape
from gpu.whole_mesh import write_tokenizer
from support.mesh import Mesh, running_mesh
from support.wire import metrics_of

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

# Until then clients have imported what they need.
_IMPORTS_S = 5.0
_PROCESSES = 4
_LOG_FIELDS = ("ts", "level", "daemon", "instance", "logger")
_BYTES = "radixmesh_kv_transfer_bytes_total{"
_MOST_FIRST_S, _MOST_GAP_S = 1.0, 0.020
_EXTRA = """
  {name}: &{name}
    image: radixmesh/worker:local
    restart: unless-stopped
    command: ["radixmesh", "{daemon}"]
    environment: {environment}
    volumes: ["{folder}:/models/{model}:ro"]
    healthcheck:
      test: ["CMD", "radixmesh", "health", "127.0.0.1:50051", "--timeout", "9"]
      x-local: {{interval: 1s, timeout: 5s, retries: 20, start_period: 400s, start_interval: 200ms}}
"""


def overlay(args: argparse.Namespace, folder: Path) -> str:
    """Workers and schedulers beyond the first pair, which the file has."""
    text = "services:"
    for pair in range(1, args.pairs):
        for role, suffix in (("decode", ""), ("prefill", "-prefill")):
            worker, scheduler = f"worker{suffix}-{pair}", f"scheduler{suffix}-{pair}"
            common = {"RADIXMESH_LISTEN": "0.0.0.0:50051", "RADIXMESH_METRICS_LISTEN": "0.0.0.0:9100"}
            of_worker = {**common, "RADIXMESH_MODEL": f"/models/{args.name}"}
            of_scheduler = {**common, "RADIXMESH_WORKERS": f"{worker}:50051", "RADIXMESH_ROLE": role}
            for name, daemon, values in ((worker, "worker", of_worker), (scheduler, "scheduler", of_scheduler)):
                text += _EXTRA.format(
                    name=name, daemon=daemon, environment=json.dumps(values), folder=folder, model=args.name
                )
    return text


def names(args: argparse.Namespace, daemon: str) -> dict[str, str]:
    """Services of a daemon, with their roles."""
    ends = [f"-{pair}" if pair else "" for pair in range(args.pairs)]
    return {
        f"{daemon}{suffix}{end}": role for end in ends for suffix, role in (("", "decode"), ("-prefill", "prefill"))
    }


def services(args: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Settings of workers, each with a GPU of its own, of schedulers and of the router."""
    found: dict[str, dict[str, object]] = {}
    # Points that transfers come to are logged: some lines for each.
    level = {"log_level": "debug"}
    for index, worker in enumerate(names(args, "worker")):
        settings: dict[str, object] = {"backend": args.backend, "transfer_staging_bytes": args.staging_bytes}
        if args.backend == "cuda":
            settings |= {"cuda_device": index % max(1, torch.cuda.device_count()), "num_slots": args.num_slots}
            settings |= {"max_total_len": 16_384, "max_tokens_per_step": 8192}
            settings["load_format"] = "auto" if args.model else "dummy"
        found[worker] = {**settings, **level, **_flags(args.worker)}
    for scheduler in names(args, "scheduler"):
        found[scheduler] = {"check_invariants": "false", **level, **_flags(args.scheduler)}
    least = 256 if args.backend == "cuda" else 8
    schedulers = ",".join(f"{name}:50051" for name in names(args, "scheduler"))
    found["router"] = {"schedulers": schedulers, "prefill_min_tokens": least}
    return found


async def measure(args: argparse.Namespace, kept: Kept) -> None:
    kept.note(
        command=" ".join(["python", *sys.argv]),
        machine=f"{gpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "torch": torch.__version__},
        gpus=2 * args.pairs,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = args.model.resolve() if args.model else write_shape(args.shape, Path(name))
        args.name = folder.name
        args.vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        if args.model is None:
            write_tokenizer(folder, args.vocab_size)
        file = Path(name) / "pairs.yml"
        file.write_text(overlay(args, folder))
        started, of = time.monotonic(), services(args)
        async with running_mesh(
            "pd",
            model=args.name,
            folder=folder,
            overlays=(file,) if args.pairs > 1 else (),
            services=of,
            timeout_s=args.start_s,
        ) as mesh:
            layouts: dict[str, dict[str, object]] = {}
            kept.note(start_s=round(time.monotonic() - started, 2), layouts=layouts)
            for layout in args.layouts:
                layouts[layout] = {}
                try:
                    await _set_roles(mesh, args, layout)
                    async with asyncio.timeout(args.timeout_s):
                        for load in args.loads:
                            row = layouts[layout][load] = await _LOADS[load](mesh, args, layout)
                            answers = row.pop("answers", [])
                            if load == "hand-over" and layout == "pairs":
                                row["trace"] = _traced(mesh, args, answers)
                            kept.note(beyond_ms=_beyond(layouts), bugs_logged=list(mesh.bugs))
                            print(json.dumps({layout: {load: layouts[layout][load]}}), file=sys.stderr, flush=True)
                    layouts[layout]["transfers"] = await _transfers(mesh, args)
                # The next layout is measured all the same, whatever this one has died of.
                except Exception as error:
                    layouts[layout]["error"] = repr(error)[:2000]
                    for name in (*names(args, "worker"), *names(args, "scheduler")):
                        print(name, *mesh.cluster.recent_lines(name)[-8:], sep="\n", file=sys.stderr)
                    with contextlib.suppress(Exception):
                        layouts[layout]["transfers"] = await _transfers(mesh, args)
                kept.note(beyond_ms=_beyond(layouts), bugs_logged=list(mesh.bugs))


async def _set_roles(mesh: Mesh, args: argparse.Namespace, layout: str) -> None:
    for name, role in names(args, "scheduler").items():
        async with open_channel(mesh.cluster.address(name)) as channel:
            value = getattr(scheduler_pb2, f"SCHEDULER_ROLE_{role.upper()}") if layout == "pairs" else 0
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            await stub.SetRole(scheduler_pb2.SetRoleRequest(role=value), timeout=10)
    await asyncio.sleep(2.0)  # Their next Load tells the router.


async def _transfers(mesh: Mesh, args: argparse.Namespace) -> dict[str, object]:
    """Counts of schedulers and workers, since their start."""
    told: dict[str, object] = {}
    for name in names(args, "scheduler"):
        async with open_channel(mesh.cluster.address(name)) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=60)
        told[name] = {
            field: getattr(state, field)
            for field in ("num_kv_handed_over", "num_kv_arrived", "num_kv_failed", "prefilled_tokens")
        }
        told[name] |= _kv_figures(await metrics_of(mesh.cluster.address(name, 1, 9100)))
    for name in names(args, "worker"):
        lines = [json.loads(line) for line in mesh.cluster.recent_lines(name) if '"event": "kv_' in line]
        told[f"{name} says"] = [
            {key: line[key] for key in line if key not in _LOG_FIELDS} for line in lines if line["level"] != "debug"
        ]
        told[name] = _kv_figures(await metrics_of(mesh.cluster.address(name, 1, 9100)))
    return told


def _kv_figures(found: dict[str, float]) -> dict[str, object]:
    """Of transfers, among a daemon's metrics: counts, failures by reason, bytes and seconds by stage, and rates."""
    figures: dict[str, object] = {
        key.removeprefix("radixmesh_kv_"): round(value, 4)
        for key, value in found.items()
        if key.startswith(("radixmesh_kv_transfer", "radixmesh_kv_arrival", "radixmesh_kv_reservation"))
        and "_bucket" not in key
        and "_created" not in key
        and value
    }
    seconds = {key: found[key.replace("_bytes_total", "_seconds_sum")] for key in found if _BYTES in key}
    rates = {key.split('"')[1]: found[key] / seconds[key] / 1e9 for key in seconds if seconds[key]}
    return {**figures, "gb_s": {stage: round(rate, 3) for stage, rate in rates.items()}} if rates else figures


async def _hand_over(mesh: Mesh, args: argparse.Namespace, layout: str) -> dict[str, object]:
    """Prompts one at a time, with nothing else there, or beside outputs that run all the time."""
    num, warm_s = args.handover_beside, args.warm_s if args.handover_beside else 0.0
    sizes = {"prompt": args.handover_prompt, "out": 16, "most": args.handovers + 3}
    clients = [_clients(mesh, args, layout, streams=1, after_s=warm_s, **sizes)]
    if num:
        clients.append(_clients(mesh, args, layout, streams=num, prompt=args.decode_prompt, out=args.decode_out))
    answers = (await pd_clients.run(clients))[0][3:]
    if num:
        answers = [answer for answer in answers if answer.times[-1] < clients[1].stop]
    times = np.array([[*answer.times[:3], *[np.nan] * (3 - len(answer.times))] for answer in answers])
    times = (times - np.array([answer.asked for answer in answers])[:, None]) * 1e3
    return {
        "prompt": args.handover_prompt,
        "beside": num,
        "requests": len(answers),
        "answers": answers,
        **{f"token_{n + 1}_ms": _quantiles(times[:, n] / 1e3, (0, 50, 90)) for n in range(3)},
    }


async def _prompts(mesh: Mesh, args: argparse.Namespace, layout: str) -> dict[str, object]:
    """Steady streams of outputs beside prompts at each pace."""
    told: dict[str, object] = {}
    for rate in args.rates:
        num = min(_PROCESSES, args.streams)
        shares = [args.streams // num + (index < args.streams % num) for index in range(num)]
        sizes = {"prompt": args.decode_prompt, "out": args.decode_out}
        clients = [
            _clients(mesh, args, layout, streams=share, number=index, **sizes) for index, share in enumerate(shares)
        ]
        sizes = {"prompt": args.prompt, "out": args.out}
        # The streams are under way when the first prompt comes.
        clients.append(_clients(mesh, args, layout, rate=rate, number=num, after_s=args.warm_s, **sizes))
        start, stop = clients[-1].start, clients[-1].stop
        *of_streams, prompts = await pd_clients.run(clients)
        decodes = [answer for answers in of_streams for answer in answers]
        firsts = [answer.times[0] for answer in prompts if answer.times]
        told[f"{rate:g}/s"] = {
            "decodes": _figures(decodes, start, stop),
            "prompts": _figures(prompts, start, stop),
            "prompt_tok_s": round(len(firsts) * args.prompt / (max(firsts) - start), 1) if firsts else 0.0,
        }
        print(json.dumps({f"{rate:g}/s": told[f"{rate:g}/s"]}), file=sys.stderr, flush=True)
    return told


async def _streams(mesh: Mesh, args: argparse.Namespace, layout: str) -> dict[str, object]:
    """As many outputs as are asked for, as fast as they come."""
    num = min(_PROCESSES, args.streams)
    most = -(-args.requests // args.streams)
    sizes = {"prompt": args.prompt, "out": args.out, "most": most}
    clients = [
        _clients(mesh, args, layout, streams=args.streams // num + (index < args.streams % num), number=index, **sizes)
        for index in range(num)
    ]
    answers = [answer for answers in await pd_clients.run(clients) for answer in answers]
    assert all(answer.is_done for answer in answers)
    start, stop = clients[0].start, max(answer.times[-1] for answer in answers)
    return {
        "requests": len(answers),
        "prompt_tok_s": round(len(answers) * args.prompt / (stop - start), 1),
        **_figures(answers, start, stop),
    }


def _traced(mesh: Mesh, args: argparse.Namespace, answers: list[Answer]) -> list[list[str]]:
    """Points that the last transfers came to: milliseconds since the first one, process, event and its fields. answers:
    of clients that asked one after the other; their tokens are in the trace of the transfer that was under way, and so
    are the steps with chunks of that time, which name no transfer."""
    by_transfer: dict[str, list[tuple[datetime, str]]] = {}
    steps: list[tuple[datetime, str]] = []
    for name in (*names(args, "worker"), *names(args, "scheduler")):
        for line in mesh.cluster.recent_lines(name):
            told = json.loads(line) if '"event": "kv_' in line or '"event": "step_' in line else {}
            if told.get("level") == "debug":
                fields = {key: told[key] for key in told if key not in (*_LOG_FIELDS, "event", "transfer")}
                text = f"{name} {told['event']} {fields or ''}".strip()
                points = by_transfer.setdefault(told["transfer"], []) if "transfer" in told else steps
                points.append((datetime.fromisoformat(told["ts"]), text))
    rows = []
    offset_s = time.time() - time.monotonic()
    for points in sorted(by_transfer.values(), key=max)[-3:]:
        start = min(points)[0].timestamp() - offset_s
        for answer in answers:
            if answer.asked <= start <= answer.times[-1]:
                zone = points[0][0].tzinfo
                asked, *ats = [datetime.fromtimestamp(at + offset_s, zone) for at in (answer.asked, *answer.times[:3])]
                points += [(asked, "client asked"), *((at, f"client token_{n}") for n, at in enumerate(ats, 1))]
                points += [step for step in steps if asked <= step[0] <= ats[-1]]
        first = min(points)[0]
        rows.append([f"{(at - first).total_seconds() * 1e3:.2f} {text}" for at, text in sorted(points)])
    return rows


_LOADS = {"hand-over": _hand_over, "prompts": _prompts, "streams": _streams}


def _clients(
    mesh: Mesh, args: argparse.Namespace, layout: str, *, prompt: int, out: int, streams: int = 0, rate: float = 0.0,
    number: int = 0, after_s: float = 0.0, most: int = ANY_NUMBER,
) -> Clients:  # fmt: skip
    args.num_begun += 1
    seed = 1000 * args.num_begun + number  # No prompt is cached from before.
    start = time.monotonic() + _IMPORTS_S + after_s
    stop = start - after_s + args.warm_s + args.seconds if most == ANY_NUMBER else start + 1e6
    return Clients(
        router=mesh.routers[0], seed=seed, vocab_size=args.vocab_size, prompt=prompt, out=out, start=start, stop=stop,
        streams=streams, rate=rate, most=most,
    )  # fmt: skip


def _figures(answers: list[Answer], start: float, stop: float) -> dict[str, object]:
    """Of tokens between two times; firsts and goodput of outputs that were asked for then, and done."""
    gaps = [
        np.diff(times)[(times[1:] >= start) & (times[1:] <= stop)]
        for times in (np.array(answer.times) for answer in answers)
        if len(times) > 1
    ]
    tokens = sum(
        count
        for answer in answers
        for at, count in zip(answer.times, answer.counts, strict=True)
        if start <= at <= stop
    )
    done = [answer for answer in answers if answer.is_done and answer.asked >= start]
    prompt = [answer for answer in done if answer.first_s <= _MOST_FIRST_S]
    by_mean = [a for a in prompt if not len(a.gaps) or a.gaps.mean() <= _MOST_GAP_S]
    by_p99 = [a for a in prompt if not len(a.gaps) or np.quantile(a.gaps, 0.99) <= _MOST_GAP_S]
    return {
        "out_tok_s": round(tokens / (stop - start), 1),
        "itl_ms": _quantiles(np.concatenate(gaps) if gaps else np.zeros(0), (50, 90, 99, 99.9, 100)),
        "ttft_ms": _quantiles(np.array([a.first_s for a in answers if a.times and a.asked >= start]), (50, 90, 99)),
        "done": len(done),
        "good_s": {"mean": round(len(by_mean) / (stop - start), 2), "p99": round(len(by_p99) / (stop - start), 2)},
    }


def _beyond(layouts: dict[str, dict[str, object]]) -> dict[str, float] | None:
    """Hand-over: medians through a pair less those through one replica."""
    rows = [layouts.get(layout, {}).get("hand-over") for layout in ("pairs", "mixed")]
    if not all(isinstance(row, dict) for row in rows):
        return None
    by_token = {n: [row[f"token_{n}_ms"].get("p50") for row in rows] for n in (1, 2, 3)}
    return {f"token_{n}": round(of[0] - of[1], 2) for n, of in by_token.items() if None not in of}


def _quantiles(seconds: np.ndarray, percents: tuple[float, ...]) -> dict[str, float]:
    values = seconds[np.isfinite(seconds)] * 1e3
    return {f"p{percent:g}": round(float(np.percentile(values, percent)), 2) for percent in percents if len(values)}


def _flags(pairs: list[str]) -> dict[str, str]:
    """NAME=VALUE of daemons' settings."""
    return dict(pair.split("=", 1) for pair in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--model", type=Path, default=None, help="a folder, instead of a shape with random weights")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "simulated"))
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--layouts", nargs="+", default=["pairs", "mixed"], choices=("pairs", "mixed"))
    parser.add_argument("--mixed", dest="layouts", action="store_const", const=["mixed"], help="replicas alone")
    parser.add_argument("--loads", nargs="+", default=["hand-over", "prompts"], choices=list(_LOADS))
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=128, help="of the load streams")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--out", type=int, default=16)
    parser.add_argument("--decode-prompt", type=int, default=128, help="of the streams beside prompts")
    parser.add_argument("--decode-out", type=int, default=512)
    parser.add_argument("--rates", nargs="+", type=float, default=[0.0, 1.0, 2.0, 3.0], help="prompts a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each pace")
    parser.add_argument("--warm-s", type=float, default=2.0, help="of streams alone, before each pace")
    parser.add_argument("--handover-prompt", type=int, default=4096)
    parser.add_argument("--handovers", type=int, default=12)
    parser.add_argument("--handover-beside", type=int, default=0, help="outputs that run meanwhile, for --seconds")
    parser.add_argument("--num-slots", type=int, default=128)
    parser.add_argument("--worker", nargs="*", default=[], metavar="NAME=VALUE", help="settings of all workers")
    parser.add_argument("--scheduler", nargs="*", default=[], metavar="NAME=VALUE", help="settings of all schedulers")
    parser.add_argument("--staging-bytes", type=int, default=4 * 2**30, help="memory of a worker for transfers")
    parser.add_argument("--start-s", type=float, default=400.0)
    parser.add_argument("--timeout-s", type=float, default=400.0, help="of all loads of one layout")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    args.num_begun = 0
    with Kept(args.results) as kept:
        asyncio.run(measure(args, kept))
    layouts = kept.found["layouts"]
    assert isinstance(layouts, dict)
    sys.exit(any("error" in layout for layout in layouts.values()))


if __name__ == "__main__":
    main()
