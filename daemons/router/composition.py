"""A router put together from its parts. Knows no transport: peers may be daemons or objects in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.config import BeyondContext, RouterSettings
from radixmesh.daemons.router.discovery.discovery import Discovery
from radixmesh.daemons.router.discovery.retirement import Retirement
from radixmesh.daemons.router.discovery.sources import make_sources
from radixmesh.daemons.router.peers.detokenizer_link import DetokenizerLink
from radixmesh.daemons.router.peers.detokenizer_pool import DetokenizerPool
from radixmesh.daemons.router.peers.frame_stream import Dial
from radixmesh.daemons.router.peers.local_detokenizer import LocalDetokenizer
from radixmesh.daemons.router.peers.local_text import LocalText
from radixmesh.daemons.router.peers.schedulers.link_placement import LinkPlacement
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.peers.tokenizer_pool import TokenizerPool, TokenizerReplica
from radixmesh.daemons.router.placement.cache_follower import OpenWatch
from radixmesh.daemons.router.placement.placement import Placement
from radixmesh.daemons.router.placement.policies import make_policy
from radixmesh.daemons.router.queue.tenants import TenantShares
from radixmesh.daemons.router.queue.waiting_outputs import QueueBounds, WaitingOutputs
from radixmesh.daemons.router.requests.intake.model_aliases import ModelAliases
from radixmesh.daemons.router.requests.intake.request_maker import RequestMaker
from radixmesh.daemons.router.requests.journal import Journal
from radixmesh.daemons.router.requests.output_flow import OutputFlow
from radixmesh.daemons.router.requests.request_times import RequestTimes
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.name_watch import Lookup, NameWatch
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.daemons.runtime.telemetry.tracing import Tracer
from radixmesh.detokenizer.v1 import detokenizer_pb2
from radixmesh.scheduler.v1 import scheduler_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Dials of peers, by address."""

    dial_scheduler: Dial[scheduler_pb2.ServeRequest, scheduler_pb2.ServeResponse]
    dial_detokenizer: Dial[detokenizer_pb2.DetokenizeRequest, detokenizer_pb2.DetokenizeResponse]
    open_tokenizer: Callable[[str], TokenizerReplica]
    watch_cache: OpenWatch | None = None
    """Follows a scheduler's prefix cache; without it caches are guessed at by what was sent."""
    look_up: Lookup | None = None
    """Looks up a name, again and again; without it names are left to the transport."""


def make_router(
    settings: RouterSettings,
    peers: Peers,
    instance_id: str,
    progress: Progress,
    metrics: Metrics,
    tracer: Tracer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Router:
    """Call connect() within an event loop. clock: monotonic seconds. Raises MeshError for an unknown policy."""
    hello = make_hello(daemon="router", instance_id=instance_id)
    journal = Journal(settings.journal_bytes)
    times = RequestTimes(metrics, tracer, clock)
    text = None
    if settings.tokenizer_path is not None:
        text = LocalText(
            settings.tokenizer_path,
            lambda: _tokenizers_of(flow.schedulers),
            clock,
            on_encoded=metrics.local_encodes.inc,
        )
    flow = OutputFlow(
        journal,
        metrics,
        times,
        make_schedulers=partial(_make_schedulers, settings, peers, hello, metrics, times, clock),
        make_detokenizers=partial(_make_detokenizers, settings, peers, hello, text, clock),
        clock=clock,
    )
    tokenizers = TokenizerPool(
        peers.open_tokenizer,
        wait_s=settings.tokenizer_wait_s,
        hedge_s=settings.tokenizer_hedge_s,
        is_expected=bool(settings.tokenizers),
        **({} if text is None else {"encode_here": text.encode}),
    )
    maker = RequestMaker(
        journal,
        flow.schedulers,
        tokenizers,
        times,
        scheduler_wait_s=settings.scheduler_wait_s,
        refuses_cut=settings.max_tokens_beyond_context is BeyondContext.REFUSE,
        clock=clock,
    )
    peer_watchers = [
        NameWatch(settings.tokenizers, tokenizers, peers.look_up),
        NameWatch(settings.detokenizers, flow.detokenizers, peers.look_up),
        NameWatch(settings.schedulers, flow.schedulers, peers.look_up),
    ]
    members = Retirement(flow.schedulers)
    sources = make_sources(
        settings.discover, docker_socket=settings.docker_socket, kubernetes_api=settings.kubernetes_api
    )
    return Router(
        settings,
        members=members,
        discovery=Discovery(sources, members, max_schedulers=settings.max_schedulers),
        journal=journal,
        flow=flow,
        maker=maker,
        peer_watchers=peer_watchers,
        progress=progress,
        metrics=metrics,
        times=times,
        text=text,
        clock=clock,
    )


def _tokenizers_of(schedulers: SchedulerPool) -> list[str]:
    """Fingerprints of the tokenizers of all that is served."""
    return [link.identity.tokenizer_fingerprint for link in schedulers.links if link.identity is not None]


def _make_schedulers(
    settings: RouterSettings,
    peers: Peers,
    hello: common_pb2.Hello,
    metrics: Metrics,
    times: RequestTimes,
    clock: Callable[[], float],
    flow: OutputFlow,
) -> SchedulerPool:
    return SchedulerPool(
        lambda address: SchedulerLink(address, peers.dial_scheduler, settings.peer_timeout_s, hello, flow, clock),
        LinkPlacement(
            Placement(make_policy(settings.policy), view_bytes=settings.view_bytes, now=clock),
            open_watch=peers.watch_cache,
            max_outputs=settings.scheduler_max_outputs,
            on_decision=times.routed,
            clock=clock,
        ),
        wait_s=settings.scheduler_wait_s,
        migrate_after_s=settings.migrate_after_s,
        waiting=_make_waiting(settings, metrics, clock),
        evens_out=settings.move_on_overload,
        prefill_min_tokens=settings.prefill_min_tokens,
        prefill_timeout_s=settings.prefill_timeout_s,
        on_moved=lambda reason, count: metrics.moved_outputs.labels(reason).inc(count),
        aliases=ModelAliases.parse(settings.model_aliases),
        clock=clock,
    )


def _make_waiting(settings: RouterSettings, metrics: Metrics, clock: Callable[[], float]) -> WaitingOutputs:
    bounds = QueueBounds(
        max_outputs=settings.max_queue,
        max_bytes=settings.queue_bytes,
        tenant_max_outputs=settings.tenant_max_queue or settings.max_queue * 3 // 4,
        shares=TenantShares.parse(settings.tenant_weights, settings.tenant_max_outputs),
    )
    return WaitingOutputs(
        bounds,
        on_served=metrics.router_queue_seconds.observe,
        on_refused=lambda reason: metrics.router_queue_refused.labels(reason).inc(),
        clock=clock,
    )


def _make_detokenizers(
    settings: RouterSettings,
    peers: Peers,
    hello: common_pb2.Hello,
    text: LocalText | None,
    clock: Callable[[], float],
    flow: OutputFlow,
) -> DetokenizerPool:
    has_local = text is not None and settings.local_outputs > 0
    return DetokenizerPool(
        lambda address: DetokenizerLink(address, peers.dial_detokenizer, settings.peer_timeout_s, hello, flow, clock),
        settings.detokenizer_wait_s,
        clock=clock,
        local=LocalDetokenizer(text, settings.local_outputs, flow, clock) if text is not None and has_local else None,
    )
