"""Workloads of token ids: prompts of groups, chats and random ones, as clients that each send one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

Conversation = Iterator[list[tuple[bytes, int]]]
"""Rounds of one client: prompts (i32 array) that are sent at once, with their output lengths. The next round is made
when all of the last one are answered."""


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
        yield [(prefixes[int(group)] + _ids(random, own), num_output)]


def chat(random: np.random.Generator, system: bytes, *, turns: int = 6) -> Conversation:
    """A chat behind a system prompt: each turn sends all turns before it."""
    history = system
    for _ in range(turns):
        history += _ids(random, 96)
        yield [(history, 32)]
        history += _ids(random, 32)


def unrelated(random: np.random.Generator, *, count: int = 384, length: int = 512) -> Conversation:
    """Prompts with nothing in common."""
    for _ in range(count):
        yield [(_ids(random, length), 24)]


def seed_kind(random: np.random.Generator, *, count: int, requests: int, prefix: int = 4096) -> Conversation:
    """Many long prefix groups, bound by prefill, too many for one replica."""
    prefixes = [_ids(random, prefix) for _ in range(count)]
    for _ in range(requests):
        yield [(prefixes[int(random.integers(count))] + _ids(random, 64), 16)]


def tree_of_thought(random: np.random.Generator, system: bytes, *, branches: int = 4, depth: int = 3) -> Conversation:
    """A search behind a system prompt: on each level `branches` thoughts at once, then a score of each, a short answer
    to the prompt with the thought; one thought is continued on the next level."""
    state = system + _ids(random, 192)
    for _ in range(depth):
        yield [(state + _ids(random, 8), 48) for _ in range(branches)]
        thoughts = [_ids(random, 48) for _ in range(branches)]
        yield [(state + thought + _ids(random, 16), 4) for thought in thoughts]
        state += thoughts[int(random.integers(branches))]


def _chats(random: np.random.Generator, count: int) -> list[Conversation]:
    system = _ids(random, 512)
    return [chat(random, system) for _ in range(count)]


def _trees(random: np.random.Generator, count: int) -> list[Conversation]:
    system = _ids(random, 768)
    return [tree_of_thought(random, system) for _ in range(count)]


_GROUPS_KV = 24 * 1536 // 3 + 12 * 1700

# Name -> (conversations, how many are open at once, KV tokens a replica) for a number of replicas. Requests, groups and
# clients grow with the replicas: each has the same to do.
WORKLOADS: dict[str, Callable[[np.random.Generator, int], tuple[list[Conversation], int, int]]] = {
    "groups": lambda random, n: ([groups(random, count=6 * n, zipf=False, requests=96 * n)], 12 * n, _GROUPS_KV),
    "zipf_groups": lambda random, n: ([groups(random, count=6 * n, zipf=True, requests=96 * n)], 12 * n, _GROUPS_KV),
    "chats": lambda random, n: (_chats(random, 24 * n), 8 * n, 24_000),
    "trees": lambda random, n: (_trees(random, 8 * n), 3 * n, 24_000),
    "random": lambda random, n: ([unrelated(random, count=96 * n)], 12 * n, 30_000),
    # More clients than slots: 64 a replica.
    "crowd": lambda random, n: (
        [groups(random, count=24, zipf=True, requests=400 * n, num_output=100)],
        80 * n,
        8 * 1536 + 140 * 200,
    ),
    # KV of all replicas together for two thirds of the prefixes, of one for a sixth.
    "seed": lambda random, n: ([seed_kind(random, count=24 * n, requests=600 * n)], 8 * n, 8 * 4096 + 8 * 4200),
}
