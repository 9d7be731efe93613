from radixmesh.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SchedulerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULER_ROLE_UNSPECIFIED: _ClassVar[SchedulerRole]
    SCHEDULER_ROLE_PREFILL: _ClassVar[SchedulerRole]
    SCHEDULER_ROLE_DECODE: _ClassVar[SchedulerRole]

class AbortOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_OUTCOME_UNSPECIFIED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_FOUND: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_FINISHED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_UNKNOWN: _ClassVar[AbortOutcome]

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_CONNECTING: _ClassVar[GroupState]
    GROUP_STATE_ADOPTING: _ClassVar[GroupState]
    GROUP_STATE_SERVING: _ClassVar[GroupState]
    GROUP_STATE_STANDBY: _ClassVar[GroupState]

class CacheTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_TIER_UNSPECIFIED: _ClassVar[CacheTier]
    CACHE_TIER_HOST: _ClassVar[CacheTier]
    CACHE_TIER_STORE: _ClassVar[CacheTier]
SCHEDULER_ROLE_UNSPECIFIED: SchedulerRole
SCHEDULER_ROLE_PREFILL: SchedulerRole
SCHEDULER_ROLE_DECODE: SchedulerRole
ABORT_OUTCOME_UNSPECIFIED: AbortOutcome
ABORT_OUTCOME_FOUND: AbortOutcome
ABORT_OUTCOME_FINISHED: AbortOutcome
ABORT_OUTCOME_UNKNOWN: AbortOutcome
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_CONNECTING: GroupState
GROUP_STATE_ADOPTING: GroupState
GROUP_STATE_SERVING: GroupState
GROUP_STATE_STANDBY: GroupState
CACHE_TIER_UNSPECIFIED: CacheTier
CACHE_TIER_HOST: CacheTier
CACHE_TIER_STORE: CacheTier

class ServeRequest(_message.Message):
    __slots__ = ("hello", "submits", "stops", "aborts", "reservations", "kv_targets")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    KV_TARGETS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    stops: _containers.RepeatedCompositeFieldContainer[FinishedByStop]
    aborts: _containers.RepeatedCompositeFieldContainer[Abort]
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    kv_targets: _containers.RepeatedCompositeFieldContainer[TransferTarget]
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., stops: _Optional[_Iterable[_Union[FinishedByStop, _Mapping]]] = ..., aborts: _Optional[_Iterable[_Union[Abort, _Mapping]]] = ..., reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ..., kv_targets: _Optional[_Iterable[_Union[TransferTarget, _Mapping]]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "request_id", "index", "attempt", "sequence", "model", "task", "prompt_ids", "resumed_output_ids", "sampling", "stop", "logprobs_start", "cache_salt", "priority", "deadline_ms", "tenant", "grammar_hash", "blobs", "transfer_id", "embeddings", "send_kv_to", "trace_context", "shares_with")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    SEND_KV_TO_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SHARES_WITH_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    index: int
    attempt: int
    sequence: int
    model: str
    task: _common_pb2.Task
    prompt_ids: bytes
    resumed_output_ids: bytes
    sampling: _common_pb2.SamplingParams
    stop: _common_pb2.StopParams
    logprobs_start: int
    cache_salt: str
    priority: int
    deadline_ms: int
    tenant: str
    grammar_hash: str
    blobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.Blob]
    transfer_id: str
    embeddings: _containers.RepeatedCompositeFieldContainer[_common_pb2.EmbeddingSpan]
    send_kv_to: TransferTarget
    trace_context: str
    shares_with: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., index: _Optional[int] = ..., attempt: _Optional[int] = ..., sequence: _Optional[int] = ..., model: _Optional[str] = ..., task: _Optional[_Union[_common_pb2.Task, str]] = ..., prompt_ids: _Optional[bytes] = ..., resumed_output_ids: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopParams, _Mapping]] = ..., logprobs_start: _Optional[int] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., grammar_hash: _Optional[str] = ..., blobs: _Optional[_Iterable[_Union[_common_pb2.Blob, _Mapping]]] = ..., transfer_id: _Optional[str] = ..., embeddings: _Optional[_Iterable[_Union[_common_pb2.EmbeddingSpan, _Mapping]]] = ..., send_kv_to: _Optional[_Union[TransferTarget, _Mapping]] = ..., trace_context: _Optional[str] = ..., shares_with: _Optional[int] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("transfer_id", "lease_ms", "prompt_ids", "model", "cache_salt", "is_cancelled", "granule", "kv_heads")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    IS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    GRANULE_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    lease_ms: int
    prompt_ids: bytes
    model: str
    cache_salt: str
    is_cancelled: bool
    granule: int
    kv_heads: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., model: _Optional[str] = ..., cache_salt: _Optional[str] = ..., is_cancelled: bool = ..., granule: _Optional[int] = ..., kv_heads: _Optional[bytes] = ...) -> None: ...

class ReservationResult(_message.Message):
    __slots__ = ("target", "transfer_id", "error")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    target: TransferTarget
    transfer_id: str
    error: _common_pb2.Error
    def __init__(self, target: _Optional[_Union[TransferTarget, _Mapping]] = ..., transfer_id: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class TransferTarget(_message.Message):
    __slots__ = ("transfer_id", "regions", "addresses", "first_token", "num_tokens", "tokens_digest")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    regions: _containers.RepeatedScalarFieldContainer[bytes]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    first_token: int
    num_tokens: int
    tokens_digest: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., regions: _Optional[_Iterable[bytes]] = ..., addresses: _Optional[_Iterable[str]] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tokens_digest: _Optional[bytes] = ...) -> None: ...

class FinishedByStop(_message.Message):
    __slots__ = ("handle", "num_output")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    num_output: int
    def __init__(self, handle: _Optional[int] = ..., num_output: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("abort_id", "request_id", "index", "below_attempt", "tenant", "is_own")
    ABORT_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BELOW_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    IS_OWN_FIELD_NUMBER: _ClassVar[int]
    abort_id: int
    request_id: str
    index: int
    below_attempt: int
    tenant: str
    is_own: bool
    def __init__(self, abort_id: _Optional[int] = ..., request_id: _Optional[str] = ..., index: _Optional[int] = ..., below_attempt: _Optional[int] = ..., tenant: _Optional[str] = ..., is_own: bool = ...) -> None: ...

class ServeResponse(_message.Message):
    __slots__ = ("hello", "tokens", "prompt_logprobs", "vectors", "finished", "rejected", "abort_results", "load", "reservation_results")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    ABORT_RESULTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_RESULTS_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    tokens: TokenBatch
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    vectors: _containers.RepeatedCompositeFieldContainer[OutputVector]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    rejected: _containers.RepeatedCompositeFieldContainer[Rejected]
    abort_results: _containers.RepeatedCompositeFieldContainer[AbortResult]
    load: Load
    reservation_results: _containers.RepeatedCompositeFieldContainer[ReservationResult]
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., tokens: _Optional[_Union[TokenBatch, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., vectors: _Optional[_Iterable[_Union[OutputVector, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Rejected, _Mapping]]] = ..., abort_results: _Optional[_Iterable[_Union[AbortResult, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., reservation_results: _Optional[_Iterable[_Union[ReservationResult, _Mapping]]] = ...) -> None: ...

class SchedulerHello(_message.Message):
    __slots__ = ("hello", "adapters", "page_size", "num_pages", "role", "kv_heads", "takes_kv_targets")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    TAKES_KV_TARGETS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    adapters: _containers.RepeatedScalarFieldContainer[str]
    page_size: int
    num_pages: int
    role: SchedulerRole
    kv_heads: bytes
    takes_kv_targets: bool
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., adapters: _Optional[_Iterable[str]] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., role: _Optional[_Union[SchedulerRole, str]] = ..., kv_heads: _Optional[bytes] = ..., takes_kv_targets: bool = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("handles", "attempts", "first_output_indexes", "counts", "ids", "logprobs", "weights_version")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    attempts: bytes
    first_output_indexes: bytes
    counts: bytes
    ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[RowLogprobs]
    weights_version: int
    def __init__(self, handles: _Optional[bytes] = ..., attempts: _Optional[bytes] = ..., first_output_indexes: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[RowLogprobs, _Mapping]]] = ..., weights_version: _Optional[int] = ...) -> None: ...

class RowLogprobs(_message.Message):
    __slots__ = ("row", "logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    logprobs: _common_pb2.Logprobs
    def __init__(self, row: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("handle", "first_position", "logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first_position: int
    logprobs: _common_pb2.Logprobs
    def __init__(self, handle: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class OutputVector(_message.Message):
    __slots__ = ("handle", "values")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    values: bytes
    def __init__(self, handle: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "attempt", "reason", "num_output", "stop_id", "usage", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STOP_ID_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    reason: _common_pb2.FinishReason
    num_output: int
    stop_id: int
    usage: _common_pb2.Usage
    error: _common_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_output: _Optional[int] = ..., stop_id: _Optional[int] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("handle", "attempt", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    error: _common_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class AbortResult(_message.Message):
    __slots__ = ("abort_id", "outcome")
    ABORT_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    abort_id: int
    outcome: AbortOutcome
    def __init__(self, abort_id: _Optional[int] = ..., outcome: _Optional[_Union[AbortOutcome, str]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("submit_sequence", "num_running", "num_waiting", "waiting_tokens", "total_pages", "free_pages", "cached_pages", "hit_rate", "group", "is_draining", "epoch", "num_slots", "ranks", "is_leaving", "role", "host_load_cost", "token_us", "store_load_cost")
    SUBMIT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_LOAD_COST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    STORE_LOAD_COST_FIELD_NUMBER: _ClassVar[int]
    submit_sequence: int
    num_running: int
    num_waiting: int
    waiting_tokens: int
    total_pages: int
    free_pages: int
    cached_pages: int
    hit_rate: float
    group: GroupState
    is_draining: bool
    epoch: int
    num_slots: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankLoad]
    is_leaving: bool
    role: SchedulerRole
    host_load_cost: float
    token_us: float
    store_load_cost: float
    def __init__(self, submit_sequence: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., hit_rate: _Optional[float] = ..., group: _Optional[_Union[GroupState, str]] = ..., is_draining: bool = ..., epoch: _Optional[int] = ..., num_slots: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., is_leaving: bool = ..., role: _Optional[_Union[SchedulerRole, str]] = ..., host_load_cost: _Optional[float] = ..., token_us: _Optional[float] = ..., store_load_cost: _Optional[float] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("dp_rank", "num_running", "free_pages", "cached_pages")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    num_running: int
    free_pages: int
    cached_pages: int
    def __init__(self, dp_rank: _Optional[int] = ..., num_running: _Optional[int] = ..., free_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ("after_revision", "takes_store_tier")
    AFTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    TAKES_STORE_TIER_FIELD_NUMBER: _ClassVar[int]
    after_revision: int
    takes_store_tier: bool
    def __init__(self, after_revision: _Optional[int] = ..., takes_store_tier: bool = ...) -> None: ...

class WatchCacheResponse(_message.Message):
    __slots__ = ("revision", "inserts", "evicted_nodes", "is_snapshot", "is_reset", "splits", "trims", "weights_digest", "store_id")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    INSERTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_NODES_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    IS_RESET_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    TRIMS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    revision: int
    inserts: _containers.RepeatedCompositeFieldContainer[CacheInsert]
    evicted_nodes: bytes
    is_snapshot: bool
    is_reset: bool
    splits: _containers.RepeatedCompositeFieldContainer[CacheSplit]
    trims: _containers.RepeatedCompositeFieldContainer[CacheTrim]
    weights_digest: str
    store_id: str
    def __init__(self, revision: _Optional[int] = ..., inserts: _Optional[_Iterable[_Union[CacheInsert, _Mapping]]] = ..., evicted_nodes: _Optional[bytes] = ..., is_snapshot: bool = ..., is_reset: bool = ..., splits: _Optional[_Iterable[_Union[CacheSplit, _Mapping]]] = ..., trims: _Optional[_Iterable[_Union[CacheTrim, _Mapping]]] = ..., weights_digest: _Optional[str] = ..., store_id: _Optional[str] = ...) -> None: ...

class CacheInsert(_message.Message):
    __slots__ = ("node", "parent", "ids", "cache_namespace", "weights_version", "adapter", "salt", "dp_rank", "tier")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    node: int
    parent: int
    ids: bytes
    cache_namespace: str
    weights_version: int
    adapter: str
    salt: str
    dp_rank: int
    tier: CacheTier
    def __init__(self, node: _Optional[int] = ..., parent: _Optional[int] = ..., ids: _Optional[bytes] = ..., cache_namespace: _Optional[str] = ..., weights_version: _Optional[int] = ..., adapter: _Optional[str] = ..., salt: _Optional[str] = ..., dp_rank: _Optional[int] = ..., tier: _Optional[_Union[CacheTier, str]] = ...) -> None: ...

class CacheSplit(_message.Message):
    __slots__ = ("node", "upper", "num_upper")
    NODE_FIELD_NUMBER: _ClassVar[int]
    UPPER_FIELD_NUMBER: _ClassVar[int]
    NUM_UPPER_FIELD_NUMBER: _ClassVar[int]
    node: int
    upper: int
    num_upper: int
    def __init__(self, node: _Optional[int] = ..., upper: _Optional[int] = ..., num_upper: _Optional[int] = ...) -> None: ...

class CacheTrim(_message.Message):
    __slots__ = ("node", "num_left")
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    node: int
    num_left: int
    def __init__(self, node: _Optional[int] = ..., num_left: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_remaining",)
    NUM_REMAINING_FIELD_NUMBER: _ClassVar[int]
    num_remaining: int
    def __init__(self, num_remaining: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: SchedulerRole
    def __init__(self, role: _Optional[_Union[SchedulerRole, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("previous", "num_remaining")
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    NUM_REMAINING_FIELD_NUMBER: _ClassVar[int]
    previous: SchedulerRole
    num_remaining: int
    def __init__(self, previous: _Optional[_Union[SchedulerRole, str]] = ..., num_remaining: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("flushed_pages",)
    FLUSHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    flushed_pages: int
    def __init__(self, flushed_pages: _Optional[int] = ...) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateResponse(_message.Message):
    __slots__ = ("hello", "load", "depth", "num_steps", "owned_pages", "leased_pages", "quarantined_pages", "num_page_violations", "num_retractions", "adopted_tokens", "prefilled_tokens", "prompt_cached_tokens", "num_routers", "num_preemptions", "num_prefix_deduplications", "evicted_pages", "decode_reserve_tokens", "cache_revision", "expert_balancedness", "num_expert_placements", "num_kv_arrived", "num_kv_failed", "num_kv_handed_over", "num_kv_arriving")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    OWNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    LEASED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGE_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_DEDUPLICATIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_RESERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_REVISION_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BALANCEDNESS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERT_PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_FAILED_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_ARRIVING_FIELD_NUMBER: _ClassVar[int]
    hello: SchedulerHello
    load: Load
    depth: int
    num_steps: int
    owned_pages: int
    leased_pages: int
    quarantined_pages: int
    num_page_violations: int
    num_retractions: int
    adopted_tokens: int
    prefilled_tokens: int
    prompt_cached_tokens: int
    num_routers: int
    num_preemptions: int
    num_prefix_deduplications: int
    evicted_pages: int
    decode_reserve_tokens: int
    cache_revision: int
    expert_balancedness: float
    num_expert_placements: int
    num_kv_arrived: int
    num_kv_failed: int
    num_kv_handed_over: int
    num_kv_arriving: int
    def __init__(self, hello: _Optional[_Union[SchedulerHello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., depth: _Optional[int] = ..., num_steps: _Optional[int] = ..., owned_pages: _Optional[int] = ..., leased_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., num_page_violations: _Optional[int] = ..., num_retractions: _Optional[int] = ..., adopted_tokens: _Optional[int] = ..., prefilled_tokens: _Optional[int] = ..., prompt_cached_tokens: _Optional[int] = ..., num_routers: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_prefix_deduplications: _Optional[int] = ..., evicted_pages: _Optional[int] = ..., decode_reserve_tokens: _Optional[int] = ..., cache_revision: _Optional[int] = ..., expert_balancedness: _Optional[float] = ..., num_expert_placements: _Optional[int] = ..., num_kv_arrived: _Optional[int] = ..., num_kv_failed: _Optional[int] = ..., num_kv_handed_over: _Optional[int] = ..., num_kv_arriving: _Optional[int] = ...) -> None: ...
