"""CPU time of a worker's mask threads for each guided token, without a model: 256 rows of one JSON schema.

    python bench/guided_threads.py > bench/results/guided-threads.json
    python bench/guided_threads.py --compare 0 1 2 --turns 4 > bench/results/guided-processes.json

Texts are written at random beforehand. Each step gives every row its next token, as a step of the device does, and
waits until all masks are published in the memory that a device reads. Microseconds of CPU a token, by part: the step
thread's call (follow), the library's accepts and fills, copies (here by the host), all else of the mask threads
(python). wall_ms: of one step, at whose begin the step thread computes for 2 ms of CPU time in Python; step_thread_ms:
how long these take it, beside the masks. until_ms: from the tokens to the end of each stage, of the group that is last.
waits_a_step: times that a mask thread waited for work or for the interpreter's lock. --processes: so many fill the
masks, and process_us is their CPU time. --compare: several numbers of processes in turns, 0 = threads; ratios are those
to the first number.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from gpu.guided import _PERSON, array_of  # noqa: E402
from gpu.guided_vocabulary import write_vocabulary  # noqa: E402
from support.conformance.vocabularies import vocabulary_of  # noqa: E402

from radixmesh.daemons.runtime.guided.backend import CompiledGrammar, GrammarMatcher, load_backend  # noqa: E402
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource  # noqa: E402
from radixmesh.daemons.runtime.sampling import Sampling  # noqa: E402
from radixmesh.daemons.runtime.steps.step import Admit  # noqa: E402
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device, HostDevice  # noqa: E402
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks  # noqa: E402
from radixmesh.daemons.worker.guided import shared_calls  # noqa: E402
from radixmesh.daemons.worker.guided.grammar_store import GrammarStore  # noqa: E402
from radixmesh.daemons.worker.guided.guides import Guides, SlotGuides  # noqa: E402
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller  # noqa: E402
from radixmesh.daemons.worker.guided.process_guides import ProcessGuides  # noqa: E402

_PROMPT = np.ones(1, np.int32)
_TIMEOUT_S = 60.0
_STEP_THREAD_S = 0.002  # Python of a step thread that holds the interpreter's lock behind each result.


def random_text(grammar: CompiledGrammar, num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Any allowed token is as likely, as from a model whose weights are random."""
    rng, matcher, tokens = np.random.default_rng(seed), grammar.matcher(), []
    words = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(num_tokens):
        matcher.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size)
        tokens.append(int(rng.choice(np.flatnonzero(bits))))
        assert matcher.accept(tokens[-1])
    return tokens


class Parts:
    """CPU seconds of the library's calls on whatever thread made them."""

    def __init__(self, matcher_class: type[GrammarMatcher]) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._class = matcher_class
        self._before: dict[str, object] = {}
        for name, part in (("accept", "accept"), ("accept_all", "accept"), ("fill", "fill"), ("fill_all", "fill")):
            is_static = name.endswith("_all")
            self._before[name] = matcher_class.__dict__[name]
            timed = self._timed(getattr(matcher_class, name), part)
            setattr(matcher_class, name, staticmethod(timed) if is_static else timed)

    def restore(self) -> None:
        """The library's calls are its own again."""
        for name, call in self._before.items():
            setattr(self._class, name, call)

    def _timed(self, call: Callable[..., object], part: str) -> Callable[..., object]:
        def timed(*args: object) -> object:
            since_s = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds[part] += time.thread_time() - since_s
                self.calls[part] += 1

        return timed


def use_native_threads(num: int) -> None:
    """So many of the library's own for the masks of each thread."""
    from radixmesh.daemons.runtime.guided import xgrammar_backend

    xgrammar_backend._Matcher.fill_threads = num


class _Stages:
    """Wall seconds from the moment that tokens are known to the end of each stage of the last group of a step."""

    def __init__(self, masks: SlotMasks) -> None:
        self.began_s = self.copy_s = 0.0
        self.sums: defaultdict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}
        self._wrap(shared_calls, "_fill_together", "filled", "accepted")
        self._wrap(masks, "publish", "published", "")
        self._wrap(masks._device, "send_beside", "sent", "copied")

    def _wrap(self, owner: object, name: str, after: str, before: str) -> None:
        call = getattr(owner, name)

        def timed(*args: object) -> object:
            if before:
                self._last[before] = time.perf_counter()
            cpu_s = time.thread_time()
            result = call(*args)
            if after == "sent":
                self.copy_s += time.thread_time() - cpu_s
            self._last[after] = time.perf_counter()
            return result

        setattr(owner, name, timed)

    def add(self) -> None:
        """A step is over."""
        for name, at_s in self._last.items():
            self.sums[name] += at_s - self.began_s
        self._last.clear()


def measured(
    num_rows: int,
    num_tokens: int,
    vocab_size: int,
    texts: Path | None,
    num_threads: int | None,
    device: Device | None = None,
    num_processes: int = 0,
) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"vocab_size": vocab_size, "eos_token_id": vocab_size - 1, "model_type": "llama", "architectures": []}
        (folder / "config.json").write_text(json.dumps(config))
        write_vocabulary(folder, vocab_size)
        return _measured(folder, num_rows, num_tokens, texts, num_threads, device, num_processes)


def _measured(
    folder: Path,
    num_rows: int,
    num_tokens: int,
    texts: Path | None,
    num_threads: int | None,
    device: Device | None,
    num_processes: int,
) -> dict[str, object]:
    vocabulary = vocabulary_of(folder)
    backend = load_backend("xgrammar", vocabulary)
    artefact = backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, array_of(_PERSON, num_tokens)))
    grammar = backend.load(artefact)
    if texts is not None and texts.exists():
        tokens = np.load(texts)
    else:
        texts_of_rows = [random_text(grammar, num_tokens, vocabulary.vocab_size, row) for row in range(num_rows)]
        tokens = np.array(texts_of_rows, np.int32)
        if texts is not None:
            np.save(texts, tokens)
    parts = Parts(type(grammar.matcher()))
    store = GrammarStore(backend.format, lambda: backend)
    masks = SlotMasks(
        device or HostDevice(),
        num_slots=num_rows,
        max_rows=num_rows,
        vocab_size=vocabulary.vocab_size,
        num_processes=num_processes,
    )
    guides: Guides
    if num_processes:
        guides = ProcessGuides(num_processes, folder, "xgrammar")
        guides.attach(masks, num_slots=num_rows, max_total_len=2 + tokens.shape[1])
        assert guides.wait_ready(_TIMEOUT_S)
    else:
        guides = SlotGuides(vocabulary.vocab_size)
        guides._filler = MaskFiller(num_threads)
    stages = _Stages(masks)
    for slot in range(num_rows):
        admit = _admit(slot)
        guides.admitted(admit, artefact, store, masks.sink(admit))
    rows = [masks._admitting[slot] for slot in range(num_rows)]
    slots = np.arange(num_rows)
    _until_published(masks, rows, 1)
    # The first tokens find the guides as their grammar's loading left them.
    warm = min(8, tokens.shape[1] // 4)
    follow_s = wall_s = spin_s = 0.0
    process_s = 0.0
    threads_s, switches, system_s = _thread_seconds(), 0, 0.0
    for step in range(tokens.shape[1]):
        if step == warm:
            parts.seconds.clear()
            parts.calls.clear()
            switches = _thread_switches()
            threads_s, follow_s, wall_s, system_s = _thread_seconds(), 0.0, 0.0, _system_seconds()
            spin_s, process_s = 0.0, _process_seconds(guides)
            stages.sums.clear()
            stages.copy_s = 0.0
        of_step = tokens[:, step].copy()
        since_s, cpu_s = time.perf_counter(), time.thread_time()
        stages.began_s = since_s
        guides.launched(slots, lambda of_step=of_step: of_step)
        follow_s += time.thread_time() - cpu_s
        began_s, spin_until_s = time.perf_counter(), time.thread_time() + _STEP_THREAD_S
        while time.thread_time() < spin_until_s:
            pass
        spin_s += time.perf_counter() - began_s
        _until_published(masks, rows, 2 + step)
        wall_s += time.perf_counter() - since_s
        stages.add()
    num_steps = tokens.shape[1] - warm
    per_token = 1e6 / (num_steps * num_rows)
    mask_s = _thread_seconds() - threads_s
    library_s = parts.seconds["accept"] + parts.seconds["fill"]
    found = {"process_us": round((_process_seconds(guides) - process_s) * per_token, 2)} if num_processes else {}
    num_errors = sum(1 for _ in guides.errors())
    guides.close()
    parts.restore()
    return {
        "processes": num_processes,
        "follow_us": round(follow_s * per_token, 2),
        "accept_us": round(parts.seconds["accept"] * per_token, 2),
        "fill_us": round(parts.seconds["fill"] * per_token, 2),
        **found,
        "copy_us": round(stages.copy_s * per_token, 2),
        "python_us": round((mask_s - library_s - stages.copy_s) * per_token, 2),
        "calls_a_step": round(sum(parts.calls.values()) / num_steps, 1),
        "waits_a_step": round((_thread_switches() - switches) / num_steps, 1),
        "system_us": round((_system_seconds() - system_s) * per_token, 2),
        "step_thread_ms": round(spin_s / num_steps * 1e3, 3),
        "wall_ms": round(wall_s / num_steps * 1e3, 2),
        "until_ms": {name: round(seconds / num_steps * 1e3, 2) for name, seconds in stages.sums.items()},
        "errors": num_errors,
    }


def _admit(slot: int) -> Admit:
    return Admit(
        slot=slot,
        generation=1,
        request_id=str(slot),
        prompt_ids=_PROMPT,
        max_total_len=1 << 20,
        sampling=Sampling(),
        grammar_hash="one",
    )


def _until_published(masks: SlotMasks, rows: Sequence[int], position: int) -> None:
    ends_s = time.monotonic() + _TIMEOUT_S
    while (masks.positions[rows] != position).any():
        assert time.monotonic() < ends_s, "masks are missing"
        time.sleep(0.0005)


def _thread_seconds() -> float:
    """CPU seconds of the mask threads so far."""
    total_ns = 0
    for thread in threading.enumerate():
        if thread.name.startswith("masks-"):
            total_ns += int(Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0])
    return total_ns * 1e-9


def _process_seconds(guides: Guides) -> float:
    """CPU seconds of the processes that fill masks so far."""
    pids = guides.pids if isinstance(guides, ProcessGuides) else ()
    total_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns * 1e-9


def _system_seconds() -> float:
    """CPU seconds of the process in the kernel."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def _thread_switches() -> int:
    """Times that a mask thread waited for something: work, or the interpreter's lock."""
    total = 0
    for thread in threading.enumerate():
        if thread.name.startswith("masks-"):
            text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            total += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


def _compared(numbers: Sequence[int], turns: Sequence[Sequence[dict[str, object]]]) -> dict[str, object]:
    """Of all turns; and of the medians, what each number of processes has of the first one's."""
    medians = {
        name: [float(np.median([_figure(turn[index], name) for turn in turns])) for index in range(len(numbers))]
        for name in ("published", "step_thread_ms", "python_us")
    }
    ratios = {name: [round(value / values[0], 3) for value in values] for name, values in medians.items()}
    rounded = {name: [round(value, 3) for value in values] for name, values in medians.items()}
    return {"processes": list(numbers), "medians": rounded, "ratios": ratios, "turns": turns}


def _figure(result: dict[str, object], name: str) -> float:
    until_ms = result["until_ms"]
    assert isinstance(until_ms, dict)
    return float(str(result[name] if name in result else until_ms[name]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--texts", type=Path, default=None, help="a file that keeps the random texts for another run")
    parser.add_argument("--threads", type=int, default=None, help="quick mask threads; as many as a worker takes here")
    parser.add_argument("--gpu", action="store_true", help="masks are sent to a GPU")
    parser.add_argument(
        "--native", type=int, default=0, help="threads of the library's own for each; 0: as a worker has"
    )
    parser.add_argument("--processes", type=int, default=0, help="processes that fill masks; 0: threads do")
    parser.add_argument("--compare", type=int, nargs="+", default=[], metavar="PROCESSES", help="all of them in turns")
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    if args.native:
        use_native_threads(args.native)
    device = CudaDevice() if args.gpu else None
    of_rows = (args.rows, args.tokens, args.vocabulary, args.texts, args.threads, device)
    if args.compare:
        turns = [[measured(*of_rows, num) for num in args.compare] for _ in range(args.turns)]
        result = _compared(args.compare, turns)
    else:
        result = measured(*of_rows, args.processes)
    about = {"command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    print(json.dumps({**about, **result}, indent=1))


if __name__ == "__main__":
    main()
