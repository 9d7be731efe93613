"""Cost of a placement decision, and memory of the view of replicas' caches. Prints JSON; needs no GPU and no processes.

python bench/router_decision.py [--prompt 4096] [--tokens 1000000,10000000]

A decision: the schedulers that may take the output, keys of the prompt, longest match at each of them, choice; noting
what was sent is beside it. Memory: by tracemalloc, of one replica's view that holds prompts of 2,048 tokens which share
their first halves in groups of 16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np

from radixmesh.daemons.router.peers.schedulers.link_health import LinkHealth
from radixmesh.daemons.router.peers.schedulers.link_table import LinkTable
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.cache_view import CacheChange, Insert
from radixmesh.daemons.router.placement.placement import PlacedRequest, Placement
from radixmesh.daemons.router.placement.policies import make_policy
from radixmesh.daemons.router.placement.replicas import ReplicaLoad
from radixmesh.daemons.router.requests.journal import Output
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.scheduler.v1 import scheduler_pb2

_PROMPT = 2048
_GROUP = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt (default 4096)")
    parser.add_argument("--tokens", default="1000000,10000000", help="cached tokens of the views that are measured")
    parser.add_argument("--decisions", type=int, default=2000)
    options = parser.parse_args()
    result = {
        "decision_us": {str(n): _decisions(n, options.prompt, options.decisions) for n in (4, 64, 1000)},
        "view": {tokens: _view(int(tokens)) for tokens in options.tokens.split(",")},
    }
    print(json.dumps(result, indent=1))


def _decisions(num_replicas: int, num_tokens: int, count: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    placement = Placement(make_policy("cache_aware"), seed=0)
    rows = [placement.add(f"10.0.{n // 250}.{n % 250}:50051") for n in range(num_replicas)]
    prompts = [random.integers(0, 128_000, num_tokens, dtype=np.int32).tobytes() for _ in range(64)]
    load = ReplicaLoad(
        submit_sequence=0, num_running=8, num_waiting=0, waiting_tokens=0, free_tokens=1000, cached_tokens=1 << 18
    )
    for row in rows:
        placement.restart(row, kv_tokens=1 << 19)
        # Of two speeds: where all are equal they cost nothing.
        placement.take_load(row, replace(load, token_us=100.0 * (1 + row % 2)))
        # Each replica holds some of the prompts, up to some length.
        for node, index in enumerate(random.choice(64, 8, replace=False)):
            length = int(random.integers(64, num_tokens))
            insert = Insert(node=node + 1, parent=0, ids=prompts[index][: 4 * length], namespace="", weights_version=0)
            placement.apply(row, CacheChange(revision=node + 1, inserts=[insert]))
    placement.replicas.compare_speeds()
    taken: list[float] = []
    sent: list[float] = []
    table, output = LinkTable(placement.replicas), _output(num_tokens)
    for row in rows:
        table.add(row, _link(placement.replicas.addresses[row]))
    able: list[float] = []
    for number in range(count):
        request = PlacedRequest(prompt_ids=prompts[number % 64])
        started = time.perf_counter()
        takers = table.able(output)
        able.append(time.perf_counter() - started)
        decision = placement.choose(request, takers)
        chosen = time.perf_counter()
        placement.take_sent(decision, number + 1)
        taken.append(chosen - started)
        sent.append(time.perf_counter() - chosen)
        if number % 64 == 63:
            for row in rows:
                placement.take_load(row, replace(load, submit_sequence=number + 1, token_us=100.0 * (1 + row % 2)))
    ordered = sorted(taken)
    return {
        "median": round(statistics.median(ordered) * 1e6, 1),
        "p99": round(ordered[int(0.99 * len(ordered))] * 1e6, 1),
        "of_that_finding_those_able": round(statistics.median(able) * 1e6, 1),
        "noting_what_was_sent": round(statistics.median(sent) * 1e6, 1),
    }


_NO_ROLE = scheduler_pb2.SCHEDULER_ROLE_UNSPECIFIED
_IDENTITY = ServedIdentity(name="model", model_fingerprint="f", vocab_size=128_000, max_total_len=131_072)


class _Link(SimpleNamespace):
    """The part of a scheduler's link that the table reads."""

    __hash__ = object.__hash__


def _link(address: str) -> SchedulerLink:
    link = _Link(
        address=address,
        identity=_IDENTITY,
        adapters=(),
        health=LinkHealth(),
        role=_NO_ROLE,
        is_connected=True,
        takes_submits=True,
        is_group_serving=True,
        max_request_len=131_072,
        max_total_len=131_072,
        serves=lambda model, identity: True,
    )
    return cast("SchedulerLink", link)


def _output(num_tokens: int) -> Output:
    resolved = SimpleNamespace(model="model", model_identity=_IDENTITY)
    request = SimpleNamespace(resolved=resolved, max_total_len=num_tokens + 128)
    return cast("Output", SimpleNamespace(request=request, backoff_until={}))


def _view(num_tokens: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    tracemalloc.start()
    placement = Placement(make_policy("cache_aware"), view_bytes=1 << 40, seed=0)
    row = placement.add("replica")
    before = tracemalloc.get_traced_memory()[0]
    node, revision, longest, cached = 0, 0, 0.0, 0
    spent = 0.0
    while cached < num_tokens:
        half = random.integers(0, 128_000, _PROMPT // 2, dtype=np.int32).tobytes()
        parent, node = 0, node + 1
        inserts = [Insert(node=node, parent=0, ids=half, namespace="", weights_version=0)]
        parent = node
        for _ in range(_GROUP):
            node += 1
            ids = random.integers(0, 128_000, _PROMPT // 2, dtype=np.int32).tobytes()
            inserts.append(Insert(node=node, parent=parent, ids=ids, namespace="", weights_version=0))
        revision += len(inserts)
        started = time.perf_counter()
        placement.apply(row, CacheChange(revision=revision, inserts=inserts))
        taken = time.perf_counter() - started
        spent, longest = spent + taken, max(longest, taken)
        cached += sum(len(insert.ids) for insert in inserts) // 4
        del inserts, half, ids
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {
        "bytes_per_token": round(used / cached, 2),
        "accounted_per_token": round(placement.view_bytes / cached, 2),
        "apply_us_per_1k_tokens": round(spent / cached * 1e9, 1),
        "longest_apply_ms": round(longest * 1e3, 2),
    }


if __name__ == "__main__":
    main()
