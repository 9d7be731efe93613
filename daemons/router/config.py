"""Settings of the router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from radixmesh.daemons.router.chat.formats import AUTO, REASONING_PARSERS, TOOL_PARSERS
from radixmesh.daemons.router.discovery.sources import FORMS, make_sources
from radixmesh.daemons.router.placement.policies import POLICIES
from radixmesh.daemons.router.queue.tenants import TenantShares
from radixmesh.daemons.router.requests.intake.model_aliases import ModelAliases
from radixmesh.daemons.runtime.addresses import parse_address
from radixmesh.daemons.runtime.common_settings import CommonSettings
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.memory import share
from radixmesh.daemons.runtime.settings import setting


class BeyondContext(Enum):
    CUT = "cut"
    REFUSE = "refuse"


_BODIES_BYTES = share(8, 128 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(CommonSettings):
    """Serves clients: owns every request from its arrival to its last delta."""

    tokenizers: tuple[str, ...] = setting((), "addresses of tokenizers: host:port or unix:/path, comma-separated")
    detokenizers: tuple[str, ...] = setting((), "addresses of detokenizers, comma-separated")
    schedulers: tuple[str, ...] = setting((), "addresses of schedulers, comma-separated; more can be added at run time")
    discover: tuple[str, ...] = setting((), f"where more schedulers are found, comma-separated: {FORMS}")
    max_schedulers: int = setting(
        1_024, "schedulers that --discover may bring; further ones are ignored, and the log says so"
    )
    docker_socket: str = setting("/var/run/docker.sock", "socket of the Docker engine, for docker: sources")
    kubernetes_api: str = setting(
        "", "URL of the Kubernetes API server, for kubernetes: sources; empty: of the cluster that this runs in"
    )
    policy: str = setting("cache_aware", f"how a scheduler is chosen: {', '.join(sorted(POLICIES))}")
    view_bytes: int = setting(
        share(16, 128 << 20),
        "bytes of what is known of all schedulers' prefix caches; what is beyond is guessed; by default a 16th of the "
        "memory that the process may have, 128 MiB at most",
    )
    model_aliases: tuple[str, ...] = setting((), "further names that clients may ask for: ALIAS=NAME of a served model")
    journal_bytes: int = setting(
        share(4, 1 << 30),
        "bytes of requests kept; past it new requests get JOURNAL_FULL; by default a quarter of the memory that the "
        "process may have, 1 GiB at most",
    )
    max_queue: int = setting(
        16_384, "outputs that wait here for a scheduler with room; more requests are refused with OVERLOADED, HTTP 429"
    )
    queue_bytes: int = setting(
        share(8, 512 << 20),
        "bytes of the requests of those; by default an eighth of the memory that the process may have, 512 MiB at most",
    )
    tenant_max_queue: int = setting(0, "outputs of one tenant among those; 0: three quarters of --max-queue")
    tenant_weights: tuple[str, ...] = setting((), "shares of tenants while they wait: TENANT=WEIGHT, 1 for all others")
    tenant_max_outputs: tuple[str, ...] = setting(
        (), "outputs of a tenant at schedulers at a time: N, TENANT=N; further ones wait here"
    )
    scheduler_max_outputs: int = setting(
        0, "outputs at one scheduler from which on it is full; 0: its slots, and as many again that wait, at least 64"
    )
    grpc_message_bytes: int = setting(
        share(32, 64 << 20),
        "bytes of one gRPC message of a client; by default a 32nd of the memory that the process may have, "
        "64 MiB at most",
    )
    grpc_receiving_bytes: int = setting(
        share(16, 4 << 30),
        "bytes of gRPC messages of clients that may arrive at once, three messages at least; by default a 16th of the "
        "memory that the process may have, 4 GiB at most",
    )
    grpc_message_s: float = setting(60.0, "seconds that a gRPC message of a client may take to arrive")
    client_stall_s: float = setting(30.0, "seconds without progress after which a client's request is aborted")
    peer_timeout_s: float = setting(
        5.0,
        "seconds without a frame, or with an answer owed, after which a peer counts as dead",
        deprecated=("silence-s",),
    )
    scheduler_wait_s: float = setting(120.0, "seconds that a request waits for a scheduler that can take it")
    detokenizer_wait_s: float = setting(120.0, "seconds that text waits for a detokenizer")
    tokenizer_wait_s: float = setting(10.0, "seconds that a prompt waits for a tokenizer")
    tokenizer_path: Path | None = setting(
        None,
        "folder of the served model: with its tokenizer short prompts are encoded and few outputs decoded in this "
        "process, which saves a first token the way to tokenizer and detokenizer; all else is for these",
    )
    local_outputs: int = setting(16, "outputs that are decoded here at a time, with --tokenizer-path; 0: none")
    tokenizer_hedge_s: float = setting(0.4, "seconds after which a second tokenizer is asked too")
    migrate_after_s: float = setting(1.0, "seconds after which requests leave a scheduler whose group does not serve")
    move_on_overload: bool = setting(
        True, "running outputs leave a scheduler that has many more than another, where that saves more than it costs"
    )
    prefill_min_tokens: int = setting(
        256, "prompt tokens without cached KV from which on a group of schedulers with --role prefill computes them"
    )
    prefill_timeout_s: float = setting(
        60.0, "seconds after which such a prompt, its wait in that queue included, is computed where its output decodes"
    )
    api_keys_file: Path | None = setting(
        None, "keys that clients must send, one a line, a tenant's name behind it or not; read again when it changes"
    )
    admin_keys_file: Path | None = setting(None, "keys that may also add, remove and drain schedulers")
    share_cache_across_tenants: bool = setting(
        False, "prefixes are cached for all tenants together: faster, and who times answers learns what others sent"
    )
    http_listen: str | None = setting(None, "host:port that serves HTTP: OpenAI's API and /generate")
    http_body_bytes: int = setting(
        min(16 << 20, _BODIES_BYTES * 3 // 4),
        "bytes of one HTTP request body, at most three quarters of --http-bodies-bytes; more is refused unread",
    )
    http_bodies_bytes: int = setting(
        _BODIES_BYTES,
        "bytes of all HTTP request bodies that are read at once; more gets 503; by default an eighth of the memory "
        "that the process may have, 128 MiB at most",
    )
    http_responses_bytes: int = setting(
        _BODIES_BYTES // 4,
        "bytes of conversations kept for previous_response_id of /v1/responses, an eighth of them at most of one; the "
        "least recently used are forgotten; 0: none are kept",
    )
    http_body_s: float = setting(60.0, "seconds that an HTTP request body may take to arrive")
    http_min_body_rate: int = setting(8_192, "least bytes a second of an HTTP request body, after its first 5 s")
    http_head_s: float = setting(10.0, "seconds that the head of an HTTP request may take to arrive")
    http_idle_s: float = setting(60.0, "seconds after which an HTTP connection without a request is closed")
    http_connections: int = setting(
        16_384, "HTTP connections at once; past it those without a request give way, else further ones are refused"
    )
    http_allowed_hosts: tuple[str, ...] = setting(
        (),
        "names by which HTTP clients may call this router, beside IP addresses and names without a dot: host, *.domain "
        "or * for any; empty: any, unless http_listen is a loopback address without TLS",
    )
    http_page: bool = setting(True, "the HTTP port serves a page to chat and to look at the mesh: /, /docs, /mesh")
    http_metrics: bool = setting(True, "the HTTP port serves /metrics too, beside --metrics-listen")
    max_tokens_beyond_context: BeyondContext = setting(
        BeyondContext.CUT,
        "what becomes of a request whose max_tokens is more than the context has room for behind its prompt: cut, or "
        "refuse",
    )
    tool_call_parser: str = setting(
        AUTO, f"how a model writes tool calls: {', '.join(TOOL_PARSERS)}; auto: by its chat template"
    )
    reasoning_parser: str = setting(
        AUTO, f"how a model writes its reasoning: {', '.join(REASONING_PARSERS)}; auto: by its chat template"
    )
    http_cors_origins: tuple[str, ...] = setting(
        (), "origins whose web pages may use the HTTP port: https://host, or * for all; none by default"
    )

    def __post_init__(self) -> None:
        CommonSettings.__post_init__(self)
        ModelAliases.parse(self.model_aliases)
        for name, given, known in (
            ("tool-call-parser", self.tool_call_parser, TOOL_PARSERS),
            ("reasoning-parser", self.reasoning_parser, REASONING_PARSERS),
        ):
            if given not in known:
                raise ValueError(f"--{name} is {given!r}: choose one of {', '.join(known)}")
        for name in ("tokenizers", "detokenizers", "schedulers"):
            _check_addresses(name, getattr(self, name))
        make_sources(self.discover)
        TenantShares.parse(self.tenant_weights, self.tenant_max_outputs)
        for name in ("tenant_max_queue", "scheduler_max_outputs", "local_outputs"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must be >= 0, not {getattr(self, name)}")
        if self.journal_bytes <= 0:
            raise ValueError(f"--journal-bytes must be > 0, not {self.journal_bytes}")
        if self.view_bytes < 0:
            raise ValueError(f"--view-bytes must be >= 0, not {self.view_bytes}")
        for name in (
            "max_schedulers",
            "max_queue",
            "queue_bytes",
            "grpc_message_bytes",
            "grpc_receiving_bytes",
            "grpc_message_s",
            "http_body_bytes",
            "http_bodies_bytes",
            "http_body_s",
            "http_min_body_rate",
            "http_head_s",
            "http_idle_s",
            "http_connections",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be > 0, not {getattr(self, name)}")
        if self.http_responses_bytes < 0:
            raise ValueError(f"--http-responses-bytes must be >= 0, not {self.http_responses_bytes}")
        if self.http_body_bytes > self.http_bodies_bytes * 3 // 4:
            raise ValueError(
                f"--http-body-bytes {self.http_body_bytes} is more than three quarters of --http-bodies-bytes "
                f"{self.http_bodies_bytes}, which is what large bodies share: one so large would never be read. Set "
                f"--http-bodies-bytes {-(-self.http_body_bytes * 4 // 3)} or more, or --http-body-bytes "
                f"{self.http_bodies_bytes * 3 // 4} or less"
            )
        for name in (
            "prefill_timeout_s",
            "client_stall_s",
            "peer_timeout_s",
            "scheduler_wait_s",
            "detokenizer_wait_s",
            "tokenizer_wait_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be > 0, not {getattr(self, name)}")


def _check_addresses(name: str, addresses: Sequence[str]) -> None:
    for address in addresses:
        try:
            parse_address(address)
        except MeshError as error:
            raise ValueError(f"--{name}: {error}") from None
