"""Cost of guided rows to the step thread of a GPU worker, without a GPU: microseconds a step, beside free rows.

    python bench/guided_step_thread.py --jump-forward 8 > bench/results/guided-step-thread.json
    python bench/guided_step_thread.py --rows 256 --processes 0 2

A stand-in for the device has tokens ready a set time after the step before; everything else is a worker's own: plans
from their messages, the executor, guides, masks copied by the host, results as messages. Texts are written at random
beforehand, but for what the grammar forces. One step runs while the next one is there, as with a scheduler. Of each
step: decode (the plan), launch, settle (from the tokens' being there to the result), encode; wall: by the clock, of
which cpu is what the thread computed. added_us: of all four parts of guided rows over those of free ones of the same
turn, median of turns. late: rows a step whose mask was not there. tokens: a row and step.

With --jump-forward N steps verify drafts: rows yield what chains foresaw, up to N tokens, and one more; added_us is
over free rows of such steps. Threads are given tokens by the step thread then, when it has settled their step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from gpu.guided import _PERSON, array_of  # noqa: E402
from gpu.guided_vocabulary import write_vocabulary  # noqa: E402
from support.conformance.vocabularies import vocabulary_of  # noqa: E402

from radixmesh.daemons.runtime.arrays import IntArray, as_ints, empty_ints  # noqa: E402
from radixmesh.daemons.runtime.guided.backend import CompiledGrammar, GreedyTokens, load_backend  # noqa: E402
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource  # noqa: E402
from radixmesh.daemons.runtime.sampling import Sampling  # noqa: E402
from radixmesh.daemons.runtime.steps.result_codec import result_to_proto  # noqa: E402
from radixmesh.daemons.runtime.steps.step import Admit, Chunk, Grant, StepPlan, StepResult, Task  # noqa: E402
from radixmesh.daemons.runtime.steps.step_codec import encode_plan, plan_from_proto  # noqa: E402
from radixmesh.daemons.worker.cuda.device import HostDevice  # noqa: E402
from radixmesh.daemons.worker.cuda.step.sampling.slot_chains import SlotChains  # noqa: E402
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks, yielded  # noqa: E402
from radixmesh.daemons.worker.guided.chain import HEAD  # noqa: E402
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore  # noqa: E402
from radixmesh.daemons.worker.guided.guides import Guides, SlotGuides  # noqa: E402
from radixmesh.daemons.worker.guided.mask_memory import MaskSink  # noqa: E402
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides  # noqa: E402
from radixmesh.daemons.worker.plans.executor import StepExecutor  # noqa: E402
from radixmesh.daemons.worker.plans.slots.blob_store import BlobStore  # noqa: E402
from radixmesh.daemons.worker.runner import (  # noqa: E402
    DecodeRows,
    ModelRunner,
    Segment,
    SegmentOutput,
    StepOutput,
)
from radixmesh.daemons.worker.step_handle import DeviceEvent, StepHandle  # noqa: E402
from radixmesh.worker.v1 import worker_pb2  # noqa: E402

_PROMPT_LEN = 4
_TIMEOUT_S = 180.0  # Of a machine that others load: processes start all at once.
_WARM_STEPS = 16
_PARTS, _FIGURES = ("decode", "launch", "settle", "encode"), ("wall", "wall_mean", "wall_p95", "cpu")


class _Event(DeviceEvent):
    def __init__(self) -> None:
        self._is_done = threading.Event()
        self.tokens: IntArray = empty_ints()

    @property
    def is_done(self) -> bool:
        return self._is_done.is_set()

    def wait(self) -> None:
        self._is_done.wait()

    def done(self) -> None:
        self._is_done.set()


class StandInRunner(ModelRunner):
    """Yields the tokens of texts [slots, tokens], `step_s` a step after the one before; none where a mask is late."""

    is_asynchronous = True
    suppresses_rows = True
    mask_wait_s = 0.002
    takes_grammars = True
    page_size = 64
    is_deterministic = False
    tasks = frozenset([Task.GENERATE])

    def __init__(self, case: Case, way: Way, step_s: float, masks: SlotMasks | SlotChains) -> None:
        texts, vocab_size = case.texts, case.vocabulary.vocab_size
        num_slots, num_tokens = texts.shape
        self.max_tokens_per_row, self._steps_left = 1 + way.num_drafts, case.num_steps + _WARM_STEPS
        self._tells_tokens = way.is_followed
        self.vocab_size, self.max_total_len = vocab_size, _PROMPT_LEN + num_tokens + 1
        self.num_pages = num_slots * -(-self.max_total_len // self.page_size)
        self.masks, self._texts, self._step_s = masks, texts, step_s
        self._lengths = np.full(num_slots, _PROMPT_LEN, np.int32)
        self._mask_rows = np.full(num_slots, -1, np.int32)
        self._steps: SimpleQueue[tuple[IntArray, _Event] | None] = SimpleQueue()
        self.num_late = self.num_tokens = 0
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def mask_sink(self, admit: Admit) -> MaskSink:
        sink = self.masks.sink(admit)
        self._mask_rows[admit.slot] = sink.row
        return sink

    def admitted(self, admit: Admit) -> None:
        self.masks.admitted(admit)

    def can_batch(self, sampling: Sampling) -> bool:
        return True

    def launch(self, rows: DecodeRows, segments: Sequence[Segment], ready_ns: int) -> StepHandle[StepOutput]:
        slots, event, is_guided = rows.slots, _Event(), self.masks.is_guided(rows.slots)
        of_segments = [SegmentOutput(token=self._take(segment)) for segment in segments]
        self._steps.put((slots, event))

        def collect() -> StepOutput:
            event.wait()
            tokens, counts = event.tokens, None
            if tokens.ndim > 1:
                counts = (tokens >= 0).sum(axis=1, dtype=np.int32)
                tokens = tokens[tokens >= 0]
            elif is_guided:
                tokens, counts = yielded(tokens)
            now_ns = time.monotonic_ns()
            return StepOutput(tokens=tokens, counts=counts, segments=of_segments, start_ns=now_ns, end_ns=now_ns)

        def tokens() -> IntArray:
            event.wait()
            return event.tokens

        return StepHandle(event, collect, tokens if is_guided and self._tells_tokens else None)

    def close(self) -> None:
        self._steps.put(None)

    def _take(self, segment: Segment) -> int | None:
        if segment.sample is None:
            return None
        self._lengths[segment.slot] += 1
        return int(self._texts[segment.slot, 0])

    def _run(self) -> None:
        end_s = 0.0
        while (step := self._steps.get()) is not None:
            slots, event = step
            end_s = max(time.perf_counter(), end_s) + self._step_s
            time.sleep(max(0.0, end_s - time.perf_counter()))
            lengths, mask_rows = self._lengths[slots], self._mask_rows[slots]
            if isinstance(self.masks, SlotChains):
                self._steps_left -= 1
                event.tokens = self._verified(self.masks, slots, lengths, mask_rows)
                counts = (event.tokens >= 0).sum(axis=1)
            else:
                counts = (mask_rows < 0) | (self.masks.positions[mask_rows] == lengths)
                event.tokens = np.where(counts, self._texts[slots, lengths - _PROMPT_LEN], -1).astype(np.int32)
            self._lengths[slots] += counts
            self.num_late += len(slots) - int((counts > 0).sum())
            self.num_tokens += int(counts.sum())
            event.done()

    def _verified(self, chains: SlotChains, slots: IntArray, lengths: IntArray, mask_rows: IntArray) -> IntArray:
        """[slots, most]: the text of each slot as far as its chain has masks for it, and -1 from there on; of a free
        slot a token."""
        versions = chains.versions[mask_rows, 0]
        heads = chains.heads[2 * mask_rows + versions % 2]
        behind = lengths - heads[:, 0]
        is_there = (mask_rows < 0) | ((versions > 0) & (behind >= 0) & (behind <= heads[:, 1]))
        forced, size = heads[:, HEAD:], chains.max_forced
        is_before = (np.arange(size) < behind[:, None]) & is_there[:, None] & (mask_rows >= 0)[:, None]
        at = np.clip(heads[:, :1] + np.arange(size) - _PROMPT_LEN, 0, self._texts.shape[1] - 1)
        is_there &= ~(is_before & (forced != self._texts[slots[:, None], at])).any(axis=1)
        most = self.max_tokens_per_row
        tokens = self._texts[slots[:, None], np.clip(lengths[:, None] - _PROMPT_LEN + np.arange(most), 0, None)]
        number = behind[:, None] + np.arange(most - 1)
        is_draft = (mask_rows >= 0)[:, None] & (number < heads[:, 1:2]) & is_there[:, None]
        # Texts have no more tokens than one a step, and a few.
        is_draft &= (self._lengths[slots] - _PROMPT_LEN + most + self._steps_left < self._texts.shape[1])[:, None]
        drafts = np.take_along_axis(forced, np.clip(number, 0, size - 1), axis=1)
        is_right = np.logical_and.accumulate(is_draft & (drafts == tokens[:, :-1]), axis=1)
        is_yielded = np.concatenate([is_there[:, None], is_right & is_there[:, None]], axis=1)
        return np.where(is_yielded, tokens, -1).astype(np.int32)

    def forward(self, segments: Sequence[Segment]) -> list[SegmentOutput]:
        raise AssertionError("it is launched")

    def copy_page(self, source: int, target: int, num_tokens: int) -> None:
        raise AssertionError("no pages are copied")

    def clear(self) -> None:
        return


class Case:
    """Outputs of one grammar, and free ones, with their grammar's artefact and texts."""

    def __init__(self, num_rows: int, num_steps: int, vocab_size: int, folder: Path) -> None:
        config = {"vocab_size": vocab_size, "eos_token_id": vocab_size - 1, "model_type": "llama", "architectures": []}
        (folder / "config.json").write_text(json.dumps(config))
        write_vocabulary(folder, vocab_size)
        self.folder, self.num_rows, self.num_steps = folder, num_rows, num_steps
        self.vocabulary = vocabulary_of(folder)
        self.backend = load_backend("xgrammar", self.vocabulary)
        num_tokens = 3 * (num_steps + _WARM_STEPS) + 32
        self.artefact = self.backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, array_of(_PERSON, num_tokens)))
        grammar = self.backend.load(self.artefact)
        # Each takes a while to write, so that rows share them.
        texts = [_text(grammar, self.backend.tokens, num_tokens, vocab_size, row) for row in range(min(num_rows, 64))]
        self.texts = np.array([texts[row % len(texts)] for row in range(num_rows)], np.int32)


def _text(grammar: CompiledGrammar, vocabulary: GreedyTokens, num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Any allowed token is as likely; what the grammar forces is written as a model would."""
    rng, matcher, tokens = np.random.default_rng(seed), grammar.matcher(), list[int]()
    words = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(num_tokens):
        matcher.fill(words)
        token = vocabulary.forced_by(words)
        if token is None:
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
            token = int(rng.choice(np.flatnonzero(bits)))
        tokens.append(token)
        assert matcher.accept(token)
    return tokens


class Way(NamedTuple):
    """num_guided: rows that follow the grammar. num_drafts: forced tokens that a step verifies."""

    num_guided: int
    num_processes: int
    num_drafts: int = 0

    @property
    def is_followed(self) -> bool:
        """Tokens go to the guides without the step thread, as `DeviceRunner` tells them."""
        return not self.num_drafts or self.num_processes > 0


class Worker:
    """All rows of a case side by side, the first ones with the grammar. Its processes begin to start; `begin` waits."""

    def __init__(self, case: Case, way: Way, step_s: float) -> None:
        num_rows, vocab_size = case.num_rows, case.vocabulary.vocab_size
        options = {"vocab_size": vocab_size, "num_processes": way.num_processes}
        masks: SlotMasks | SlotChains = SlotMasks(HostDevice(), num_slots=num_rows, max_rows=num_rows, **options)
        if way.num_drafts:
            masks = SlotChains(HostDevice(), num_rows, num_rows, max_drafts=way.num_drafts, **options)
        self._case, self._way = case, way
        self.runner = StandInRunner(case, way, step_s, masks)
        self.guides: Guides = SlotGuides(vocab_size)
        if way.num_processes:
            guides = self.guides = ProcessGuides(way.num_processes, case.folder, "xgrammar")
            guides.attach(masks, num_slots=num_rows, max_total_len=self.runner.max_total_len)

    def begin(self) -> None:
        """Admits all rows."""
        case, num_rows, num_guided = self._case, self._case.num_rows, self._way.num_guided
        assert not isinstance(self.guides, ProcessGuides) or self.guides.wait_ready(_TIMEOUT_S)
        blobs = BlobStore(max_bytes=1 << 26, max_blob_bytes=1 << 25)
        self.executor = StepExecutor(
            self.runner,
            num_slots=num_rows,
            max_tokens_per_step=8192,
            blobs=blobs,
            grammars=GrammarStore(case.backend.format, lambda: case.backend),
            guides=self.guides,
        )
        self.executor.begin_epoch(1)
        name = hashlib.sha256(case.artefact).hexdigest()
        blobs.put(name, case.artefact)
        first, *decodes = _plans(case, num_guided, name)
        began_s = time.perf_counter()
        self.executor.run(first)
        self.first_step_ms = (time.perf_counter() - began_s) * 1e3
        self.guides.wait(range(num_guided), 5.0)
        self._plans = deque(encode_plan(plan) for plan in decodes)

    def run(self, num_steps: int) -> dict[str, object]:
        """So many more steps."""
        plans = [self._plans.popleft() for _ in range(num_steps)]
        self.runner.num_late = self.runner.num_tokens = 0
        times = _run(self.executor, plans)
        assert not self.guides.has_errors, list(self.guides.errors())[:1]
        late = round(self.runner.num_late / num_steps, 3)
        tokens = round(self.runner.num_tokens / num_steps / self._case.num_rows, 3)
        return {**{name: _summary(of_part) for name, of_part in times.items()}, "late": late, "tokens": tokens}

    def close(self) -> None:
        self.guides.close()
        self.runner.close()


def _plans(case: Case, num_guided: int, name: str) -> list[StepPlan]:
    num_rows, total = case.num_rows, _PROMPT_LEN + case.texts.shape[1] + 1
    num_pages = -(-total // StandInRunner.page_size)
    slots = range(num_rows)
    first = StepPlan(
        epoch=1,
        step_id=1,
        admits=tuple(
            Admit(
                slot=slot,
                generation=1,
                request_id=str(slot),
                prompt_ids=np.full(_PROMPT_LEN, 5, np.int32),
                max_total_len=total,
                sampling=Sampling(temperature=1.0, seed=slot),
                grammar_hash=name if slot < num_guided else "",
            )
            for slot in slots
        ),
        grants=tuple(Grant(slot=slot, pages=as_ints(np.arange(num_pages) + slot * num_pages)) for slot in slots),
        chunks=tuple(Chunk(slot=slot, length=_PROMPT_LEN) for slot in slots),
    )
    decodes = [
        StepPlan(epoch=1, step_id=2 + index, decode_set=as_ints(np.arange(num_rows)) if index == 0 else None)
        for index in range(case.num_steps + _WARM_STEPS)
    ]
    return [first, *decodes]


def _run(executor: StepExecutor, plans: Sequence[bytes]) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each part of each step."""
    times: dict[str, list[tuple[float, float]]] = {"decode": [], "launch": [], "settle": [], "encode": []}
    running: deque[StepHandle[StepResult]] = deque()

    def timed(part: str, since: tuple[float, float]) -> tuple[float, float]:
        now = time.perf_counter(), time.thread_time()
        times[part].append((now[0] - since[0], now[1] - since[1]))
        return time.perf_counter(), time.thread_time()

    for data in plans:
        since = time.perf_counter(), time.thread_time()
        plan = plan_from_proto(worker_pb2.ExecuteRequest.FromString(data).plan)
        since = timed("decode", since)
        running.append(executor.launch(plan))
        timed("launch", since)
        if len(running) < 2:
            continue
        oldest = running.popleft()
        oldest.wait()
        since = time.perf_counter(), time.thread_time()
        result = oldest.result()
        since = timed("settle", since)
        worker_pb2.ExecuteResponse(result=result_to_proto(result)).SerializeToString()
        timed("encode", since)
    while running:
        running.popleft().result()
    return times


def _summary(of_part: Sequence[tuple[float, float]]) -> dict[str, float]:
    wall, cpu = np.array(of_part).T * 1e6
    return {
        "wall": round(float(np.median(wall)), 1),
        "wall_mean": round(float(np.mean(wall)), 1),
        "wall_p95": round(float(np.percentile(wall, 95)), 1),
        "cpu": round(float(np.median(cpu)), 1),
    }


def compared(
    case: Case, numbers: Sequence[int], turns: int, step_s: float, among: int, num_drafts: int = 0
) -> dict[str, object]:
    """Free rows, guided ones by each number of processes, and some guided among free ones: a few steps of each, in
    turns. num_drafts: with as many forced ids too."""
    ways = {"free": Way(0, 0)}
    for num in numbers:
        by = f"{num} processes" if num else "threads"
        ways[f"guided, {by}"] = Way(case.num_rows, num)
        if among:
            ways[f"{among} guided, {by}"] = Way(among, num)
    if num_drafts:
        ways[f"free, {num_drafts} drafts"] = Way(0, 0, num_drafts)
        for num in numbers:
            by = f"{num_drafts} drafts, {num} processes" if num else f"{num_drafts} drafts, threads"
            ways[f"guided, {by}"] = Way(case.num_rows, num, num_drafts)
    workers: dict[str, Worker] = {}
    try:
        for name, way in ways.items():
            workers[name] = Worker(case, way, step_s)
        for worker in workers.values():
            worker.begin()
            worker.run(_WARM_STEPS)
        num_steps = case.num_steps // turns
        of_turns = [{name: worker.run(num_steps) for name, worker in workers.items()} for _ in range(turns)]
    finally:
        for worker in workers.values():
            worker.close()
    free_of = {name: f"free, {num_drafts} drafts" if way.num_drafts else "free" for name, way in ways.items()}
    added = {
        name: {
            what: round(float(np.median([_total(of[name], what) - _total(of[free], what) for of in of_turns])), 1)
            for what in ("wall", "wall_mean", "cpu")
        }
        for name, free in free_of.items()
        if name != free
    }
    medians = {
        name: {
            part: [round(float(np.median([_part(of[name], part)[what] for of in of_turns])), 1) for what in _FIGURES]
            for part in _PARTS
        }
        | {
            "late": round(float(np.mean([float(str(of[name]["late"])) for of in of_turns])), 3),
            "tokens": round(float(np.mean([float(str(of[name]["tokens"])) for of in of_turns])), 3),
            "first_step_ms": round(workers[name].first_step_ms, 1),
        }
        for name in ways
    }
    return {"added_us": added, "figures": _FIGURES, "medians_us": medians}


def _total(found: dict[str, object], what: str) -> float:
    return sum(_part(found, name)[what] for name in _PARTS)


def _part(found: dict[str, object], name: str) -> dict[str, float]:
    part = found[name]
    assert isinstance(part, dict)
    return part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--among", type=int, default=64, help="guided rows of the mixed cases")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of the device")
    parser.add_argument("--vocabulary", type=int, default=4096, help="small: what masks themselves take is elsewhere")
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 2], help="0: threads")
    parser.add_argument("--jump-forward", type=int, default=0, metavar="DRAFTS", help="most forced tokens a step")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        case = Case(args.rows, args.steps, args.vocabulary, Path(name))
        found = compared(case, args.processes, args.turns, args.step_ms * 1e-3, args.among, args.jump_forward)
    about = {"command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, **found}, indent=1))


if __name__ == "__main__":
    main()
