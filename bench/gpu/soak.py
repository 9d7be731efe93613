"""The whole mesh under mixed random load for minutes, while its scheduler is killed every minute and its worker once.

    python bench/gpu/soak.py > soak.json                                          # 3B shape on a GPU, 10 minutes
    python bench/gpu/soak.py --worker deterministic=true                          # answers are compared, too
    python bench/gpu/soak.py --minutes 2 --kill-s 25 --streams 12 --longest-prompt 192 --longest-out 64 --drift 1 \\
        --worker backend=cpu model=compose/models/tiny-llama cpu_threads=1 num_slots=16 num_pages=4000 --baseline-out 64

Clients in processes of their own keep --streams requests open: prompts of all lengths, alone, with shared prefixes, as
turns of conversations, as texts; greedy and sampled; a tenth of them aborted, in three ways. Every request that is not
must come to exactly the tokens asked for, without a gap or repetition. The mesh is that of compose/gpu.yml, whose
supervisor brings back what is killed (-9).

Prints one JSON document, a line of progress every 30 s on stderr, and exits with 1 if "problems" is not empty:
- requests: by how they ended. probe_mismatches: of fixed requests, held against it in the deterministic mode only: in
  the other, and with random weights, the batch may change an answer.
- kills: back_s until the daemon was healthy; stall_s, first_token_s: longest pause of any stream between two tokens,
  and before its first one, until the next kill.
- at_rest: pages, queue and journal when all requests are over, and free pages after a flush of the cache.
- baseline: decode steps of all slots before and after; drift: device time over time, normalised by a linear model.
- lives: memory and files of each process, and growth a minute; gpu: its memory in use.
- logs: errors (none is excused), warnings, and those that a kill explains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from endurance.baseline import BaselineDecode, baseline_decode
from endurance.client_processes import ClientProcesses
from endurance.faults import (
    AtRest,
    Bounds,
    drift_faults,
    growth_faults,
    kill_faults,
    mesh_faults,
    request_faults,
)
from endurance.load import LoadMix
from endurance.mesh import EnduranceMesh, Kill
from endurance.samples import Sample, drift_of, gpu_growth, lives_of, take_sample
from gpu.shapes import SHAPES, write_shape
from gpu.whole_mesh import write_tokenizer

_WORKER = {"backend": "cuda", "load_format": "dummy", "num_slots": "256", "max_total_len": "8192"}
_PROGRESS_S = 30.0
_REST_S = 10.0
_LONGEST_QUIET = 4
# Of the last kill: time to be felt before no request begins any more.
_LAST_KILL_S = 15.0
_BETWEEN_KILLS_S = 10.0


class Soak:
    """One run."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        worker = _flags(args.worker)
        if "model" in worker:
            self._model = Path(worker.pop("model"))
            worker = {"backend": "cuda", "num_slots": "256", **worker}
        else:
            worker = {**_WORKER, **worker}
            self._model = write_shape(args.shape, folder)
            vocab_size = SHAPES[args.shape]["vocab_size"]
            assert isinstance(vocab_size, int)
            write_tokenizer(self._model, vocab_size)
        self._num_slots = int(worker["num_slots"])
        deterministic = worker.get("deterministic", "false" if worker["backend"] == "cuda" else "true")
        self._is_deterministic = deterministic.lower() == "true"
        scheduler = _flags(args.scheduler)
        if worker["backend"] != "cuda":  # It looks at every page after every step.
            scheduler.setdefault("check_invariants", "true")
        self.mesh = EnduranceMesh(self._model, {"worker": worker, "scheduler": scheduler})
        vocabulary = json.loads((self._model / "config.json").read_text())
        self._mix = LoadMix(
            vocab_size=vocabulary["vocab_size"],
            longest_prompt=args.longest_prompt,
            longest_out=args.longest_out,
            abort_share=args.abort_share,
            seed=args.seed,
        )
        self._samples: list[Sample] = []
        self._baseline: list[BaselineDecode] = []
        self._page_violations = 0
        self._problems: list[str] = []
        self._began = 0.0

    async def run(self) -> dict[str, object]:
        async with self.mesh:
            for name in ("first", "before"):  # The first of all pays for what is compiled at its first use.
                self._baseline.append(await self._decode_baseline(name))
            self._baseline.pop(0)
            self._began = time.monotonic()
            until = self._began + 60 * self._args.minutes
            clients = ClientProcesses(
                self._folder,
                self.mesh.router,
                self._mix,
                num_streams=self._args.streams,
                num_processes=self._args.processes,
                until=until,
            )
            async with clients, asyncio.TaskGroup() as group:
                sampling = group.create_task(self._sample(clients))
                await self._kill_all(until)
                has_ended = await clients.ended(until - time.monotonic() + self._args.drain_s)
                sampling.cancel()
            if has_ended:
                self._baseline.append(await self._decode_baseline("after"))
            at_rest = await self._come_to_rest()
        return self._document(clients, at_rest)

    async def _decode_baseline(self, name: str) -> BaselineDecode:
        """Long enough that the first request still runs when the last one has come."""
        factor = 1
        while True:
            run = await baseline_decode(
                self.mesh,
                rows=self._num_slots,
                out_len=factor * self._args.baseline_out,
                vocab_size=self._mix.vocab_size,
                name=f"{name} {factor}",
            )
            if factor == _LONGEST_QUIET or (run.ms_per_step is not None and run.peak_running == run.rows):
                return run
            factor *= 2

    async def _kill_all(self, until: float) -> None:
        """The daemons that die by _kill_moments, and how that went."""
        args, back = self._args, self._began
        for moment, service in _kill_moments(until - self._began, args.kill_s, args.seed, with_worker=args.kill_worker):
            # A worker that took long to come back needs KV that its next scheduler can take over.
            at = max(self._began + moment, back + min(_BETWEEN_KILLS_S, args.kill_s / 2))
            if at > until - _LAST_KILL_S:
                break
            await asyncio.sleep(at - time.monotonic())
            with suppress(Exception):  # A daemon may be away at that moment; nobody has counted then either.
                self._page_violations += (await self.mesh.state()).num_page_violations
            try:
                kill = asdict(await self.mesh.kill(service))
            except Exception as error:  # The run goes on: what becomes of its requests is the question.
                self._problems.append(f"kill of the {service} at {moment:.0f} s: {error!r}")
                continue
            finally:
                back = time.monotonic()
            self._tell({"killed": kill["service"], "back_s": kill["back_s"], "adopted": kill["adopted_tokens"]})

    async def _sample(self, clients: ClientProcesses) -> None:
        next_progress = self._began + _PROGRESS_S
        while True:
            is_due = time.monotonic() >= next_progress
            self._samples.append(await take_sample(self.mesh, with_gpu=is_due or not self._samples))
            if is_due:
                next_progress += _PROGRESS_S
                self._tell(self._progress(clients))
            await asyncio.sleep(self._args.sample_s)

    def _progress(self, clients: ClientProcesses) -> dict[str, object]:
        sample, counts = self._samples[-1], clients.counts
        earlier = [s.steps for s in self._samples[:-1] if s.steps and s.at > sample.at - _PROGRESS_S]
        step_ms = None
        if sample.steps and earlier and sample.steps.steps > earlier[0].steps:
            busy_s = sample.steps.device_s - earlier[0].device_s
            step_ms = round(1e3 * busy_s / (sample.steps.steps - earlier[0].steps), 3)
        return {
            **{name: counts[name] for name in ("begun", "finished", "aborted", "failed", "tokens")},
            "open": clients.num_open,
            "running": sample.num_running,
            "waiting": sample.num_waiting,
            "ms_per_step": step_ms,
            "rss_mb": {name: footprint.rss_mb for name, footprint in sample.footprints.items()},
            "fds": {name: footprint.num_fds for name, footprint in sample.footprints.items()},
            "gpu_mb": sample.gpu_mb,
            "errors": len(self.mesh.logs.errors),
        }

    def _tell(self, what: dict[str, object]) -> None:
        line = {"t": round(time.monotonic() - self._began, 1), **what}
        print(json.dumps(line, separators=(",", ":")), file=sys.stderr, flush=True)

    async def _come_to_rest(self) -> AtRest:
        """Aborts take a moment to arrive."""
        deadline = time.monotonic() + _REST_S
        while True:
            state = await self.mesh.state()
            router, detokenizer = await asyncio.gather(self.mesh.metrics("router"), self.mesh.metrics("detokenizer"))
            is_busy = state.load.num_running or state.load.num_waiting or router.get("radixmesh_requests_running")
            if not is_busy or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if not state.load.num_running:
            await self.mesh.flush_cache()
        return AtRest(
            state=state,
            flushed=await self.mesh.state(),
            journal_requests=router["radixmesh_requests_running"],
            journal_bytes=router["radixmesh_journal_bytes"],
            detokenizer_entries=detokenizer["radixmesh_detokenizer_entries"],
        )

    def _document(self, clients: ClientProcesses, at_rest: AtRest) -> dict[str, object]:
        args, mesh, counts = self._args, self.mesh, clients.counts
        lives, gpu = lives_of(self._samples), gpu_growth(self._samples)
        warm = [sample for sample in self._samples if sample.at > self._began + args.warm_s]
        drift = drift_of(warm, self._began, _PROGRESS_S)
        bounds = Bounds(mb_min=args.growth_mb_min, gpu_mb=args.growth_gpu_mb, drift=args.drift)
        mismatches = sum(seen.total() - max(seen.values()) for seen in clients.answers.values())
        problems = self._problems + request_faults(counts, clients.failures, clients.num_open, clients.oldest)
        if mismatches and self._is_deterministic:
            problems.append(f"{mismatches} answers to probes differ from others to the same")
        if self._page_violations:
            problems.append(f"{self._page_violations} violations of the page invariant before kills")
        problems += kill_faults(mesh.kills) + mesh_faults(mesh) + at_rest.faults()
        problems += growth_faults(lives, gpu, bounds) + drift_faults(drift, self._baseline, bounds)
        return {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}",
            "mode": "deterministic" if self._is_deterministic else "answers may depend on the batch",
            "minutes": args.minutes,
            "problems": problems,
            "requests": dict(sorted(counts.items())),
            "lost": clients.num_open,
            "out_tok_s": round(counts["tokens"] / (60 * args.minutes), 1),
            "probe_answers": sum(seen.total() for seen in clients.answers.values()),
            "probe_mismatches": mismatches,
            "kills": self._kills(clients),
            "at_rest": at_rest.fields(),
            "baseline": [asdict(run) for run in self._baseline],
            "drift": asdict(drift) if drift is not None else None,
            "lives": [asdict(life) for life in lives],
            "gpu": gpu,
            "logs": {
                "errors": mesh.logs.errors,
                "warnings": dict(mesh.logs.warnings),
                "explained_by_kills": dict(mesh.logs.explained),
                "other_lines": mesh.logs.other_lines,
            },
            "started": mesh.logs.started,
        }

    def _kills(self, clients: ClientProcesses) -> list[dict[str, object]]:
        def row(kill: Kill, until: float) -> dict[str, object]:
            return {
                **asdict(kill),
                "at": round(kill.at - self._began, 1),
                "stall_s": clients.longest_pause(kill.at, until, before_first=False),
                "first_token_s": clients.longest_pause(kill.at, until, before_first=True),
            }

        ends = [*(kill.at for kill in self.mesh.kills[1:]), float("inf")]
        return [row(kill, end) for kill, end in zip(self.mesh.kills, ends, strict=False)]


def _kill_moments(seconds: float, period: float, seed: int, *, with_worker: bool) -> list[tuple[float, str]]:
    """(seconds since the start, service), in order: the scheduler every `period`, a little later or earlier; the worker
    once, at about half time, between two of those."""
    rng = random.Random(seed)
    numbers = range(1, int(seconds / period) + 1)
    moments = [(period * (number + rng.uniform(-0.05, 0.05)), "scheduler") for number in numbers]
    if with_worker:
        moments.append((period * (round(seconds / 2 / period - 0.5) + 0.5), "worker"))
    return sorted(moments)


def _flags(texts: list[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


async def soak(args: argparse.Namespace) -> dict[str, object]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory() as folder:
        return await Soak(args, Path(folder)).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=192)
    parser.add_argument("--processes", type=int, default=None, help="of clients; default: one to 32 streams")
    parser.add_argument("--longest-prompt", type=int, default=2048)
    parser.add_argument("--longest-out", type=int, default=512)
    parser.add_argument("--abort-share", type=float, default=0.1)
    parser.add_argument("--kill-s", type=float, default=60.0, help="between two kills of the scheduler")
    parser.add_argument("--no-kill-worker", dest="kill_worker", action="store_false")
    parser.add_argument("--baseline-out", type=int, default=384, help="tokens of the requests that run alone")
    parser.add_argument("--sample-s", type=float, default=3.0)
    parser.add_argument("--warm-s", type=float, default=20.0, help="not part of the drift")
    parser.add_argument("--drain-s", type=float, default=60.0)
    parser.add_argument("--growth-mb-min", type=float, default=10.0, help="of a process that lived 3 minutes, at most")
    parser.add_argument("--growth-gpu-mb", type=float, default=256.0)
    parser.add_argument("--drift", type=float, default=0.1, help="share by which steps may be slower in the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    parser.add_argument("--scheduler", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the scheduler")
    args = parser.parse_args()
    args.processes = args.processes or max(1, min((os.cpu_count() or 1) // 2, args.streams // 32))
    try:
        document = asyncio.run(soak(args))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    print(json.dumps(document, indent=1))
    sys.exit(1 if document["problems"] else 0)


if __name__ == "__main__":
    main()
