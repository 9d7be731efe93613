"""Masks that a process fills for nobody before it is ready: the first ones take several times as long as those behind.

The library's code and tables are read from disk then, its memory and this process's grow, and the interpreter has
found the short ways through what each step calls.
"""

from __future__ import annotations

import time
from threading import Condition

import numpy as np

from radixmesh.daemons.runtime.guided.backend import GrammarBackend, MaskWords
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.guided.mask_frames import INT, Admission, Kind, ints
from radixmesh.daemons.worker.guided.mask_server import MaskServer, ReportedMasks, Reports

log = get_logger(__name__)

_OUTPUTS, _STEPS = 32, 48
_MOST_S = 3.0
"""Of a slow machine: what is not warm by then is not waited for."""
_GRAMMAR = (
    '{"type": "array", "minItems": 64, "items": {"type": "object", "properties": {"name": {"type": "string"},'
    ' "is_known": {"type": "boolean"}, "age": {"type": "integer"}, "of": {"enum": ["one", "two"]}},'
    ' "required": ["name", "is_known", "age", "of"], "additionalProperties": false}}'
)


class _Nobody(Reports):
    """Counts masks that are there, and outputs that have gone."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._num: dict[Kind, int] = {}

    def send(self, kind: Kind, *parts: bytes) -> None:
        num = len(parts[0]) // (3 * INT) if kind is Kind.PUBLISHED else 1
        with self._changed:
            self._num[kind] = self._num.get(kind, 0) + num
            self._changed.notify_all()

    def until(self, kind: Kind, num: int, ends_s: float) -> bool:
        """Waits until so many were told of; False: the time was over before."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num.get(kind, 0) >= num, max(0.0, ends_s - time.monotonic()))


def warm_server(backend: GrammarBackend, vocab_size: int) -> MaskServer:
    """A server without outputs that has filled masks."""
    reports, began_s = _Nobody(), time.monotonic()
    words: MaskWords = np.zeros((_OUTPUTS, -(-vocab_size // 32)), np.int32)
    server = MaskServer(backend, ReportedMasks(words, reports), vocab_size)
    try:
        _fill(server, backend, words, reports, began_s + _MOST_S)
    except Exception as error:  # Nothing of it is needed.
        log.warning("masks_not_warm", error=str(error))
    return server


def _fill(server: MaskServer, backend: GrammarBackend, words: MaskWords, reports: _Nobody, ends_s: float) -> None:
    artefact = backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, _GRAMMAR))
    server.take(Kind.GRAMMAR, ints(1) + artefact)
    for row in range(_OUTPUTS):
        server.take(Kind.ADMIT, ints(*Admission(row=row, serial=1, grammar=1, position=1, has_mask=0)))
    rng, steps = np.random.default_rng(0), 0
    while reports.until(Kind.PUBLISHED, _OUTPUTS * (1 + steps), ends_s) and steps < _STEPS:
        steps += 1
        moves = np.array([(row, 1, _allowed(of_row, rng)) for row, of_row in enumerate(words)], np.int32)
        server.take(Kind.TOKENS, moves.tobytes())
    for row in range(_OUTPUTS):
        server.take(Kind.CLOSE, ints(row, 1))
    # Nothing may be at work on this memory's outputs when it is the worker's turn.
    reports.until(Kind.FREED, _OUTPUTS, ends_s)


def _allowed(words: MaskWords, rng: np.random.Generator) -> int:
    """One of the ids that a mask allows."""
    at = int(rng.choice(np.flatnonzero(words)))
    bits = int(words[at]) & 0xFFFFFFFF
    return 32 * at + (bits & -bits).bit_length() - 1
