"""Guided rows beside free ones through a scheduler and a worker as processes, ids in, ids out, all of fixed lengths.

    python bench/gpu/guided.py > bench/results/h200-guided.json
    python bench/gpu/guided.py --backend cpu --model compose/models/tiny-llama --rows 16 --tokens 48 --jump-forward 8

free: no row follows a grammar; guided: all do; mixed: --among of them do, and others_of_free compares the speed of the
rest with the same rows of the free run. The schema's array cannot end within a row's length. Every guided output is
held against the grammar afterwards. tokens_a_step_and_row: below that of the free run, rows were left out of steps
because their masks came late. mask_stages: with --stages, of all runs, from the moment that tokens are known; the log
that they are read from costs guided rows a tenth of their speed. masks: compilation, cache and fills in this process,
one thread. jump_forward: one stream whose schema is mostly keys, without and with drafts of forced text. part_seconds:
what each part takes. Most of it starts workers, compiles and writes texts by tools' schemas; --temperatures 1 0,
--runs 3 and --tools 20 take twice as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from gpu.guided_vocabulary import write_vocabulary
from gpu.kept import Kept
from gpu.mesh import device_steps, free_port, gpu_name, short_line
from gpu.shapes import write_shape
from guided_masks import measured, percentiles
from hop_ladder.bulk_stream import BulkStream
from hop_ladder.processes import Processes, cpu_s
from support.conformance.real_schemas import tool_schemas
from support.conformance.vocabularies import vocabulary_of

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import GrammarBackend, GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.tokenizer.grammar.compiler import GrammarCompiler, GrammarLimits

_START_S = 240.0
_STAGES = ("on its thread", "accepted", "filled", "published", "through")
_STAGES_OF_PROCESSES = ("sent to processes", "reported by processes", "published")
_PERSON = {
    "name": {"type": "string"},
    "city": {"enum": ["Paris", "Rome", "Oslo"]},
    "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "tags": {"type": "array", "items": {"type": "string"}},
    "is_known": {"type": "boolean"},
}
_KEYS = {
    f"{what}_of_the_customer_in_this_order": {"enum": ["yes", "no"]}
    for what in ("registration", "confirmation", "cancellation", "classification", "authorisation", "notification")
}


def array_of(properties: Mapping[str, object], num_tokens: int) -> str:
    """A schema of so many objects that no text of `num_tokens` tokens is complete."""
    item = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return json.dumps({"type": "array", "items": item, "minItems": num_tokens})


async def measure(args: argparse.Namespace, kept: Kept) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, parts = Path(name), _PartSeconds(kept)
        model = args.model or write_shape(args.shape, folder)
        if args.model is None:
            write_vocabulary(model, json.loads((model / "config.json").read_text())["vocab_size"])
        vocabulary = vocabulary_of(model)
        backend = load_backend("xgrammar", vocabulary)
        parts.over("vocabulary")
        kept.note(
            command=" ".join(["python", *sys.argv]),
            machine=f"{gpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}",
            versions={"python": platform.python_version(), "torch": torch.__version__, "grammar": backend.format},
            shape=model.name,
            vocabulary=vocabulary.vocab_size,
            rows=args.rows,
            tokens=args.tokens,
        )
        names = [] if args.model is not None else _spelled_names(vocabulary, 6, 24)
        keys = {name: {"enum": ["yes", "no"]} for name in names} or _KEYS
        forced = backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, array_of(keys, args.tokens)))
        without: dict[str, object] | None = None
        if not args.only_jumps:
            found, without = await _through_mesh(args, folder, model, backend, forced, kept)
            kept.note(**found)
            parts.over("mesh")
        if args.jump_forward:
            kept.note(jump_forward=await _jump_forward(args, folder, model, backend, forced, without))
            parts.over("jump_forward")
        if not args.only_jumps:
            kept.note(masks=await _masks(args, model, vocabulary))
            parts.over("masks")


class _PartSeconds:
    """Notes how long each part of the benchmark takes."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self._since_s = kept, time.monotonic()
        self._seconds: dict[str, float] = {}

    def over(self, name: str) -> None:
        """A part is over, and the next one begins."""
        now_s = time.monotonic()
        self._seconds[name] = round(now_s - self._since_s, 1)
        self._since_s = now_s
        self._kept.note(part_seconds=self._seconds)
        print(json.dumps(self._seconds), file=sys.stderr, flush=True)


async def _through_mesh(
    args: argparse.Namespace,
    folder: Path,
    model: Path,
    backend: GrammarBackend,
    forced: bytes,
    kept: Kept,
) -> tuple[dict[str, object], dict[str, object] | None]:
    """Its results, and those of one stream with the grammar `forced`, if anybody asks for them."""
    artefact = backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, array_of(_PERSON, args.tokens)))
    results: dict[str, object] = {}
    async with _Daemons(folder / "mesh", args, model, jump_forward_tokens=0) as mesh:
        # The first grammar makes the worker import its library, seconds.
        for grammar in (artefact, b""):
            await mesh.run(args, {"warm-up": (args.rows, grammar)}, num_tokens=8)
        for temperature in args.temperatures:
            split = {"few": (args.among, b""), "others": (args.rows - args.among, b"")}
            cases = {
                "free": split,
                "guided": {"few": (args.rows, artefact)},
                "mixed": {**split, "few": (args.among, artefact)},
            }
            rows: dict[str, list[dict[str, object]]] = {name: [] for name in cases}
            for _ in range(args.runs):  # In turns: what else the machine does falls on all of them.
                for name, parts in cases.items():
                    rows[name].append(await mesh.run(args, parts, temperature=temperature))
            best = {name: max(of_case, key=_speed) for name, of_case in rows.items()}
            for name, of_case in rows.items():
                best[name]["runs"] = [row["out_tok_s"] for row in of_case]
            results[f"temperature {temperature:g}"] = {
                **best,
                "guided_of_free": round(_speed(best["guided"]) / _speed(best["free"]), 4),
                "others_of_free": round(_others(rows["mixed"]) / _others(rows["free"]), 4),
            }
            kept.note(**results)
            print(json.dumps(results), file=sys.stderr, flush=True)
        checked = _check(backend, artefact, mesh.guided_outputs)
        without = await _one_stream(args, mesh, backend, forced) if args.jump_forward else None
        lines = mesh.log("worker").splitlines()
        late = [line for line in lines if "kernel_compiled_late" in line]
        stages = [json.loads(line)["until_ms"] for line in lines if '"masks_filled"' in line]
        published = [json.loads(line)["until_ms"] for line in lines if '"masks_published"' in line]
    found = {
        "start_s": round(mesh.start_s, 2),
        "late_compiles": [short_line(json.loads(line)) for line in late],
        **results,
        "outputs_checked": checked,
        "mask_stages_ms_p50_p90_p99": _stages(stages, _STAGES) | _stages(published, _STAGES_OF_PROCESSES),
    }
    return found, without


class _Daemons:
    """A worker and a scheduler. An async context manager."""

    def __init__(
        self, folder: Path, args: argparse.Namespace, model: Path, *, jump_forward_tokens: int, num_slots: int = 0
    ) -> None:
        folder.mkdir()
        self._folder = folder
        self._processes = Processes(folder, "unix", start_s=_START_S)
        self._metrics = f"127.0.0.1:{free_port()}"
        self._flags: dict[str, object] = {
            "backend": args.backend,
            "model": model,
            "num_slots": num_slots or max(args.rows, 16),
            "metrics_listen": self._metrics,
            "log-level": "debug" if args.stages else "info",
        }
        if args.backend == "cuda":
            self._flags |= {"load_format": "dummy", "max_tokens_per_step": 8192, "max_total_len": 8192}
        else:
            self._flags["cpu_threads"] = 1
        self._flags["jump_forward_tokens"] = jump_forward_tokens
        self._flags |= dict(text.split("=", 1) for text in args.worker)
        self._num_runs = 0
        self.guided_outputs: list[list[int]] = []
        self.start_s = 0.0

    async def __aenter__(self) -> _Daemons:
        processes = await self._processes.__aenter__()
        started = time.monotonic()
        try:
            await processes.start("worker", "worker", self._flags)
            self.start_s = time.monotonic() - started
            await processes.start("scheduler", "scheduler", {"workers": processes.address("worker")})
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._processes.__aexit__(None, None, None)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    async def run(
        self,
        args: argparse.Namespace,
        parts: Mapping[str, tuple[int, bytes]],
        *,
        temperature: float = 1.0,
        num_tokens: int = 0,
    ) -> dict[str, object]:
        """Rows of `parts` (how many, by which grammar) all at once, each of `num_tokens`, 0 = those of args."""
        timeout_s = args.timeout_s
        self._num_runs += 1
        num_tokens = num_tokens or args.tokens
        rng = np.random.default_rng(self._num_runs)
        address = self._processes.address("scheduler")
        async with AsyncExitStack() as stack:
            streams = {
                name: await stack.enter_async_context(
                    BulkStream(
                        address,
                        f"{name}-{self._num_runs}",
                        str(self._num_runs),
                        temperature=temperature,
                        keeps_outputs=bool(grammar),
                    )
                )
                for name, (_, grammar) in parts.items()
            }
            for name, (_, grammar) in parts.items():
                # Of a request of its own: a router sends a grammar, megabytes, once to a scheduler.
                await streams[name].submit(_prompts(rng, 1, args.prompt), 1, grammar=grammar)
                await streams[name].until(num_finished=1, timeout_s=timeout_s)
            await asyncio.sleep(0.3)
            cpu_before = cpu_s(self._processes.pid("worker"))
            threads_before = _thread_cpu_s(self._processes.pid("worker"))
            busy, steps = await device_steps(self._metrics)
            start = time.monotonic()
            for name, (num_rows, grammar) in parts.items():
                await streams[name].submit(_prompts(rng, num_rows, args.prompt), num_tokens, grammar=grammar)
            for name, (num_rows, _) in parts.items():
                await streams[name].until(num_finished=1 + num_rows, timeout_s=timeout_s)
            after_busy, after_steps = await device_steps(self._metrics)
            cores = (cpu_s(self._processes.pid("worker")) - cpu_before) / (time.monotonic() - start)
        threads = _thread_cpu_s(self._processes.pid("worker"))
        used = [
            [round(now - then, 2) for now, then in zip(threads[tid], threads_before.get(tid, (0.0, 0.0)), strict=True)]
            for tid in threads
        ]
        wall = max(stream.last_token_at for stream in streams.values()) - start
        total = sum(num_rows for num_rows, _ in parts.values()) * num_tokens
        assert sum(stream.num_tokens for stream in streams.values()) == total + len(streams)
        for name, (_, grammar) in parts.items():
            if grammar:
                self.guided_outputs += streams[name].outputs().values()
        num_steps = int(after_steps - steps)
        row: dict[str, object] = {
            "out_tok_s": round(total / wall, 1),
            "seconds": round(wall, 3),
            "steps": num_steps,
            "tokens_a_step_and_row": round(total / num_steps / sum(num for num, _ in parts.values()), 4),
            "device_idle": round(1.0 - (after_busy - busy) / wall, 4),
            "ms_per_step": round(wall / num_steps * 1e3, 3),
            "worker_cores": round(cores, 2),
            "busiest_threads": sorted(used, key=sum, reverse=True)[:14],
        }
        if "others" in streams:
            num_others = parts["others"][0] * num_tokens
            row["others_tok_s"] = round(num_others / (streams["others"].last_token_at - start), 1)
        return row


async def _masks(args: argparse.Namespace, model: Path, vocabulary: GuidedVocabulary) -> dict[str, object]:
    """Of tool definitions: compilation and fills, and how long a second compilation by the tokenizer's cache takes. It
    follows the first one at once: the cache has room for a dozen artefacts of a large vocabulary, 5 MB each."""
    tools = list(tool_schemas().values())[: 5 * args.tools : 5]
    compiler = GrammarCompiler(model, "xgrammar", GrammarLimits(timeout_s=60.0))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    try:
        # Twice in a row: of a large vocabulary the cache does not hold all of them.
        for schema in [schema for schema in tools for _ in range(2)]:
            since_s = time.perf_counter()
            source = GrammarSource(GrammarForm.JSON_SCHEMA, json.dumps(schema))
            try:
                artefact = await compiler.compile(source)
            except MeshError:
                continue  # measured() counts those that are refused.
            seconds[artefact.is_cached].append(time.perf_counter() - since_s)
    finally:
        compiler.close()
    return {
        **measured("xgrammar", vocabulary, tools),
        "by_process_ms_p50_p99": percentiles(seconds[False][1:], 1e3),  # The first starts the process.
        "cache_hits": len(seconds[True]),
        "cached_us_p50_p99": percentiles(seconds[True], 1e6),
    }


async def _jump_forward(
    args: argparse.Namespace,
    folder: Path,
    model: Path,
    backend: GrammarBackend,
    forced: bytes,
    without: dict[str, object] | None,
) -> dict[str, object]:
    """One stream with drafts of forced text, beside one without (None: it has not run yet)."""
    results: dict[str, object] = {}
    for drafts in (0, args.jump_forward):
        if not drafts and without is not None:
            results["drafts 0"] = without
            continue
        async with _Daemons(folder / f"jump-{drafts}", args, model, jump_forward_tokens=drafts, num_slots=16) as mesh:
            row = await _one_stream(args, mesh, backend, forced)
            results[f"drafts {drafts}"] = {**row, "start_s": round(mesh.start_s, 2)}
    speeds = [_speed(dict(row)) for row in results.values() if isinstance(row, dict)]
    return {**results, "ratio": round(speeds[1] / speeds[0], 3)}


async def _one_stream(
    args: argparse.Namespace, mesh: _Daemons, backend: GrammarBackend, forced: bytes
) -> dict[str, object]:
    num_before = len(mesh.guided_outputs)
    await mesh.run(args, {"warm-up": (1, forced)}, num_tokens=8)
    rows = [await mesh.run(args, {"one": (1, forced)}, num_tokens=2 * args.tokens) for _ in range(args.runs)]
    _check(backend, forced, mesh.guided_outputs[num_before:])
    return {**max(rows, key=_speed), "runs": [row["out_tok_s"] for row in rows]}


def _spelled_names(vocabulary: GuidedVocabulary, num: int, length: int) -> list[str]:
    """Names that the vocabulary has no word for, nor for a part of them: one token a letter. A trained model writes a
    name as its tokenizer cuts it; one of random weights, as often, in any other way that the grammar allows."""
    letters, rng = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", np.random.default_rng(0)
    begins = {text[:2] for text in vocabulary.token_bytes if len(text) > 1}
    names: list[str] = []
    while len(names) < num:
        name = str(rng.choice(list(letters)))
        while len(name) < length:
            following = [letter for letter in letters if (name[-1] + letter).encode() not in begins]
            if not following:
                break
            name += str(rng.choice(following))
        if len(name) == length:
            names.append(name)
    return names


def _check(backend: GrammarBackend, artefact: bytes, outputs: Sequence[Sequence[int]]) -> int:
    """The number of outputs; each token of all of them is one that the grammar takes."""
    grammar = backend.load(artefact)
    for output in outputs:
        matcher = grammar.matcher()
        for index, token in enumerate(output):
            assert matcher.accept(token), f"token {index} ({token}) of {list(output)} does not follow the grammar"
    return len(outputs)


def _prompts(rng: np.random.Generator, num: int, length: int) -> list[IntArray]:
    """Of ids that any vocabulary has."""
    return [rng.integers(10, 700, length).astype(np.int32) for _ in range(num)]


def _thread_cpu_s(pid: int) -> dict[str, tuple[float, float]]:
    """Seconds of each thread so far, its own and the kernel's."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        found[folder.name] = int(fields[11]) * tick_s, int(fields[12]) * tick_s
    return found


def _stages(until_ms: Sequence[Sequence[float]], names: Sequence[str]) -> dict[str, list[float]]:
    """Milliseconds from a step's tokens until its masks have come so far, p50, p90 and p99 of all groups of outputs."""
    if not until_ms:
        return {}
    return {
        name: np.percentile(of_stage, (50, 90, 99)).round(3).tolist()
        for name, of_stage in zip(names, zip(*until_ms, strict=True), strict=True)
    }


def _speed(row: Mapping[str, object]) -> float:
    return float(str(row["out_tok_s"]))


def _others(rows: Sequence[Mapping[str, object]]) -> float:
    return max(float(str(row["others_tok_s"])) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="llama-3.2-3b")
    parser.add_argument("--model", type=Path, default=None, help="a folder with weights and vocabulary, for the CPU")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--among", type=int, default=None, help="guided rows of the mixed run; a quarter")
    parser.add_argument("--tokens", type=int, default=256, help="length of every output")
    parser.add_argument("--prompt", type=int, default=128, help="length of every prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--tools", type=int, default=6, help="tool definitions that masks are measured with")
    parser.add_argument("--jump-forward", type=int, default=0, metavar="DRAFTS", help="most forced tokens a step")
    parser.add_argument("--stages", action="store_true", help="the worker logs how long each stage of masks takes")
    parser.add_argument("--only-jumps", action="store_true", help="nothing but --jump-forward")
    parser.add_argument("--timeout-s", type=float, default=40.0)
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the worker")
    parser.add_argument(
        "--results", type=Path, default=None, metavar="FILE", help="what is known so far, after each part"
    )
    args = parser.parse_args()
    args.among = args.rows // 4 if args.among is None else args.among
    with Kept(args.results) as kept:
        asyncio.run(measure(args, kept))


if __name__ == "__main__":
    main()
