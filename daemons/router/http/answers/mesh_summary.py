"""The mesh as one router sees it, as JSON of bounded size: numbers alone, no ids of requests, tokens or addresses."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import Counter

import radixmesh
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.placement.tree_summary import TreeSummary
from radixmesh.daemons.router.requests.journal import Output, OutputState, Request
from radixmesh.daemons.router.router import Router
from radixmesh.scheduler.v1 import scheduler_pb2

JsonObject = dict[str, object]

MAX_PEERS = 64
MAX_REQUESTS = 48
MAX_TREES = 4
MAX_TREE_NODES = 240
# Nodes of one cache that are looked at: 2,048 take about 3 ms.
_MAX_VISITED = 2048
_GROUPS = {number: name.removeprefix("GROUP_STATE_").lower() for name, number in scheduler_pb2.GroupState.items()}


def limited_summary(context: HttpContext) -> JsonObject:
    """For readers without a key, where one is asked for: what /health and /version say, too."""
    return {"access": "limited", "status": context.progress.state.value, "version": radixmesh.__version__}


def mesh_summary(context: HttpContext, *, tenant: str | None) -> JsonObject:
    """For readers with a key, or where none is asked for.

    tenant: whose requests are listed, None = all. Prefix trees hold what all tenants sent: only readers whose key names
    no tenant (None or "") see their shape.
    """
    router = context.router
    links = router.schedulers.links[:MAX_PEERS]
    return {
        "access": "full",
        "status": context.progress.state.value,
        "version": radixmesh.__version__,
        "time_s": round(time.time(), 3),
        "up_since_s": context.created,
        "router": _router(context),
        "models": [
            {"name": model.name, "max_model_len": model.identity.max_total_len, "num_schedulers": model.num_schedulers}
            for model in router.schedulers.models()[:MAX_PEERS]
        ],
        "tokenizers": {"num_replicas": router.num_tokenizers},
        "detokenizers": [
            {"is_connected": link.is_connected, "num_entries": link.num_entries, "num_connects": link.num_connects}
            for link in router.detokenizers.links[:MAX_PEERS]
        ],
        "schedulers": [_scheduler(link) for link in links],
        "requests": _requests(router, links, tenant),
        "trees": [] if tenant else _trees(router, links),
    }


def _router(context: HttpContext) -> JsonObject:
    """Counters since the start of the process; a reader takes rates from two answers and their time_s."""
    router, metrics = context.router, context.metrics
    return {
        "num_requests": len(router.journal),
        "num_waiting_for_scheduler": router.schedulers.num_waiting,
        "num_waiting_for_detokenizer": router.detokenizers.num_waiting,
        "journal_bytes": router.journal.num_bytes,
        "journal_max_bytes": router.journal.max_bytes,
        "requests_total": _value(metrics.requests_started),
        "resumed_total": _value(metrics.requests_resumed),
        "prompt_tokens_total": _value(metrics.prompt_tokens),
        "output_tokens_total": _value(metrics.output_tokens),
    }


def _scheduler(link: SchedulerLink) -> JsonObject:
    """Tokens of KV; numbers of outputs of all routers, by the scheduler's latest load."""
    load, page = link.load, link.page_size
    is_known = link.is_connected
    # Without a group there are no pages to count; what the last one had is told by kv_tokens.
    num_used = load.total_pages - load.free_pages - load.cached_pages if is_known else 0
    return {
        "is_connected": link.is_connected,
        "num_connects": link.num_connects,
        "group": _GROUPS.get(load.group, "unknown") if is_known and load.group else "",
        "epoch": load.epoch,
        "is_draining": link.is_draining or load.is_draining,
        "models": list(link.models[:MAX_PEERS]),
        "num_slots": load.num_slots,
        "num_running": load.num_running if is_known else 0,
        "num_waiting": load.num_waiting if is_known else 0,
        "waiting_tokens": load.waiting_tokens if is_known else 0,
        "num_own": link.num_running,
        "kv_tokens": link.kv_tokens,
        "kv_used_tokens": max(0, num_used) * page,
        "kv_cached_tokens": load.cached_pages * page if is_known else 0,
        "hit_rate": round(load.hit_rate, 4),
    }


def _requests(router: Router, links: tuple[SchedulerLink, ...], tenant: str | None) -> list[JsonObject]:
    """The oldest of this router's outputs, without their names: who knows an id may cancel the request."""
    # Others' requests are passed over, within a bound of their own.
    oldest = router.journal.oldest(MAX_REQUESTS if tenant is None else 16 * MAX_REQUESTS)
    mine = [request for request in oldest if tenant is None or request.resolved.tenant == tenant]
    outputs = [output for request in mine[:MAX_REQUESTS] for output in request.outputs[:MAX_REQUESTS]]
    return [_output(output, output.request, links) for output in outputs[:MAX_REQUESTS]]


def _output(output: Output, request: Request, links: tuple[SchedulerLink, ...]) -> JsonObject:
    return {
        "state": _state(output),
        "model": request.resolved.model,
        "prompt_tokens": request.num_prompt,
        "output_tokens": len(output.ids),
        "max_tokens": request.max_tokens,
        "age_s": round(request.clock() - request.accepted, 2),
        "scheduler": links.index(output.scheduler) if output.scheduler in links else None,
    }


def _state(output: Output) -> str:
    if output.state in (OutputState.ENDED, OutputState.FINISHED):
        return "ending"
    if output.scheduler is None:
        return "waiting for a scheduler"
    if not output.scheduler.is_group_serving:
        return "waiting for a worker"
    # The scheduler tells what it queues by number only.
    return "decoding" if len(output.ids) > output.num_submitted else "queued or in prefill"


def _trees(router: Router, links: Iterable[SchedulerLink]) -> list[JsonObject]:
    trees: list[JsonObject] = []
    for index, link in enumerate(links):
        if len(trees) == MAX_TREES:
            break
        limits = {"max_nodes": MAX_TREE_NODES, "max_visited": _MAX_VISITED}
        tree = router.schedulers.placement.tree(link, **limits)
        if tree is not None:
            trees.append(_tree(index, tree))
    return trees


def _tree(scheduler: int, tree: TreeSummary) -> JsonObject:
    """nodes: [index of the parent or -1, first position, tokens, tokens of the subtree, number], parents first."""
    return {
        "scheduler": scheduler,
        "num_nodes": tree.num_nodes,
        "num_tokens": tree.num_tokens,
        "nodes": [list(node) for node in tree.nodes],
    }


def _value(counter: Counter) -> int:
    return int(next(iter(counter.collect())).samples[0].value)
