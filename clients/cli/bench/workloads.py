"""Workloads as lists of turns, deterministic by seed: those with shared prefixes, and those without.

A turn's prompt is its parent's prompt and output followed by its own new ids (no parent: the new ids alone). It is sent
`delay_s` after its parent finished, or at `delay_s` after the start when it has none. Each draw comes in a fixed order
from one numpy generator a workload, so the same seed gives the same tokens to every system that is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import SupportsInt

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

VOCAB_SIZE = 100_000
PER_GROUP = 16
"""Requests with one prefix, of shared_prefix."""
_FIRST_ID = 10
"""Ids below are left to special tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """parent: index in the list, or None. new_ids int32. delay_s: see the module."""

    parent: int | None
    new_ids: IntArray
    out_len: int
    delay_s: float


Workload = Callable[[int, int | None], list[Turn]]


def few_shot(seed: int, num_requests: int | None = None, *, rate: float = 40.0) -> list[Turn]:
    """Questions behind one of four sets of 1,500 tokens of examples."""
    rng, question, out = np.random.default_rng(seed), 80, 32
    sets = [_ids(rng, 1500) for _ in range(4)]
    turns = []
    for at in _arrivals(rng, num_requests or 512, rate):
        examples = sets[rng.integers(len(sets))]
        new = np.concatenate([examples, _ids(rng, rng.integers(question // 2, question * 2))])
        turns.append(Turn(parent=None, new_ids=new, out_len=_about(rng, out), delay_s=float(at)))
    return turns


def multi_turn(seed: int, num_requests: int | None = None, *, rate: float = 4.0) -> list[Turn]:
    """Chats of six turns with one system prompt of 400 tokens; every turn continues the whole history."""
    rng, num_turns, user, out = np.random.default_rng(seed), 6, 90, 160
    num_chats = 96 if num_requests is None else max(1, num_requests // num_turns)
    system, arrivals = _ids(rng, 400), _arrivals(rng, num_chats, rate)
    turns: list[Turn] = []
    for at in arrivals:
        parent = None
        for k in range(num_turns):
            new = _ids(rng, rng.integers(user // 3, user * 2))
            if k == 0:
                new = np.concatenate([system, new])
            out_len = int(rng.integers(out // 4, out * 2))
            delay_s = float(at if k == 0 else rng.exponential(4.0))
            turns.append(Turn(parent=parent, new_ids=new, out_len=out_len, delay_s=delay_s))
            parent = len(turns) - 1
    return turns


def tree_of_thought(seed: int, num_requests: int | None = None, *, rate: float = 1.0) -> list[Turn]:
    """Problems of 600 tokens; of each level of thoughts three are kept, and each of them branches three times."""
    rng, depth, branch, out = np.random.default_rng(seed), 4, 3, 120
    num_problems = 24 if num_requests is None else max(1, num_requests // 22)
    turns: list[Turn] = []
    for at in _arrivals(rng, num_problems, rate):
        level = [len(turns)]
        turns.append(Turn(parent=None, new_ids=_ids(rng, 600), out_len=out, delay_s=float(at)))
        for _ in range(depth - 1):
            kept, level = level[:branch], []
            for parent in kept:
                for _ in range(branch):
                    level.append(len(turns))
                    step = _ids(rng, 60)
                    turns.append(Turn(parent=parent, new_ids=step, out_len=_about(rng, out), delay_s=0.0))
    return turns


def code_analysis(seed: int, num_requests: int | None = None, *, rate: float = 12.0) -> list[Turn]:
    """Questions over a few of a repository's twelve files, the popular files first in the prompt."""
    rng, num_files, file_len, out = np.random.default_rng(seed), 12, 700, 200
    repos = [[_ids(rng, rng.integers(file_len // 2, file_len * 2)) for _ in range(num_files)] for _ in range(6)]
    turns = []
    for at in _arrivals(rng, num_requests or 384, rate):
        files, num_picks = repos[rng.zipf(1.6) % len(repos)], int(rng.integers(1, 6))
        picks = sorted({int(min(num_files - 1, rng.geometric(0.35) - 1)) for _ in range(num_picks)})
        new = np.concatenate([*(files[i] for i in picks), _ids(rng, 120)])
        turns.append(Turn(parent=None, new_ids=new, out_len=_about(rng, out), delay_s=float(at)))
    return turns


def no_sharing(
    seed: int, num_requests: int | None = None, *, rate: float = 10.0, prompt: int = 900, out: int = 120
) -> list[Turn]:
    """Prompts with nothing in common."""
    rng = np.random.default_rng(seed)
    return [
        Turn(
            parent=None,
            new_ids=_ids(rng, rng.integers(prompt // 3, prompt * 2)),
            out_len=_about(rng, out),
            delay_s=float(at),
        )
        for at in _arrivals(rng, num_requests or 384, rate)
    ]


def mixed(seed: int, num_requests: int | None = None) -> list[Turn]:
    """All kinds at once, and one short request in ten with nothing to share: where greedy prefix order starves some."""
    share = 1.0 if num_requests is None else num_requests / 688
    parts = (
        few_shot(seed, _scaled(160, share), rate=10.0),
        multi_turn(seed + 1, _scaled(192, share), rate=1.5),
        tree_of_thought(seed + 2, _scaled(176, share), rate=0.4),
        code_analysis(seed + 3, _scaled(96, share), rate=6.0),
        no_sharing(seed + 4, _scaled(64, share), rate=4.0, prompt=200, out=40),
    )
    turns: list[Turn] = []
    for part in parts:
        base = len(turns)
        turns += [replace(t, parent=None if t.parent is None else t.parent + base) for t in part]
    return turns


def random_lengths(seed: int, num_requests: int | None = None, *, prompt: int = 4096, out: int = 2048) -> list[Turn]:
    """Prompt lengths uniform in [1, prompt], output lengths in [1, out], all at once; nothing is shared."""
    rng, num = np.random.default_rng(seed), num_requests or 500
    prompt_lens, out_lens = rng.integers(1, prompt + 1, num), rng.integers(1, out + 1, num)
    return [
        Turn(parent=None, new_ids=_ids(rng, n), out_len=int(out), delay_s=0.0)
        for n, out in zip(prompt_lens, out_lens, strict=True)
    ]


def shared_prefix(
    seed: int,
    num_requests: int | None = None,
    *,
    per_group: int = PER_GROUP,
    prefix: int = 2048,
    question: int = 128,
    out: int = 128,
) -> list[Turn]:
    """Groups of per_group with `prefix` tokens in common and `question` of their own, shuffled, all at once."""
    rng = np.random.default_rng(seed)
    num_groups = 32 if num_requests is None else max(1, num_requests // per_group)
    prefixes = [_ids(rng, prefix) for _ in range(num_groups)]
    turns = [
        Turn(parent=None, new_ids=np.concatenate([prefixes[g], _ids(rng, question)]), out_len=out, delay_s=0.0)
        for _ in range(per_group)
        for g in range(num_groups)
    ]
    return [turns[i] for i in rng.permutation(len(turns))]


def fixed_lengths(num: int, prompt_len: int, out_len: int, seed: int) -> list[Turn]:
    """`num` prompts of one length, all at once."""
    rng = np.random.default_rng(seed)
    return [Turn(parent=None, new_ids=_ids(rng, prompt_len), out_len=out_len, delay_s=0.0) for _ in range(num)]


WORKLOADS: dict[str, tuple[Workload, int]] = {
    "few-shot": (few_shot, 11),
    "multi-turn": (multi_turn, 12),
    "tree": (tree_of_thought, 13),
    "code": (code_analysis, 14),
    "none": (no_sharing, 15),
    "mixed": (mixed, 16),
    "random": (random_lengths, 1),
    "shared-prefix": (shared_prefix, 2),
    "single-stream": (lambda seed, num: fixed_lengths(num or 1, 128, 256, seed), 3),
    "decode-256": (lambda seed, num: fixed_lengths(num or 256, 128, 512, seed), 4),
}
"""By name, with the seed each has of its own."""


def make_workload(name: str, seed: int | None = None, num_requests: int | None = None) -> list[Turn]:
    """The turns of a workload; None = its own seed, its own number. Raises ValueError naming the choices."""
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is unknown: choose one of {', '.join(WORKLOADS)}")
    make, own_seed = WORKLOADS[name]
    return make(own_seed if seed is None else seed, num_requests)


def _ids(rng: np.random.Generator, num: SupportsInt) -> IntArray:
    return rng.integers(_FIRST_ID, VOCAB_SIZE, int(num)).astype(np.int32)


def _arrivals(rng: np.random.Generator, num: int, rate: float) -> npt.NDArray[np.float64]:
    """Seconds of a Poisson process, `rate` a second."""
    return np.cumsum(rng.exponential(1 / rate, num))


def _about(rng: np.random.Generator, length: int) -> int:
    return int(rng.integers(length // 2, length * 2))


def _scaled(num: int, share: float) -> int:
    return max(1, round(num * share))
