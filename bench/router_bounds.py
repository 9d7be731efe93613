"""Bounds of the time to the first token for the workloads of router_gateways.py. Prints JSON; needs no processes.

python bench/router_bounds.py [--workloads groups,zipf_groups,chats] [--requests 384] [--tries 2000] [--seed 1]

All clients begin at once, and caches are empty: these first prompts are the slowest of a run, and their p99 is that of
the whole run. `no_schedule_below_ms` is proven (routing/bounds.py): whoever places and orders them, and knows all of
them. `clairvoyant_ms` is the best schedule that was found by one who does: prompts placed by a search, prefixes that
most wait for first, steps as long as they may be, the cost of steps as in router_policies.py. The least that can be
reached lies between the two. `cache_aware_ms` is the router's policy in virtual time on the same prompts, and
`cache_threshold_ms` that of SGLang's gateway. None has the time of HTTP, of tokenizers and of messages in it.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from router_gateways import _KV_TOKENS, _REPLICAS, workload_of
from router_policies import Run
from routing.bounds import first_burst_s
from routing.replica_model import STEP_TOKENS, BlockCache, Job, ReplicaModel, StepCost
from routing.workloads import WORKLOADS
from tokenizers import Tokenizer

from radixmesh.daemons.router.placement.prompt_keys import BLOCK

_TOKENIZER = Path(__file__).resolve().parents[1] / "compose" / "models" / "tiny-llama" / "tokenizer.json"

Prompt = tuple[bytes, list[bytes], int]
"""Ids as i32 array, keys of whole blocks, tokens of the answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="groups,zipf_groups,chats,random")
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--tries", type=int, default=2000, help="placements that the search looks at")
    parser.add_argument("--seed", type=int, default=1, help="of the workloads; router_gateways.py has the first")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(_TOKENIZER))
    print(json.dumps({name: _bounds(tokenizer, name, options) for name in options.workloads.split(",")}, indent=1))


def _bounds(tokenizer: Tokenizer, name: str, options: argparse.Namespace) -> dict[str, object]:
    conversations, at_once, _ = workload_of(name, options.requests, options.seed)
    rounds = [list(conversation) for conversation in conversations]
    num_requests = sum(len(prompts) for conversation in rounds for prompts in conversation)
    burst = [
        _prompt(tokenizer, text, num_output)
        for conversation in rounds[:at_once]
        for text, num_output in conversation[0]
    ]
    prompts = {text: _prompt(tokenizer, text, 0)[0] for each in rounds for sent in each for text, _ in sent}
    chats = [[[(prompts[text], num_output) for text, num_output in sent] for sent in each] for each in rounds]
    WORKLOADS[name] = lambda random, num_replicas: ([iter(chat) for chat in chats], at_once, _KV_TOKENS)
    sized = [(len(ids) // 4, blocks) for ids, blocks, _ in burst]
    left_out = num_requests - 1 - int(0.99 * (num_requests - 1))
    bound_s = first_burst_s(sized, replicas=_REPLICAS, num_requests=num_requests, cost=StepCost())
    return {
        "requests": num_requests,
        "at_once": len(burst),
        "prompt_tokens_at_once": sum(tokens for tokens, _ in sized),
        "to_compute_at_once": _distinct(burst),
        "no_schedule_below_ms": round(1e3 * bound_s),
        "clairvoyant_ms": round(1e3 * _clairvoyant_s(burst, left_out, options.tries)),
        **{
            f"{policy}_ms": Run(policy, name, _REPLICAS).result()["ttft_p99_ms"]
            for policy in ("cache_aware", "cache_threshold")
        },
    }


def _prompt(tokenizer: Tokenizer, text: str, num_output: int) -> Prompt:
    ids = np.array(tokenizer.encode(text).ids, np.int32).tobytes()
    step = 4 * BLOCK
    return ids, [b"%d/%d" % (end, hash(ids[:end])) for end in range(step, len(ids) + 1, step)], num_output


def _distinct(burst: list[Prompt]) -> int:
    """Tokens to compute, were every block computed once."""
    shared = {key for _, blocks, _ in burst for key in blocks}
    return BLOCK * len(shared) + sum(len(ids) // 4 - BLOCK * len(blocks) for ids, blocks, _ in burst)


def _clairvoyant_s(burst: list[Prompt], left_out: int, tries: int) -> float:
    """The best quantile found by a search over placements: one prefix, or one prompt, moves at a time. 0.0: the
    quantile leaves out all of them, and later requests decide."""
    if left_out >= len(burst):
        return 0.0
    rng = random.Random(1)
    groups: dict[bytes, list[int]] = {}
    for index, (_, blocks, _) in enumerate(burst):
        groups.setdefault(blocks[0] if blocks else b"%d" % index, []).append(index)
    placed = [0] * len(burst)
    # Longest processing time first (R. L. Graham, 1969), by prefixes; one prefix of all is everywhere.
    if len(groups) > 1:
        loads = [0] * _REPLICAS
        for members in sorted(groups.values(), key=lambda members: -_distinct([burst[index] for index in members])):
            replica = loads.index(min(loads))
            loads[replica] += _distinct([burst[index] for index in members])
            for index in members:
                placed[index] = replica
    else:
        placed = [index % _REPLICAS for index in range(len(burst))]
    best = _quantile_s(burst, placed, left_out)
    members_of = list(groups.values())
    for _ in range(tries):
        moved = placed.copy()
        for _ in range(rng.choice((1, 2))):
            members = rng.choice(members_of) if len(groups) > 1 and rng.random() < 0.7 else [rng.randrange(len(burst))]
            replica = rng.randrange(_REPLICAS)
            for index in members:
                moved[index] = replica
        found = _quantile_s(burst, moved, left_out)
        if found <= best:
            best, placed = found, moved
    return best


def _quantile_s(burst: list[Prompt], placed: list[int], left_out: int) -> float:
    """Seconds to the first token that all but left_out of the prompts have."""
    times: list[float] = []
    for replica in range(_REPLICAS):
        mine = [prompt for prompt, at in zip(burst, placed, strict=True) if at == replica]
        times += _first_tokens_s(mine)
    return sorted(times)[-1 - left_out]


def _first_tokens_s(prompts: list[Prompt]) -> list[float]:
    """By one replica: prompts whose first block most others have first."""
    holders: dict[bytes, int] = {}
    for _, blocks, _ in prompts:
        holders[blocks[0]] = holders.get(blocks[0], 0) + 1
    model = ReplicaModel(StepCost(), BlockCache(_KV_TOKENS), chunk_tokens=STEP_TOKENS)
    # Answers are short, so that decode rows cost nothing here: the bound leaves them out too.
    for ids, blocks, _ in sorted(prompts, key=lambda prompt: (-holders[prompt[1][0]], prompt[1][0])):
        model.submit(Job(ids, blocks, 1))
    now, times = 0.0, []
    while not model.is_idle:
        seconds, started, _ = model.step(now)
        now += seconds
        times += [now] * len(started)
    return times


if __name__ == "__main__":
    main()
