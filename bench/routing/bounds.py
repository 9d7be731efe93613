"""Bounds that hold for every policy, also for one that knows the future: what a figure is to be compared with."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from radixmesh.daemons.router.placement.prompt_keys import BLOCK
from routing.replica_model import STEP_TOKENS, StepCost


def best_hit_rate(prompts: Sequence[tuple[int, list[bytes]]], replicas: int, kv_tokens: int) -> float:
    """Share of prompt tokens that the caches of all replicas together can have, for any placement and any eviction.

    prompts: (tokens, keys of whole blocks), in the order in which they came. One cache of all replicas' KV, which
    evicts what is asked for latest (L. A. Belady, 1966): blocks of one prompt are needed together, so whole prefixes.
    """
    uses: dict[bytes, list[int]] = {}
    for index, (_, blocks) in enumerate(prompts):
        for key in blocks:
            uses.setdefault(key, []).append(index)
    never = len(prompts)
    following = {key: iter([*indexes[1:], never]) for key, indexes in uses.items()}
    room, cached = replicas * kv_tokens // BLOCK, dict[bytes, int]()
    # Latest next use first, of those the last blocks of a prefix. Entries whose block has been used since are skipped.
    latest: list[tuple[int, int, bytes]] = []
    hits = total = 0
    for tokens, blocks in prompts:
        total += tokens
        # The last token is always computed.
        known = 0
        while known < min(len(blocks), (tokens - 1) // BLOCK) and blocks[known] in cached:
            known += 1
        hits += known * BLOCK
        for depth, key in enumerate(blocks):
            cached[key] = next(following[key])
            heapq.heappush(latest, (-cached[key], -depth, key))
        while len(cached) > room:
            use, _, key = heapq.heappop(latest)
            if cached.get(key) == -use:
                del cached[key]
    return hits / max(1, total)


def first_burst_s(
    burst: Sequence[tuple[int, list[bytes]]], *, replicas: int, num_requests: int, cost: StepCost, share: float = 0.99
) -> float:
    """Seconds below which no policy brings this quantile of the time to the first token.

    burst: (tokens, keys of whole blocks) of the prompts that come at once when caches are empty; num_requests: of the
    whole run. All but the few that the quantile leaves out have to be computed by then, what they share once at least,
    and what all of them share once on each replica that takes part. And prefixes are whole: of more than there are
    replicas some replica computes two.
    """
    left_out = num_requests - 1 - int(share * (num_requests - 1))
    least = max(_least_shares(burst, replicas, left_out), _least_groups(burst, replicas, left_out))
    return least * cost.token + -(-least // STEP_TOKENS) * cost.base


def _least_shares(burst: Sequence[tuple[int, list[bytes]]], replicas: int, left_out: int) -> float:
    """Tokens of the replica with most of them, were prompts divided at will."""
    holders = Counter(key for _, blocks in burst for key in blocks)
    common = BLOCK * sum(holders[key] == len(burst) for key in holders)
    # A block counts for each of its holders in part: leaving requests out saves their parts at most.
    parts = [tokens - BLOCK * len(blocks) + sum(BLOCK / holders[key] for key in blocks) for tokens, blocks in burst]
    own = sum(sorted(parts)[: max(0, len(parts) - left_out)]) - common
    if own <= 0:
        return 0.0
    return min(common + own / used for used in range(1, replicas + 1))


def _least_groups(burst: Sequence[tuple[int, list[bytes]]], replicas: int, left_out: int) -> float:
    """Tokens of the replica with most of them, were each group of prompts with one beginning no more than its shortest
    prompt: a replica that has any of a group computes that much, and some replica has its share of the groups."""
    groups: dict[bytes, list[int]] = {}
    for tokens, blocks in burst:
        if blocks:
            groups.setdefault(blocks[0], []).append(tokens)
    num_groups = len(groups)
    for size in sorted(map(len, groups.values())):
        if size > left_out:
            break
        left_out -= size
        num_groups -= 1
    return float(sum(sorted(map(min, groups.values()))[: -(-num_groups // replicas)]))
