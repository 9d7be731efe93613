"""Every metric of the mesh, by name, unit, help and who serves it. docs/observability.md has the same as a table.

Names start with radixmesh_; units are in the names (seconds, bytes, tokens). One registry a daemon, so that several can
live in one process.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.metric_maker import MetricInfo, MetricMaker

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_S = (0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_STEP_S = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_HOST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
_GRAMMAR_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_ALL = "all"


class Metrics:
    """The metrics of one daemon. daemon: its name; only what concerns it is served. Empty = everything is."""

    def __init__(self, daemon: str = "") -> None:
        make = MetricMaker(daemon)
        self.registry: CollectorRegistry = make.registry
        self._make_request_metrics(make)
        self._make_latency_metrics(make)
        self._make_queue_metrics(make)
        self._make_step_metrics(make)
        self._make_cache_metrics(make)
        self._make_tier_metrics(make)
        self._make_expert_metrics(make)
        self._make_transfer_metrics(make)
        self.errors = make.counter("radixmesh_errors_total", _ALL, "Typed errors that left this daemon.", ["reason"])
        self.tasks = make.gauge("radixmesh_tasks", _ALL, "Asyncio tasks that are not done.")
        self.restarts = make.counter(
            "radixmesh_restarts_total",
            "scheduler",
            "Peers that were lost and replaced or reconnected, by kind of peer.",
            ["peer"],
        )
        self.infos: tuple[MetricInfo, ...] = tuple(make.infos)

    def count_error(self, error: MeshError) -> None:
        """Counts an error that leaves this daemon."""
        self.errors.labels(error.reason_name).inc()

    def _make_request_metrics(self, make: MetricMaker) -> None:
        both = "router scheduler"
        self.requests_started = make.counter(
            "radixmesh_requests_started_total", both, "Requests accepted; a scheduler counts each output."
        )
        self.requests_finished = make.counter(
            "radixmesh_requests_finished_total", both, "Outputs that ended, by finish reason.", ["reason"]
        )
        self.requests_running = make.gauge(
            "radixmesh_requests_running", both, "Requests in the journal (router), outputs with a slot (scheduler)."
        )
        self.requests_queued = make.gauge(
            "radixmesh_requests_queued", both, "Outputs that wait for a scheduler (router) or a slot (scheduler)."
        )
        self.requests_resumed = make.counter(
            "radixmesh_requests_resumed_total", "router", "Attempts after the first: replays after a loss."
        )
        self.moved_outputs = make.counter(
            "radixmesh_moved_outputs_total",
            "router",
            "Running outputs moved: overload, drain, operator, group (theirs does not serve).",
            ["reason"],
        )
        for reason in ("overload", "drain", "operator", "group"):
            # A series that begins with its first event has no rate for it.
            self.moved_outputs.labels(reason)
        self.routing_decisions = make.counter(
            "radixmesh_routing_decisions_total",
            "router",
            "Outputs placed: cached (longest prefix there), spread (another has it), new (none has).",
            ["reason"],
        )
        self.routed_tokens = make.counter(
            "radixmesh_routed_tokens_total",
            "router",
            "Prompt tokens of those, by the router's view of the chosen cache.",
            ["known"],
        )
        self.prompt_tokens = make.counter("radixmesh_prompt_tokens_total", both, "Prompt tokens accepted.")
        self.output_tokens = make.counter(
            "radixmesh_output_tokens_total", both, "Output tokens, as they come from the daemon below."
        )
        self.journal_bytes = make.gauge("radixmesh_journal_bytes", "router", "Bytes that the request journal holds.")
        self.detokenizer_entries = make.gauge(
            "radixmesh_detokenizer_entries", "detokenizer", "Outputs that are open at this detokenizer."
        )
        self.encoded_tokens = make.counter(
            "radixmesh_encoded_tokens_total", "tokenizer", "Prompt tokens that texts and chats became."
        )
        self.detokenized_tokens = make.counter(
            "radixmesh_detokenized_tokens_total", "detokenizer", "Tokens that were decoded, replays included."
        )

    def _make_latency_metrics(self, make: MetricMaker) -> None:
        self.time_to_first_token_seconds = make.fast_histogram(
            "radixmesh_time_to_first_token_seconds",
            "router",
            "Arrival of a request to the first output token that its client can be sent.",
            _LATENCY_S,
            deprecated="radixmesh_first_token_seconds",
        )
        self.inter_token_latency_seconds = make.fast_histogram(
            "radixmesh_inter_token_latency_seconds",
            "router",
            "Time between two deltas of one output to its client.",
            _TOKEN_S,
            deprecated="radixmesh_inter_token_seconds",
        )
        self.e2e_request_latency_seconds = make.fast_histogram(
            "radixmesh_e2e_request_latency_seconds",
            "router",
            "Acceptance to the end of a request.",
            _LATENCY_S,
            deprecated="radixmesh_request_seconds",
        )
        self.hop_seconds = make.histogram(
            "radixmesh_hop_seconds",
            "router",
            "Wait for a peer: tokenizer (prompt to ids), scheduler (to first token), detokenizer (sampled).",
            _LATENCY_S,
            ["hop"],
        )
        self.queue_seconds = make.histogram(
            "radixmesh_queue_seconds", "scheduler", "Submit to slot, of requests that got one.", _LATENCY_S
        )
        self.router_queue_seconds = make.fast_histogram(
            "radixmesh_router_queue_seconds",
            "router",
            "Wait in the router's queue, of outputs that a scheduler then took.",
            _LATENCY_S,
        )
        self.prefill_seconds = make.histogram(
            "radixmesh_prefill_seconds", "scheduler", "Slot to first token of an output.", _LATENCY_S
        )
        self.grammar_compile_seconds = make.histogram(
            "radixmesh_grammar_compile_seconds",
            "tokenizer",
            "Time of one CompileGrammar call, by where the grammar came from.",
            _GRAMMAR_S,
            ["source"],
        )
        self.encode_seconds = make.histogram(
            "radixmesh_encode_seconds", "tokenizer", "Time of one Encode call, its wait for a thread included.", _STEP_S
        )
        self.detokenize_seconds = make.fast_histogram(
            "radixmesh_detokenize_seconds", "detokenizer", "Host time to decode the tokens of one frame.", _HOST_S
        )

    def _make_queue_metrics(self, make: MetricMaker) -> None:
        by = "scheduler"
        self.requests_retracted = make.counter(
            "radixmesh_requests_retracted_total", by, "Times a running request gave up its pages."
        )
        self.requests_preempted = make.counter(
            "radixmesh_requests_preempted_total", by, "Times a request gave way to a higher priority."
        )
        self.router_queue_bytes = make.gauge(
            "radixmesh_router_queue_bytes", "router", "Bytes of the requests that wait for a scheduler."
        )
        self.router_credits = make.gauge(
            "radixmesh_router_credits", "router", "Outputs sent to schedulers whose loads do not include them yet."
        )
        self.local_encodes = make.counter(
            "radixmesh_router_local_encodes_total",
            "router",
            "Prompts that the router encoded itself, with --tokenizer-path.",
        )
        self.local_outputs = make.gauge(
            "radixmesh_router_local_outputs", "router", "Outputs that the router decodes itself, with --tokenizer-path."
        )
        self.router_imbalance = make.gauge(
            "radixmesh_router_imbalance",
            "router",
            "Tokens that wait for prefill at the scheduler with most of them, to the mean; 0 = none wait.",
        )
        self.router_queue_refused = make.counter(
            "radixmesh_router_queue_refused_total",
            "router",
            "Requests refused for want of room in the queue: full, bytes, tenant.",
            ["reason"],
        )
        for reason in ("full", "bytes", "tenant"):
            self.router_queue_refused.labels(reason)
        self.requests_rejected = make.counter("radixmesh_requests_rejected_total", by, "Submits that were rejected.")
        self.requests_waiting_for_prefix = make.gauge(
            "radixmesh_requests_waiting_for_prefix",
            by,
            "Requests that wait for a prefix which another computes.",
            deprecated="radixmesh_requests_held",
        )
        self.prefix_deduplications = make.counter(
            "radixmesh_prefix_deduplications_total",
            by,
            "Times a request waited for a prefix that another computed, instead of computing it too.",
            deprecated="radixmesh_requests_held_back_total",
        )
        self.prefills_held = make.counter(
            "radixmesh_prefills_held_total",
            by,
            "Steps that admitted nobody, so that prompts of several data-parallel ranks begin together.",
        )
        self.queued_tokens = make.gauge("radixmesh_queued_tokens", by, "Tokens of requests that wait.")
        self.decode_reserve_tokens = make.gauge(
            "radixmesh_decode_reserve_tokens",
            by,
            "Tokens for which admission keeps pages free, per running request.",
            deprecated="radixmesh_expected_growth_tokens",
        )

    def _make_step_metrics(self, make: MetricMaker) -> None:
        both = "scheduler worker"
        self.steps = make.counter("radixmesh_steps_total", both, "Steps completed.")
        self.step_tokens = make.counter(
            "radixmesh_step_tokens_total", "scheduler", "Tokens that steps computed: prefill or decode.", ["kind"]
        )
        self.drafted_tokens = make.counter(
            "radixmesh_drafted_tokens_total",
            "scheduler",
            "Drafted tokens that steps verified, by their number in the row.",
            ["position"],
        )
        self.accepted_draft_tokens = make.counter(
            "radixmesh_accepted_draft_tokens_total",
            "scheduler",
            "Of these, tokens that sampling confirmed; the others were wasted.",
            ["position"],
        )
        self.draft_seconds = make.counter(
            "radixmesh_draft_seconds_total",
            "worker",
            "Part of the device time that went to proposing drafts; 0 where captured steps of a GPU propose them.",
        )
        self.step_seconds = make.histogram("radixmesh_step_seconds", both, "Device time of a step.", _STEP_S)
        self.device_busy_seconds = make.counter(
            "radixmesh_device_busy_seconds_total", both, "Device time of all steps: 1 - its rate is the idle share."
        )
        self.gpu_idle_ratio = make.gauge(
            "radixmesh_gpu_idle_ratio",
            "scheduler",
            "Share of the last half second in which the worker's device, GPU or not, ran no step.",
        )
        self.tokens_per_second = make.gauge(
            "radixmesh_tokens_per_second", "scheduler", "Output tokens a second, of the last half second."
        )
        self.round_trip_seconds = make.histogram(
            "radixmesh_step_round_trip_seconds",
            "scheduler",
            "Plan sent to result in, the wait behind plans before it included.",
            _STEP_S,
        )
        self.plan_seconds = make.histogram("radixmesh_plan_seconds", "scheduler", "Host time to plan a step.", _HOST_S)
        self.process_seconds = make.histogram(
            "radixmesh_process_seconds", "scheduler", "Host time to process a step's result.", _HOST_S
        )
        self.batch_size = make.histogram("radixmesh_batch_size", both, "Rows of a step's result.", _BATCH)
        self.plans_in_flight = make.gauge("radixmesh_plans_in_flight", both, "Plans sent and not answered.")
        self.epoch = make.gauge("radixmesh_epoch", both, "Epoch that this daemon holds or serves.")
        self.refusals = make.counter(
            "radixmesh_refusals_total",
            both,
            "Plans refused (worker) and epochs lost (scheduler), by reason.",
            ["reason"],
        )
        self.stale_results = make.counter(
            "radixmesh_stale_results_total", "scheduler", "Results of plans that counted no more."
        )

    def _make_cache_metrics(self, make: MetricMaker) -> None:
        by = "scheduler"
        self.cached_tokens = make.counter(
            "radixmesh_cached_tokens_total", by, "Tokens whose KV was found in the cache at admission."
        )
        self.cache_hit_ratio = make.gauge(
            "radixmesh_cache_hit_ratio", by, "Share of tokens found in the cache at late admissions."
        )
        self.pages = make.gauge(
            "radixmesh_pages",
            by,
            "KV pages by state: free, cached, owned, leased, loading, quarantined.",
            ["state"],
        )
        self.page_evictions = make.counter("radixmesh_page_evictions_total", by, "Cached pages evicted.")
        self.page_invariant_violations = make.counter(
            "radixmesh_page_invariant_violations_total",
            by,
            "Steps after which the states of the KV pages were inconsistent.",
            deprecated="radixmesh_page_breaches_total",
        )
        self.kv_usage_ratio = make.gauge(
            "radixmesh_kv_usage_ratio",
            by,
            "Share of KV pages that could not be granted now: neither free nor evictable.",
        )

    def _make_tier_metrics(self, make: MetricMaker) -> None:
        by = "scheduler"
        self.host_kv_pages = make.gauge(
            "radixmesh_host_kv_pages", by, "Pages of the workers' host memory that hold KV, of all data-parallel ranks."
        )
        self.host_kv_pages_moved = make.counter(
            "radixmesh_host_kv_pages_moved_total",
            by,
            "KV pages saved to host memory, loaded from it, evicted there, or skipped (no room).",
            ["move"],
        )
        for move in ("saved", "loaded", "evicted", "skipped"):
            self.host_kv_pages_moved.labels(move)
        self.host_kv_loads = make.counter(
            "radixmesh_host_kv_loads_total",
            by,
            "Prefixes loaded from host memory, and late ones (requests that computed theirs).",
            ["outcome"],
        )
        for outcome in ("loaded", "late"):
            self.host_kv_loads.labels(outcome)
        self.host_kv_tokens = make.counter(
            "radixmesh_host_kv_tokens_total", by, "Tokens whose KV was loaded from host memory for waiting requests."
        )
        self.host_kv_load_seconds = make.counter(
            "radixmesh_host_kv_load_seconds_total", by, "Seconds from the plan of a load to its completion, of all."
        )
        self.host_kv_bytes = make.counter(
            "radixmesh_host_kv_bytes_total",
            "worker",
            "Bytes of KV copied between device and host memory, by move: saved or loaded.",
            ["move"],
        )
        for move in ("saved", "loaded"):
            self.host_kv_bytes.labels(move)
        self.kv_fetches = make.counter(
            "radixmesh_kv_fetches_total",
            by,
            "Fetches from the store of KV: fetched (some pages), empty, and late requests.",
            ["outcome"],
        )
        for outcome in ("fetched", "empty", "late"):
            self.kv_fetches.labels(outcome)
        self.kv_fetch_tokens = make.counter(
            "radixmesh_kv_fetch_tokens_total", by, "Tokens whose KV came from the workers' store to host memory."
        )
        self.kv_fetch_seconds = make.counter(
            "radixmesh_kv_fetch_seconds_total", by, "Seconds from the wish of a fetch to its answer, of all."
        )

    def _make_expert_metrics(self, make: MetricMaker) -> None:
        by = "scheduler"
        self.expert_balancedness = make.gauge(
            "radixmesh_expert_balancedness",
            by,
            "Mean over most of the rows that the ranks' experts computed lately; 0: no experts are shared.",
        )
        self.expert_placement_balancedness = make.gauge(
            "radixmesh_expert_placement_balancedness",
            by,
            "Mean over most of the ranks' work by layer, as placed; 0: not known.",
        )
        self.expert_placements = make.counter(
            "radixmesh_expert_placements_total", by, "Placements of a layer's experts that took effect while serving."
        )
        self.expert_move_longest_seconds = make.gauge(
            "radixmesh_expert_move_longest_seconds", by, "Longest time that a step was given to moving experts."
        )

    def _make_transfer_metrics(self, make: MetricMaker) -> None:
        by = "scheduler"
        self.kv_transfers = make.counter(
            "radixmesh_kv_transfers_total",
            by,
            "KV transfers by outcome: handed_over (prefill side), arrived or failed (decode side).",
            ["outcome"],
        )
        for outcome in ("handed_over", "arrived", "failed"):
            self.kv_transfers.labels(outcome)
        self.kv_arrival_failures = make.counter(
            "radixmesh_kv_arrival_failures_total",
            by,
            "KV transfers that brought nothing, by reason; cached: none was needed.",
            ["reason"],
        )
        for reason in ("queue", "pages", "stalled", "lease", "left", "cancelled", "refused", "commit"):
            self.kv_arrival_failures.labels(reason)
        self.kv_arrival_seconds = make.counter(
            "radixmesh_kv_arrival_seconds_total",
            by,
            "Time of KV transfers by stage: queue (for room), prefill (until written), commit.",
            ["stage"],
        )
        for stage in ("queue", "prefill", "commit"):
            self.kv_arrival_seconds.labels(stage)
        self.kv_reservations_queued = make.gauge(
            "radixmesh_kv_reservations_queued",
            by,
            "Prompts that wait for pages, a slot or staging before their KV is computed elsewhere.",
        )
        self.remote_first_tokens = make.counter(
            "radixmesh_remote_first_tokens_total",
            "router",
            "Outputs that went on behind a first token from another group.",
        )
        self.kv_transfer_tokens = make.counter(
            "radixmesh_kv_transfer_tokens_total", by, "Tokens whose KV was taken from another group."
        )
        self.kv_transfer_bytes = make.counter(
            "radixmesh_kv_transfer_bytes_total",
            "worker",
            "KV by stage: gather, send (prefill side), receive, scatter, hand_over (decode side).",
            ["stage"],
        )
        self.kv_transfer_seconds = make.histogram(
            "radixmesh_kv_transfer_seconds",
            "worker",
            "Time of a stage of a KV transfer; hand_over: from its last gather to validated KV.",
            _LATENCY_S,
            ["stage"],
        )
        self.kv_transfer_failures = make.counter(
            "radixmesh_kv_transfer_failures_total",
            "worker",
            "KV transfers that failed at this end, by reason; not_sent: at the sending end.",
            ["reason"],
        )
        self.kv_transfer_fallbacks = make.counter(
            "radixmesh_kv_transfer_fallbacks_total",
            "worker",
            "KV transfers sent over gRPC though --transfer-transport is nixl: the log says why.",
        )
        for stage in ("gather", "send", "receive", "scatter", "hand_over"):
            self.kv_transfer_bytes.labels(stage)
            self.kv_transfer_seconds.labels(stage)
        for reason in ("not_sent", "lease_expired", "writer_gone", "checksum", "stamp", "pages", "aborted"):
            self.kv_transfer_failures.labels(reason)
        self.kv_quarantined_bytes = make.gauge(
            "radixmesh_kv_quarantined_bytes",
            "worker",
            "Staging of failed transfers that may still be written to.",
        )
        self.kv_store_pages = make.counter(
            "radixmesh_kv_store_pages_total",
            "worker",
            "KV pages of the store: reads (hit, miss, corrupt, failed), put, dropped, evicted.",
            ["outcome"],
        )
        for outcome in ("hit", "miss", "corrupt", "failed", "put", "dropped", "evicted"):
            self.kv_store_pages.labels(outcome)
        self.kv_store_bytes = make.counter(
            "radixmesh_kv_store_bytes_total",
            "worker",
            "Bytes of the KV store: put and read (payload), written (with heads and rewrites).",
            ["kind"],
        )
        self.kv_staging_bytes = make.gauge(
            "radixmesh_kv_staging_bytes", "worker", "Bytes of KV transfers that are on their way, or quarantined."
        )
        self.readopted_tokens = make.counter(
            "radixmesh_readopted_tokens_total", by, "Tokens of KV taken over from a worker at a new epoch."
        )
