"""CPU time from a step's tokens to the masks behind them, by the number of rows whose masks are filled at a time.

    python bench/guided_groups.py --json bench/results/guided-groups.json

256 rows of one JSON schema over a vocabulary of 128,256, texts written at random, all sizes in turns in one run, and
masks that must be equal. Milliseconds of the one thread of Python that stands between tokens and masks; the library's
fills count as shared by --native threads of its own. row: until the mask of a row is published, mean of all rows;
last: of the last one. Waits for the interpreter's lock, and copies to a device, are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "bench")]

from gpu.guided import _PERSON, array_of  # noqa: E402
from gpu.guided_vocabulary import write_vocabulary  # noqa: E402
from guided_threads import _admit, random_text, use_native_threads  # noqa: E402
from support.conformance.vocabularies import vocabulary_of  # noqa: E402

from radixmesh.daemons.runtime.guided.backend import CompiledGrammar, GrammarMatcher, GreedyTokens, load_backend  # noqa: E402
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource  # noqa: E402
from radixmesh.daemons.worker.cuda.device import HostDevice  # noqa: E402
from radixmesh.daemons.worker.cuda.step.sampling.slot_masks import SlotMasks  # noqa: E402
from radixmesh.daemons.worker.guided import mask_filler  # noqa: E402
from radixmesh.daemons.worker.guided.guide import Guide  # noqa: E402
from radixmesh.daemons.worker.guided.mask_filler import MaskFiller  # noqa: E402

_NO_IDS = np.zeros(0, np.int32)


class _NoCopies(HostDevice):
    def send_beside(self, source: object, target: object, rows: Sequence[tuple[int, int]]) -> None:
        return


class _Clock:
    """CPU seconds of this thread, with a share of those that the library filled masks in."""

    def __init__(self, matcher_class: type[GrammarMatcher], num_native: int) -> None:
        self._fill_s, self._since_s, self._left = 0.0, 0.0, 1.0 - 1.0 / num_native
        fill_all = matcher_class.fill_all

        def timed(*args: object) -> None:
            since_s = time.thread_time()
            fill_all(*args)  # type: ignore[arg-type]
            self._fill_s += time.thread_time() - since_s

        matcher_class.fill_all = staticmethod(timed)  # type: ignore[assignment]

    def start(self) -> None:
        self._fill_s, self._since_s = 0.0, time.thread_time()

    def now_s(self) -> float:
        return time.thread_time() - self._since_s - self._fill_s * self._left


class _Rows:
    """All rows, followed with groups of at most `size`."""

    def __init__(self, size: int, num_rows: int, grammar: CompiledGrammar, tokens: GreedyTokens, vocab: int) -> None:
        self.size = size
        self.masks = SlotMasks(_NoCopies(), num_slots=num_rows, max_rows=num_rows, vocab_size=vocab)
        self.row_ms: list[float] = []
        self.last_ms: list[float] = []
        self._filler = MaskFiller(1)
        self._guides = []
        for slot in range(num_rows):
            sink = self.masks.sink(_admit(slot))
            start = lambda: (grammar.matcher(), tokens)  # noqa: E731
            self._guides.append(Guide(start, vocab, position=1, output_ids=_NO_IDS, sink=sink))
            self._guides[-1].run()
        self._publish = self.masks.publish

    def follow(self, ids: Sequence[int], clock: _Clock) -> None:
        published: list[tuple[float, int]] = []

        def publish(rows: Sequence[int], positions: Sequence[int]) -> None:
            self._publish(rows, positions)
            published.append((clock.now_s() * 1e3, len(rows)))

        self.masks.publish = publish  # type: ignore[method-assign]
        mask_filler._MAX_HERE, mask_filler._GROUP_THREADS = self.size, 0
        moves = [(guide, (token,)) for guide, token in zip(self._guides, ids, strict=True)]
        clock.start()
        self._filler.follow_here(moves)
        self.row_ms.append(sum(at_ms * num for at_ms, num in published) / len(ids))
        self.last_ms.append(published[-1][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 128, 64, 32])
    parser.add_argument("--native", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(
            json.dumps({"vocab_size": args.vocabulary, "eos_token_id": args.vocabulary - 1})
        )
        write_vocabulary(folder, args.vocabulary)
        vocabulary = vocabulary_of(folder)
    backend = load_backend("xgrammar", vocabulary)
    source = GrammarSource(GrammarForm.JSON_SCHEMA, array_of(_PERSON, args.tokens))
    grammar = backend.load(backend.compile(source))
    texts = np.array([random_text(grammar, args.tokens, args.vocabulary, row) for row in range(args.rows)])
    use_native_threads(1)  # Their CPU time would be nobody's.
    clock = _Clock(type(grammar.matcher()), args.native)
    ways = [_Rows(size, args.rows, grammar, backend.tokens, args.vocabulary) for size in args.sizes]
    for step in range(args.tokens):
        for way in ways:
            way.follow(texts[:, step].tolist(), clock)
        for way in ways[1:]:
            assert (way.masks.words == ways[0].masks.words).all(), way.size
            assert (way.masks.positions == ways[0].masks.positions).all(), way.size
    warm = args.tokens // 4
    result = {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} shared cores, load {os.getloadavg()[0]:.0f}",
        "format": backend.format,
        "rows": args.rows,
        "native": args.native,
        "groups": {
            str(way.size): {
                "row_ms": round(float(np.median(way.row_ms[warm:])), 3),
                "last_ms": round(float(np.median(way.last_ms[warm:])), 3),
            }
            for way in ways
        },
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
