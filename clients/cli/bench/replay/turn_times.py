"""Times and tokens of a replay as its clients see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.cli.bench.replay.step_costs import percentiles
from radixmesh.cli.bench.workloads import IntArray, Turn
from radixmesh.daemons.scheduler.results.outputs import TokenRows

FloatArray = npt.NDArray[np.float64]


class TurnTimes:
    """Columns by turn, seconds of virtual time, NaN before it happens. The handle of a turn is its index + 1."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        def column() -> FloatArray:
            return np.full(len(turns), np.nan)

        self.sent_s, self.first_s, self.last_s = column(), column(), column()
        self.cached_tokens = np.zeros(len(turns), np.int64)
        self.prompt_tokens = np.zeros(len(turns), np.int64)
        self._lengths = np.array([turn.out_len for turn in turns])
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._ids = np.zeros(int(self._lengths.sum()), np.int32)
        self.num_tokens = np.zeros(len(turns), np.int64)
        self._gaps_s: list[FloatArray] = []

    def take(self, rows: TokenRows, now: float) -> None:
        """Tokens arrive, one a row. A gap or a repetition is a bug of the planner and fails the replay."""
        turns = rows.handles - 1
        assert (rows.counts == 1).all() and (rows.firsts == self.num_tokens[turns]).all(), "a gap or a repetition"
        self._ids[self._starts[turns] + rows.firsts] = rows.ids
        self.num_tokens[turns] += 1
        is_first = rows.firsts == 0
        self.first_s[turns[is_first]] = now
        self._gaps_s.append(now - self.last_s[turns[~is_first]])
        self.last_s[turns] = now

    def output_of(self, turn: int) -> IntArray:
        """Output so far."""
        start = self._starts[turn]
        return self._ids[start : start + self.num_tokens[turn]]

    def report(self) -> dict[str, object]:
        """Over the turns that finished."""
        done = self.num_tokens == self._lengths
        makespan_s = float(np.nanmax(self.last_s) - np.nanmin(self.sent_s)) if done.any() else 0.0
        gaps = np.concatenate(self._gaps_s) if self._gaps_s else np.zeros(0)
        return {
            "hit_rate": round(float(self.cached_tokens.sum() / max(1, self.prompt_tokens.sum())), 6),
            "ttft_ms": percentiles((self.first_s - self.sent_s)[done] * 1e3, digits=2),
            "itl_ms": percentiles(gaps * 1e3, digits=3),
            "out_tok_s": round(float(self.num_tokens.sum()) / makespan_s, 1) if makespan_s else 0.0,
            "makespan_s": round(makespan_s, 3),
            "num_finished": int(done.sum()),
            "output_tokens": int(self.num_tokens.sum()),
        }
