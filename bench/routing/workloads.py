"""Workloads of token ids: prompts of groups, chats and random ones, as clients that each send one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Conversation = Iterator[tuple[bytes, int]]
"""Prompts (i32 array) of one client with their output lengths; the next one is made when the last is answered."""


def _ids(random: np.random.Generator, count: int) -> bytes:
    return random.integers(0, 100_000, count, dtype=np.int32).tobytes()


def groups(
    random: np.random.Generator, *, count: int, zipf: bool, requests: int = 384, num_output: int = 24
) -> Conversation:
    """Prompts: a prefix of one of the groups and some tokens of their own."""
    prefix, own = 1536, 64
    prefixes = [_ids(random, prefix) for _ in range(count)]
    weights = np.array([1.0 / (rank + 1) ** 1.2 if zipf else 1.0 for rank in range(count)])
    chosen = random.choice(count, size=requests, p=weights / weights.sum())
    for group in chosen:
        yield prefixes[int(group)] + _ids(random, own), num_output


def chat(random: np.random.Generator, system: bytes, *, turns: int = 6) -> Conversation:
    """A chat behind a system prompt: each turn sends all turns before it."""
    history = system
    for _ in range(turns):
        history += _ids(random, 96)
        yield history, 32
        history += _ids(random, 32)


def unrelated(random: np.random.Generator, *, count: int = 384, length: int = 512) -> Conversation:
    """Prompts with nothing in common."""
    for _ in range(count):
        yield _ids(random, length), 24


def seed_kind(random: np.random.Generator, *, count: int, requests: int, prefix: int = 4096) -> Conversation:
    """Many long prefix groups, bound by prefill, too many for one replica."""
    prefixes = [_ids(random, prefix) for _ in range(count)]
    for _ in range(requests):
        yield prefixes[int(random.integers(count))] + _ids(random, 64), 16


def _chats(random: np.random.Generator) -> list[Conversation]:
    system = _ids(random, 512)
    return [chat(random, system) for _ in range(96)]


# Name -> (conversations, how many are open at once, KV tokens a replica) for a number of replicas.
WORKLOADS: dict[str, Callable[[np.random.Generator, int], tuple[list[Conversation], int, int]]] = {
    "groups": lambda random, n: ([groups(random, count=24, zipf=False)], 12 * n, 24 * 1536 // 3 + 12 * 1700),
    "zipf_groups": lambda random, n: ([groups(random, count=24, zipf=True)], 12 * n, 24 * 1536 // 3 + 12 * 1700),
    "chats": lambda random, n: (_chats(random), 8 * n, 24_000),
    "random": lambda random, n: ([unrelated(random)], 12 * n, 30_000),
    # More clients than slots: 64 a replica.
    "crowd": lambda random, n: (
        [groups(random, count=24, zipf=True, requests=400 * n, num_output=100)],
        80 * n,
        8 * 1536 + 140 * 200,
    ),
    "seed": lambda random, n: ([seed_kind(random, count=10 * n, requests=160 * n)], 8 * n, 14 * 4096 + 8 * 4200),
}
