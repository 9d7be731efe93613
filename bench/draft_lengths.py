"""Speed with drafts of made-up steps whose costs are like those measured, by who chooses how many drafts rows have.

    python bench/draft_lengths.py > bench/results/draft-lengths.json

No model runs: a draft is right by chance, and a step takes as long as its positions say. Times tell of the choice
alone, so that they are the same on every machine, but for host_us: what choosing and observing take of this one, us a
step, the least of 32 steps one behind the other. Compare it by ratio, in turns.

mixed: of each pair of rows one's drafts are right with 0.9, the other's with 0.1. A step of T positions takes
1 + T / 180 (8 billion parameters on an H200: 5 positions of each row take 1.02 times as long as one at 1 row, 2.0 times
at 64, 3.4 times at 256).
prompts: one request after the other, whose network takes a quarter of a plain step for each draft, and as long as 3.5
of them to catch up; acceptance differs by request and by stretch of text, as that of h200-trained-drafts.json.

plain: no drafts; chains: 4 in every step; whole: all rows have 4 or none, where that pays; by_row: as many as pay.
speeds are over plain. of_each: of single requests, the lowest, and the lowest and the mean over the better of plain and
chains. Steps are two ahead of the results that are known; one of a hundred is held up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.worker.speculation.adaptive import DraftLengths, RowLengths
from radixmesh.daemons.worker.speculation.drafter import MOST_BEHIND
from radixmesh.daemons.worker.speculation.step_costs import Size

PLAIN_NS = 4_000_000
K = 4
LAG = 2
Floats = npt.NDArray[np.float64]


class Fixed(DraftLengths):
    """As many drafts in every step."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        super().__init__(num_slots, K)
        self._num = num_drafts

    def choose(self, slots: npt.NDArray[np.int32], *, is_alone: bool) -> RowLengths | None:
        drafts = np.full(len(slots), self._num, np.int32)
        return RowLengths(drafts, Size(1, int(drafts.sum()))) if self._num else None

    def observe(self, *args: object) -> None:
        return


def ways(num_slots: int, catch_up: int) -> dict[str, Callable[[], DraftLengths]]:
    return {
        "plain": lambda: Fixed(num_slots, 0),
        "chains": lambda: Fixed(num_slots, K),
        "whole": lambda: DraftLengths(num_slots, K, catch_up=catch_up, is_whole=True),
        "by_row": lambda: DraftLengths(num_slots, K, catch_up=catch_up),
    }


@dataclass
class Machine:
    """Runs steps of the same rows. cost: of a step with so many drafts of all rows, in plain steps. catching_up: of a
    network that lacks tokens of steps that drafted nothing, in plain steps; 0: nothing is lacking."""

    lengths: DraftLengths
    cost: Callable[[int], float]
    catching_up: float = 0.0
    seed: int = 1
    now: int = 0
    drafted: int = 0
    steps: int = 0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def run(self, acceptance_RT: Floats, num_tokens: int, *, is_sampled: bool = False) -> int:
        """Until all rows together have so many tokens each; the time that it took, ns. acceptance_RT: by row and
        position."""
        num_rows, length = acceptance_RT.shape
        slots = np.arange(num_rows, dtype=np.int32)
        for slot in slots.tolist():
            self.lengths.admitted(slot, is_sampled=is_sampled)
        is_right_RT = np.random.default_rng(self.seed + 1).random((num_rows, length)) < acceptance_RT
        at, behind, began = np.zeros(num_rows, np.int64), 0, self.now
        flying: deque[tuple[npt.NDArray[np.int32], RowLengths | None, tuple[int, int], npt.NDArray[np.int32]]] = deque()
        while at.sum() < num_tokens * num_rows:
            chosen = self.lengths.choose(slots, is_alone=True)
            most = np.zeros(num_rows, np.int32) if chosen is None else chosen.by_row
            scale, drafted = self.cost(int(most.sum())), most
            if chosen is not None and self.catching_up and behind > K + 1:
                scale += self.catching_up
            ahead_RK = is_right_RT[np.arange(num_rows)[:, None], (at[:, None] + np.arange(K)) % length]
            right_RK = np.cumprod(ahead_RK & (np.arange(K) < drafted[:, None]), axis=1)
            counts = (1 + right_RK.sum(axis=1)).astype(np.int32)
            behind = behind + 1 if chosen is None else max(0, behind - MOST_BEHIND)
            took = PLAIN_NS * scale * self.rng.lognormal(0, 0.03)
            took += PLAIN_NS * self.rng.exponential(3) * (self.rng.random() < 0.01)
            flying.append((counts, chosen, (self.now, self.now + int(took)), drafted))
            self.now, at = self.now + int(took), at + counts
            self.steps, self.drafted = self.steps + 1, self.drafted + int(drafted.sum())
            if len(flying) > LAG:
                self.lengths.observe(slots, *flying.popleft())
        for step in flying:
            self.lengths.observe(slots, *step)
        return self.now - began


def of_positions(num_rows: int) -> Callable[[int], float]:
    return lambda num_drafts: (1 + (num_rows + num_drafts) / 180) / (1 + num_rows / 180)


def mixed(num_rows: int, num_tokens: int) -> dict[str, object]:
    """Rows of which the first half have drafts that are right."""
    first, second = (num_rows + 1) // 2, num_rows // 2
    acceptance = np.repeat([0.9] * first + [0.1] * second, 4096).reshape(num_rows, 4096)
    found = {}
    for name, create in ways(num_rows, 0).items():
        machine = Machine(create(), of_positions(num_rows))
        # A worker has learnt the first things already.
        machine.run(acceptance, num_tokens // 4)
        machine.steps = machine.drafted = 0
        taken = machine.run(acceptance, num_tokens)
        found[name] = (taken, machine.drafted / machine.steps / num_rows)
    plain = found["plain"][0]
    return {
        "rows": num_rows,
        "speed": {name: round(plain / taken, 3) for name, (taken, _) in found.items()},
        "drafts_a_row": {name: round(drafts, 2) for name, (_, drafts) in found.items()},
    }


class Timed(DraftLengths):
    """Notes how long its calls take, ns."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, K)
        self.chosen_ns: list[int] = []
        self.observed_ns: list[int] = []

    def choose(self, slots: npt.NDArray[np.int32], *, is_alone: bool) -> RowLengths | None:
        began = time.perf_counter_ns()
        lengths = super().choose(slots, is_alone=is_alone)
        self.chosen_ns.append(time.perf_counter_ns() - began)
        return lengths

    def observe(self, *step: object) -> None:
        began = time.perf_counter_ns()
        super().observe(*step)  # type: ignore[arg-type]
        self.observed_ns.append(time.perf_counter_ns() - began)


def host_us(num_rows: int, num_tokens: int) -> dict[str, object]:
    """Rows as of mixed(), half of them sampled."""
    lengths = Timed(num_rows)
    acceptance = np.repeat([0.9, 0.1] * num_rows, 4096)[: 4096 * num_rows].reshape(num_rows, 4096)
    machine = Machine(lengths, of_positions(num_rows))
    machine.run(acceptance, num_tokens)
    taken = np.array([lengths.chosen_ns, lengths.observed_ns], np.float64) / 1000
    of_32 = taken[:, : taken.shape[1] // 32 * 32].reshape(2, -1, 32).mean(axis=2)
    # The first ones draft nothing yet, and have little to observe.
    choose, observe = of_32[:, 4:].min(axis=1)
    return {"rows": num_rows, "choose": round(float(choose), 1), "observe": round(float(observe), 1)}


def wrong(num_rows: int, num_tokens: int) -> dict[str, object]:
    """No draft is right."""
    speed = {}
    for name, create in ways(num_rows, 0).items():
        speed[name] = Machine(create(), of_positions(num_rows)).run(np.zeros((num_rows, 64)), num_tokens)
    return {"rows": num_rows, "speed": {name: round(speed["plain"] / taken, 3) for name, taken in speed.items()}}


def texts(num_prompts: int, *, is_sampled: bool) -> list[Floats]:
    """Acceptance by position of requests: each has its own, higher or lower for stretches of 25 tokens."""
    rng, found = np.random.default_rng(7), []
    for _ in range(num_prompts):
        own = rng.beta(1.1, 2.2) if is_sampled else 0.35 + 0.63 * rng.beta(1.6, 1.2)
        is_easy = np.repeat(rng.random(64) < 0.5, 25)
        away = np.where(is_easy, 0.25, -0.25) * (1 - abs(2 * own - 1))
        found.append(np.clip(own + away, 0.02, 0.99)[None])
    return found


def prompts(*, is_sampled: bool, num_prompts: int, num_tokens: int, per_draft: float) -> dict[str, object]:
    taken: dict[str, Floats] = {}
    by_prompt = texts(num_prompts, is_sampled=is_sampled)
    for name, create in ways(1, MOST_BEHIND).items():
        machine = Machine(create(), lambda num_drafts: 1 + per_draft * num_drafts, catching_up=3.5)
        for acceptance in by_prompt[:8]:
            machine.run(acceptance, num_tokens, is_sampled=is_sampled)
        found = []
        for number, acceptance in enumerate(by_prompt):
            machine.seed = number
            found.append(machine.run(acceptance, num_tokens, is_sampled=is_sampled))
        taken[name] = np.array(found, np.float64)
    better = np.minimum(taken["plain"], taken["chains"])
    return {
        "is_sampled": is_sampled,
        "per_draft": per_draft,
        "speed": {name: round(float(taken["plain"].sum() / of.sum()), 3) for name, of in taken.items()},
        "better_by_request": round(float(taken["plain"].sum() / better.sum()), 3),
        "of_each": {
            name: [round(float(number), 3) for number in ((taken["plain"] / of).min(), *_over(better / of))]
            for name, of in taken.items()
        },
    }


def _over(ratios: Floats) -> tuple[float, float]:
    return float(ratios.min()), float(ratios.mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens", type=int, default=2000, help="of each row")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--host-rows", type=int, nargs="*", default=[], help="host_us of steps of so many")
    args = parser.parse_args(arguments)
    sizes = {"num_prompts": args.prompts, "num_tokens": 256}
    found = {
        "command": " ".join(["python", *sys.argv]),
        "drafts": K,
        "mixed": [mixed(rows, args.tokens) for rows in args.rows],
        "wrong": [wrong(rows, args.tokens) for rows in args.rows],
        "host_us": [host_us(rows, args.tokens) for rows in args.host_rows],
        "prompts": [
            prompts(is_sampled=is_sampled, per_draft=per_draft, **sizes)
            for is_sampled in (False, True)
            for per_draft in (0.02, 0.27, 0.6)
        ],
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
