from radixmesh.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PredecessorEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREDECESSOR_END_UNSPECIFIED: _ClassVar[PredecessorEnd]
    PREDECESSOR_END_BY_ITSELF: _ClassVar[PredecessorEnd]
    PREDECESSOR_END_FROM_OUTSIDE: _ClassVar[PredecessorEnd]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_LOADING: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_FAILED: _ClassVar[WorkerState]

class ForwardMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORWARD_MODE_UNSPECIFIED: _ClassVar[ForwardMode]
    FORWARD_MODE_EXTEND: _ClassVar[ForwardMode]
    FORWARD_MODE_DECODE: _ClassVar[ForwardMode]
    FORWARD_MODE_MIXED: _ClassVar[ForwardMode]
    FORWARD_MODE_IDLE: _ClassVar[ForwardMode]

class ExpertDispatch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPERT_DISPATCH_UNSPECIFIED: _ClassVar[ExpertDispatch]
    EXPERT_DISPATCH_NORMAL: _ClassVar[ExpertDispatch]
    EXPERT_DISPATCH_LOW_LATENCY: _ClassVar[ExpertDispatch]

class NoTokenReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NO_TOKEN_REASON_UNSPECIFIED: _ClassVar[NoTokenReason]
    NO_TOKEN_REASON_NO_ROOM: _ClassVar[NoTokenReason]
    NO_TOKEN_REASON_NO_MASK: _ClassVar[NoTokenReason]
    NO_TOKEN_REASON_SLOT_ERROR: _ClassVar[NoTokenReason]

class KvTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_UNSPECIFIED: _ClassVar[KvTier]
    KV_TIER_HOST: _ClassVar[KvTier]

class ProfileAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROFILE_ACTION_UNSPECIFIED: _ClassVar[ProfileAction]
    PROFILE_ACTION_START: _ClassVar[ProfileAction]
    PROFILE_ACTION_STOP: _ClassVar[ProfileAction]

class TransferLastWord(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_LAST_WORD_UNSPECIFIED: _ClassVar[TransferLastWord]
    TRANSFER_LAST_WORD_DONE: _ClassVar[TransferLastWord]
    TRANSFER_LAST_WORD_ABORTED: _ClassVar[TransferLastWord]

class TransferFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_FAILURE_UNSPECIFIED: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_LEASE_EXPIRED: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_WRITER_GONE: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_WRITER_ABORTED: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_BAD_WRITE: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_CHECKSUM: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_STAMP: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_EPOCH_ENDED: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_PAGES: _ClassVar[TransferFailure]
    TRANSFER_FAILURE_ABORTED: _ClassVar[TransferFailure]

class TransferState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_STATE_UNSPECIFIED: _ClassVar[TransferState]
    TRANSFER_STATE_PREPARED: _ClassVar[TransferState]
    TRANSFER_STATE_WRITING: _ClassVar[TransferState]
    TRANSFER_STATE_WRITTEN: _ClassVar[TransferState]
    TRANSFER_STATE_VALIDATED: _ClassVar[TransferState]
    TRANSFER_STATE_ABORTED: _ClassVar[TransferState]
    TRANSFER_STATE_FAILED: _ClassVar[TransferState]
    TRANSFER_STATE_SCATTERING: _ClassVar[TransferState]
PREDECESSOR_END_UNSPECIFIED: PredecessorEnd
PREDECESSOR_END_BY_ITSELF: PredecessorEnd
PREDECESSOR_END_FROM_OUTSIDE: PredecessorEnd
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_LOADING: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_FAILED: WorkerState
FORWARD_MODE_UNSPECIFIED: ForwardMode
FORWARD_MODE_EXTEND: ForwardMode
FORWARD_MODE_DECODE: ForwardMode
FORWARD_MODE_MIXED: ForwardMode
FORWARD_MODE_IDLE: ForwardMode
EXPERT_DISPATCH_UNSPECIFIED: ExpertDispatch
EXPERT_DISPATCH_NORMAL: ExpertDispatch
EXPERT_DISPATCH_LOW_LATENCY: ExpertDispatch
NO_TOKEN_REASON_UNSPECIFIED: NoTokenReason
NO_TOKEN_REASON_NO_ROOM: NoTokenReason
NO_TOKEN_REASON_NO_MASK: NoTokenReason
NO_TOKEN_REASON_SLOT_ERROR: NoTokenReason
KV_TIER_UNSPECIFIED: KvTier
KV_TIER_HOST: KvTier
PROFILE_ACTION_UNSPECIFIED: ProfileAction
PROFILE_ACTION_START: ProfileAction
PROFILE_ACTION_STOP: ProfileAction
TRANSFER_LAST_WORD_UNSPECIFIED: TransferLastWord
TRANSFER_LAST_WORD_DONE: TransferLastWord
TRANSFER_LAST_WORD_ABORTED: TransferLastWord
TRANSFER_FAILURE_UNSPECIFIED: TransferFailure
TRANSFER_FAILURE_LEASE_EXPIRED: TransferFailure
TRANSFER_FAILURE_WRITER_GONE: TransferFailure
TRANSFER_FAILURE_WRITER_ABORTED: TransferFailure
TRANSFER_FAILURE_BAD_WRITE: TransferFailure
TRANSFER_FAILURE_CHECKSUM: TransferFailure
TRANSFER_FAILURE_STAMP: TransferFailure
TRANSFER_FAILURE_EPOCH_ENDED: TransferFailure
TRANSFER_FAILURE_PAGES: TransferFailure
TRANSFER_FAILURE_ABORTED: TransferFailure
TRANSFER_STATE_UNSPECIFIED: TransferState
TRANSFER_STATE_PREPARED: TransferState
TRANSFER_STATE_WRITING: TransferState
TRANSFER_STATE_WRITTEN: TransferState
TRANSFER_STATE_VALIDATED: TransferState
TRANSFER_STATE_ABORTED: TransferState
TRANSFER_STATE_FAILED: TransferState
TRANSFER_STATE_SCATTERING: TransferState

class ExecuteRequest(_message.Message):
    __slots__ = ("hello", "complete", "claim", "plan", "fence", "alive", "more_plans")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    MORE_PLANS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    complete: bytes
    claim: Claim
    plan: StepPlan
    fence: Fence
    alive: Alive
    more_plans: _containers.RepeatedCompositeFieldContainer[StepPlan]
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., complete: _Optional[bytes] = ..., claim: _Optional[_Union[Claim, _Mapping]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., more_plans: _Optional[_Iterable[_Union[StepPlan, _Mapping]]] = ...) -> None: ...

class ExecuteResponse(_message.Message):
    __slots__ = ("hello", "claimed", "result", "refusal", "fenced", "more_results")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    MORE_RESULTS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    claimed: Claimed
    result: StepResult
    refusal: Refusal
    fenced: Fenced
    more_results: _containers.RepeatedCompositeFieldContainer[StepResult]
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., claimed: _Optional[_Union[Claimed, _Mapping]] = ..., result: _Optional[_Union[StepResult, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ..., more_results: _Optional[_Iterable[_Union[StepResult, _Mapping]]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("hello", "highest_epoch", "holder_instance_id", "is_holder_connected", "holder_silent_ms", "last_received_step", "last_completed_step", "retained_plans", "capabilities", "predecessor_end")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_HOLDER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_RECEIVED_STEP_FIELD_NUMBER: _ClassVar[int]
    LAST_COMPLETED_STEP_FIELD_NUMBER: _ClassVar[int]
    RETAINED_PLANS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    PREDECESSOR_END_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    highest_epoch: int
    holder_instance_id: str
    is_holder_connected: bool
    holder_silent_ms: int
    last_received_step: int
    last_completed_step: int
    retained_plans: _containers.RepeatedScalarFieldContainer[bytes]
    capabilities: Capabilities
    predecessor_end: PredecessorEnd
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., highest_epoch: _Optional[int] = ..., holder_instance_id: _Optional[str] = ..., is_holder_connected: bool = ..., holder_silent_ms: _Optional[int] = ..., last_received_step: _Optional[int] = ..., last_completed_step: _Optional[int] = ..., retained_plans: _Optional[_Iterable[bytes]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., predecessor_end: _Optional[_Union[PredecessorEnd, str]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("state", "backend", "page_size", "num_pages", "num_slots", "max_tokens_per_step", "max_plans_in_flight", "max_tokens_per_row", "max_blob_bytes", "rank", "world_size", "group_generation", "is_deterministic", "weights_version", "tasks", "barrier_ops", "layout", "weights_digest", "kv_dtype", "kv_layout", "rendezvous", "takes_alive", "takes_plan_batches", "experts", "transfer_kv", "num_host_pages", "has_kv_store", "sends_behind_steps", "kv_store_id")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    IS_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    BARRIER_OPS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    TAKES_ALIVE_FIELD_NUMBER: _ClassVar[int]
    TAKES_PLAN_BATCHES_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_KV_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    HAS_KV_STORE_FIELD_NUMBER: _ClassVar[int]
    SENDS_BEHIND_STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_ID_FIELD_NUMBER: _ClassVar[int]
    state: WorkerState
    backend: str
    page_size: int
    num_pages: int
    num_slots: int
    max_tokens_per_step: int
    max_plans_in_flight: int
    max_tokens_per_row: int
    max_blob_bytes: int
    rank: int
    world_size: int
    group_generation: int
    is_deterministic: bool
    weights_version: int
    tasks: _containers.RepeatedScalarFieldContainer[_common_pb2.Task]
    barrier_ops: _containers.RepeatedScalarFieldContainer[str]
    layout: RankLayout
    weights_digest: str
    kv_dtype: str
    kv_layout: str
    rendezvous: str
    takes_alive: bool
    takes_plan_batches: bool
    experts: SharedExperts
    transfer_kv: KvFormat
    num_host_pages: int
    has_kv_store: bool
    sends_behind_steps: bool
    kv_store_id: str
    def __init__(self, state: _Optional[_Union[WorkerState, str]] = ..., backend: _Optional[str] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., num_slots: _Optional[int] = ..., max_tokens_per_step: _Optional[int] = ..., max_plans_in_flight: _Optional[int] = ..., max_tokens_per_row: _Optional[int] = ..., max_blob_bytes: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., group_generation: _Optional[int] = ..., is_deterministic: bool = ..., weights_version: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[_common_pb2.Task, str]]] = ..., barrier_ops: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[RankLayout, _Mapping]] = ..., weights_digest: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., rendezvous: _Optional[str] = ..., takes_alive: bool = ..., takes_plan_batches: bool = ..., experts: _Optional[_Union[SharedExperts, _Mapping]] = ..., transfer_kv: _Optional[_Union[KvFormat, _Mapping]] = ..., num_host_pages: _Optional[int] = ..., has_kv_store: bool = ..., sends_behind_steps: bool = ..., kv_store_id: _Optional[str] = ...) -> None: ...

class SharedExperts(_message.Message):
    __slots__ = ("num_layers", "num_experts", "places_per_rank", "expert_bytes", "placement")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PLACES_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    EXPERT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    num_experts: int
    places_per_rank: int
    expert_bytes: int
    placement: ExpertPlacement
    def __init__(self, num_layers: _Optional[int] = ..., num_experts: _Optional[int] = ..., places_per_rank: _Optional[int] = ..., expert_bytes: _Optional[int] = ..., placement: _Optional[_Union[ExpertPlacement, _Mapping]] = ...) -> None: ...

class ExpertPlacement(_message.Message):
    __slots__ = ("version", "experts")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    experts: bytes
    def __init__(self, version: _Optional[int] = ..., experts: _Optional[bytes] = ...) -> None: ...

class RankLayout(_message.Message):
    __slots__ = ("tp_size", "tp_rank", "dp_size", "dp_rank", "ep_size", "ep_rank")
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    DP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    EP_SIZE_FIELD_NUMBER: _ClassVar[int]
    EP_RANK_FIELD_NUMBER: _ClassVar[int]
    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int
    ep_size: int
    ep_rank: int
    def __init__(self, tp_size: _Optional[int] = ..., tp_rank: _Optional[int] = ..., dp_size: _Optional[int] = ..., dp_rank: _Optional[int] = ..., ep_size: _Optional[int] = ..., ep_rank: _Optional[int] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class FormGroupRequest(_message.Message):
    __slots__ = ("epoch", "instance_id", "generation", "layout", "rendezvous", "member_instance_ids", "experts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    MEMBER_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    instance_id: str
    generation: int
    layout: RankLayout
    rendezvous: str
    member_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    experts: ExpertPlacement
    def __init__(self, epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., generation: _Optional[int] = ..., layout: _Optional[_Union[RankLayout, _Mapping]] = ..., rendezvous: _Optional[str] = ..., member_instance_ids: _Optional[_Iterable[str]] = ..., experts: _Optional[_Union[ExpertPlacement, _Mapping]] = ...) -> None: ...

class FormGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveGroupRequest(_message.Message):
    __slots__ = ("epoch", "instance_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    instance_id: str
    def __init__(self, epoch: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class LeaveGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Claim(_message.Message):
    __slots__ = ("epoch", "group_generation", "takes_result_batches")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TAKES_RESULT_BATCHES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    group_generation: int
    takes_result_batches: bool
    def __init__(self, epoch: _Optional[int] = ..., group_generation: _Optional[int] = ..., takes_result_batches: bool = ...) -> None: ...

class Claimed(_message.Message):
    __slots__ = ("epoch", "experts")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    experts: ExpertPlacement
    def __init__(self, epoch: _Optional[int] = ..., experts: _Optional[_Union[ExpertPlacement, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("epoch", "step_id", "error")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    error: _common_pb2.Error
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("header", "ranks")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    header: PlanHeader
    ranks: _containers.RepeatedCompositeFieldContainer[RankPlan]
    def __init__(self, header: _Optional[_Union[PlanHeader, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankPlan, _Mapping]]] = ...) -> None: ...

class PlanHeader(_message.Message):
    __slots__ = ("epoch", "step_id", "group_generation", "barrier_ops", "shape", "expected_us", "group_completed_step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    BARRIER_OPS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_US_FIELD_NUMBER: _ClassVar[int]
    GROUP_COMPLETED_STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    group_generation: int
    barrier_ops: _containers.RepeatedCompositeFieldContainer[BarrierOp]
    shape: ForwardShape
    expected_us: int
    group_completed_step: int
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., group_generation: _Optional[int] = ..., barrier_ops: _Optional[_Iterable[_Union[BarrierOp, _Mapping]]] = ..., shape: _Optional[_Union[ForwardShape, _Mapping]] = ..., expected_us: _Optional[int] = ..., group_completed_step: _Optional[int] = ...) -> None: ...

class ForwardShape(_message.Message):
    __slots__ = ("mode", "max_tokens_per_rank", "dispatch", "graph_bucket", "is_two_batch", "idle_ranks", "max_draft_tokens")
    MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    GRAPH_BUCKET_FIELD_NUMBER: _ClassVar[int]
    IS_TWO_BATCH_FIELD_NUMBER: _ClassVar[int]
    IDLE_RANKS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mode: ForwardMode
    max_tokens_per_rank: int
    dispatch: ExpertDispatch
    graph_bucket: int
    is_two_batch: bool
    idle_ranks: bytes
    max_draft_tokens: int
    def __init__(self, mode: _Optional[_Union[ForwardMode, str]] = ..., max_tokens_per_rank: _Optional[int] = ..., dispatch: _Optional[_Union[ExpertDispatch, str]] = ..., graph_bucket: _Optional[int] = ..., is_two_batch: bool = ..., idle_ranks: _Optional[bytes] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class BarrierOp(_message.Message):
    __slots__ = ("flush_cache", "commit_weights", "load_adapter", "unload_adapter", "place_experts", "release_memory", "resume_memory", "move_experts")
    FLUSH_CACHE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    PLACE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    RESUME_MEMORY_FIELD_NUMBER: _ClassVar[int]
    MOVE_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    flush_cache: FlushCache
    commit_weights: CommitStaged
    load_adapter: CommitStaged
    unload_adapter: UnloadAdapter
    place_experts: CommitStaged
    release_memory: ReleaseMemory
    resume_memory: ReleaseMemory
    move_experts: MoveExperts
    def __init__(self, flush_cache: _Optional[_Union[FlushCache, _Mapping]] = ..., commit_weights: _Optional[_Union[CommitStaged, _Mapping]] = ..., load_adapter: _Optional[_Union[CommitStaged, _Mapping]] = ..., unload_adapter: _Optional[_Union[UnloadAdapter, _Mapping]] = ..., place_experts: _Optional[_Union[CommitStaged, _Mapping]] = ..., release_memory: _Optional[_Union[ReleaseMemory, _Mapping]] = ..., resume_memory: _Optional[_Union[ReleaseMemory, _Mapping]] = ..., move_experts: _Optional[_Union[MoveExperts, _Mapping]] = ...) -> None: ...

class MoveExperts(_message.Message):
    __slots__ = ("stage_id", "layer", "sources", "targets", "first_byte", "num_bytes")
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BYTE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    stage_id: str
    layer: int
    sources: bytes
    targets: bytes
    first_byte: int
    num_bytes: int
    def __init__(self, stage_id: _Optional[str] = ..., layer: _Optional[int] = ..., sources: _Optional[bytes] = ..., targets: _Optional[bytes] = ..., first_byte: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class FlushCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitStaged(_message.Message):
    __slots__ = ("stage_id", "weights_version", "weights_digest")
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    stage_id: str
    weights_version: int
    weights_digest: str
    def __init__(self, stage_id: _Optional[str] = ..., weights_version: _Optional[int] = ..., weights_digest: _Optional[str] = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: str
    def __init__(self, adapter: _Optional[str] = ...) -> None: ...

class ReleaseMemory(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class RankPlan(_message.Message):
    __slots__ = ("release_slots", "release_generations", "admits", "grants", "page_copies", "chunks", "decode_set", "drafts", "saves", "loads")
    RELEASE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_COPIES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SET_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SAVES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    release_slots: bytes
    release_generations: bytes
    admits: _containers.RepeatedCompositeFieldContainer[Admit]
    grants: Grants
    page_copies: PageCopies
    chunks: Chunks
    decode_set: DecodeSet
    drafts: Drafts
    saves: PageMoves
    loads: PageMoves
    def __init__(self, release_slots: _Optional[bytes] = ..., release_generations: _Optional[bytes] = ..., admits: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ..., grants: _Optional[_Union[Grants, _Mapping]] = ..., page_copies: _Optional[_Union[PageCopies, _Mapping]] = ..., chunks: _Optional[_Union[Chunks, _Mapping]] = ..., decode_set: _Optional[_Union[DecodeSet, _Mapping]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., saves: _Optional[_Union[PageMoves, _Mapping]] = ..., loads: _Optional[_Union[PageMoves, _Mapping]] = ...) -> None: ...

class PageMoves(_message.Message):
    __slots__ = ("op_ids", "counts", "device_pages", "host_pages", "previous_pages")
    OP_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_PAGES_FIELD_NUMBER: _ClassVar[int]
    op_ids: bytes
    counts: bytes
    device_pages: bytes
    host_pages: bytes
    previous_pages: bytes
    def __init__(self, op_ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., device_pages: _Optional[bytes] = ..., host_pages: _Optional[bytes] = ..., previous_pages: _Optional[bytes] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("slots", "generations", "starts", "counts", "ids")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    generations: bytes
    starts: bytes
    counts: bytes
    ids: bytes
    def __init__(self, slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., starts: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., ids: _Optional[bytes] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("slot", "generation", "request_id", "index", "task", "prompt_ids", "output_ids", "cached_len", "cached_pages", "cached_page_generations", "max_total_len", "sampling", "min_tokens", "suppressed_ids", "logprobs_start", "cache_namespace", "grammar_hash", "adapter", "embeddings", "trace_context")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_HASH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    request_id: str
    index: int
    task: _common_pb2.Task
    prompt_ids: bytes
    output_ids: bytes
    cached_len: int
    cached_pages: bytes
    cached_page_generations: bytes
    max_total_len: int
    sampling: _common_pb2.SamplingParams
    min_tokens: int
    suppressed_ids: bytes
    logprobs_start: int
    cache_namespace: str
    grammar_hash: str
    adapter: str
    embeddings: _containers.RepeatedCompositeFieldContainer[_common_pb2.EmbeddingSpan]
    trace_context: str
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., request_id: _Optional[str] = ..., index: _Optional[int] = ..., task: _Optional[_Union[_common_pb2.Task, str]] = ..., prompt_ids: _Optional[bytes] = ..., output_ids: _Optional[bytes] = ..., cached_len: _Optional[int] = ..., cached_pages: _Optional[bytes] = ..., cached_page_generations: _Optional[bytes] = ..., max_total_len: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., min_tokens: _Optional[int] = ..., suppressed_ids: _Optional[bytes] = ..., logprobs_start: _Optional[int] = ..., cache_namespace: _Optional[str] = ..., grammar_hash: _Optional[str] = ..., adapter: _Optional[str] = ..., embeddings: _Optional[_Iterable[_Union[_common_pb2.EmbeddingSpan, _Mapping]]] = ..., trace_context: _Optional[str] = ...) -> None: ...

class Grants(_message.Message):
    __slots__ = ("slots", "counts", "pages")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    counts: bytes
    pages: bytes
    def __init__(self, slots: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., pages: _Optional[bytes] = ...) -> None: ...

class PageCopies(_message.Message):
    __slots__ = ("source_pages", "target_pages", "num_tokens")
    SOURCE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TARGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source_pages: bytes
    target_pages: bytes
    num_tokens: bytes
    def __init__(self, source_pages: _Optional[bytes] = ..., target_pages: _Optional[bytes] = ..., num_tokens: _Optional[bytes] = ...) -> None: ...

class Chunks(_message.Message):
    __slots__ = ("slots", "lengths")
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    lengths: bytes
    def __init__(self, slots: _Optional[bytes] = ..., lengths: _Optional[bytes] = ...) -> None: ...

class DecodeSet(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: bytes
    def __init__(self, slots: _Optional[bytes] = ...) -> None: ...

class StepResult(_message.Message):
    __slots__ = ("epoch", "step_id", "counts", "ids", "logprobs", "prompt_logprobs", "vectors", "device_start_ns", "device_end_ns", "weights_version", "slot_errors", "no_token_reasons", "drafted", "accepted", "released_transfers", "expert_rows", "expert_loads", "loaded_ops")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VECTORS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_START_NS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_END_NS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOT_ERRORS_FIELD_NUMBER: _ClassVar[int]
    NO_TOKEN_REASONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ROWS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LOADS_FIELD_NUMBER: _ClassVar[int]
    LOADED_OPS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step_id: int
    counts: bytes
    ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    vectors: _containers.RepeatedCompositeFieldContainer[SlotVector]
    device_start_ns: int
    device_end_ns: int
    weights_version: int
    slot_errors: _containers.RepeatedCompositeFieldContainer[SlotError]
    no_token_reasons: bytes
    drafted: bytes
    accepted: bytes
    released_transfers: _containers.RepeatedScalarFieldContainer[str]
    expert_rows: int
    expert_loads: bytes
    loaded_ops: bytes
    def __init__(self, epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., counts: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ..., vectors: _Optional[_Iterable[_Union[SlotVector, _Mapping]]] = ..., device_start_ns: _Optional[int] = ..., device_end_ns: _Optional[int] = ..., weights_version: _Optional[int] = ..., slot_errors: _Optional[_Iterable[_Union[SlotError, _Mapping]]] = ..., no_token_reasons: _Optional[bytes] = ..., drafted: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., released_transfers: _Optional[_Iterable[str]] = ..., expert_rows: _Optional[int] = ..., expert_loads: _Optional[bytes] = ..., loaded_ops: _Optional[bytes] = ...) -> None: ...

class SlotError(_message.Message):
    __slots__ = ("slot", "generation", "error")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    error: _common_pb2.Error
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class SlotLogprobs(_message.Message):
    __slots__ = ("slot", "generation", "first_position", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    first_position: int
    logprobs: _common_pb2.Logprobs
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., first_position: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class SlotVector(_message.Message):
    __slots__ = ("slot", "generation", "values")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    values: bytes
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., values: _Optional[bytes] = ...) -> None: ...

class SnapshotCacheRequest(_message.Message):
    __slots__ = ("epoch", "instance_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    instance_id: str
    def __init__(self, epoch: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class SnapshotCacheResponse(_message.Message):
    __slots__ = ("first_page", "generations", "filled", "previous_pages", "previous_generations", "namespace_indexes", "weights_versions", "ids", "namespaces", "pinned_pages", "is_last", "pinned_transfers", "tier")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    PINNED_PAGES_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    PINNED_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    generations: bytes
    filled: bytes
    previous_pages: bytes
    previous_generations: bytes
    namespace_indexes: bytes
    weights_versions: bytes
    ids: bytes
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    pinned_pages: bytes
    is_last: bool
    pinned_transfers: _containers.RepeatedCompositeFieldContainer[PinnedTransfer]
    tier: KvTier
    def __init__(self, first_page: _Optional[int] = ..., generations: _Optional[bytes] = ..., filled: _Optional[bytes] = ..., previous_pages: _Optional[bytes] = ..., previous_generations: _Optional[bytes] = ..., namespace_indexes: _Optional[bytes] = ..., weights_versions: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., namespaces: _Optional[_Iterable[str]] = ..., pinned_pages: _Optional[bytes] = ..., is_last: bool = ..., pinned_transfers: _Optional[_Iterable[_Union[PinnedTransfer, _Mapping]]] = ..., tier: _Optional[_Union[KvTier, str]] = ...) -> None: ...

class PinnedTransfer(_message.Message):
    __slots__ = ("transfer_id", "pages")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    pages: bytes
    def __init__(self, transfer_id: _Optional[str] = ..., pages: _Optional[bytes] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("hello", "capabilities", "highest_epoch", "holder_instance_id", "transfers")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HOLDER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    capabilities: Capabilities
    highest_epoch: int
    holder_instance_id: str
    transfers: TransferCounts
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., highest_epoch: _Optional[int] = ..., holder_instance_id: _Optional[str] = ..., transfers: _Optional[_Union[TransferCounts, _Mapping]] = ...) -> None: ...

class TransferCounts(_message.Message):
    __slots__ = ("num_sending", "num_receiving", "staging_bytes", "quarantined_bytes", "num_sent", "num_received", "num_failed", "quarantined", "hand_over_bytes", "hand_over_us")
    NUM_SENDING_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVING_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_FIELD_NUMBER: _ClassVar[int]
    NUM_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_FAILED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_US_FIELD_NUMBER: _ClassVar[int]
    num_sending: int
    num_receiving: int
    staging_bytes: int
    quarantined_bytes: int
    num_sent: int
    num_received: int
    num_failed: int
    quarantined: _containers.RepeatedScalarFieldContainer[str]
    hand_over_bytes: int
    hand_over_us: int
    def __init__(self, num_sending: _Optional[int] = ..., num_receiving: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., num_sent: _Optional[int] = ..., num_received: _Optional[int] = ..., num_failed: _Optional[int] = ..., quarantined: _Optional[_Iterable[str]] = ..., hand_over_bytes: _Optional[int] = ..., hand_over_us: _Optional[int] = ...) -> None: ...

class PutBlobRequest(_message.Message):
    __slots__ = ("hash", "data", "nixl")
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    hash: str
    data: bytes
    nixl: NixlRegion
    def __init__(self, hash: _Optional[str] = ..., data: _Optional[bytes] = ..., nixl: _Optional[_Union[NixlRegion, _Mapping]] = ...) -> None: ...

class NixlRegion(_message.Message):
    __slots__ = ("agent_metadata", "address", "length", "device")
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    agent_metadata: bytes
    address: int
    length: int
    device: int
    def __init__(self, agent_metadata: _Optional[bytes] = ..., address: _Optional[int] = ..., length: _Optional[int] = ..., device: _Optional[int] = ...) -> None: ...

class PutBlobResponse(_message.Message):
    __slots__ = ("was_known", "ttl_ms")
    WAS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    was_known: bool
    ttl_ms: int
    def __init__(self, was_known: bool = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("action", "num_steps")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    action: ProfileAction
    num_steps: int
    def __init__(self, action: _Optional[_Union[ProfileAction, str]] = ..., num_steps: _Optional[int] = ...) -> None: ...

class ProfileResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("weights_path", "adapter", "expert_placement", "stage_id")
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    STAGE_ID_FIELD_NUMBER: _ClassVar[int]
    weights_path: str
    adapter: StagedAdapter
    expert_placement: bytes
    stage_id: str
    def __init__(self, weights_path: _Optional[str] = ..., adapter: _Optional[_Union[StagedAdapter, _Mapping]] = ..., expert_placement: _Optional[bytes] = ..., stage_id: _Optional[str] = ...) -> None: ...

class StagedAdapter(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("weights_digest",)
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    weights_digest: str
    def __init__(self, weights_digest: _Optional[str] = ...) -> None: ...

class PrepareTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "num_tokens", "lease_ms", "writer", "kv", "first_token", "instance_id")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    num_tokens: int
    lease_ms: int
    writer: TransferPeer
    kv: KvFormat
    first_token: int
    instance_id: str
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_tokens: _Optional[int] = ..., lease_ms: _Optional[int] = ..., writer: _Optional[_Union[TransferPeer, _Mapping]] = ..., kv: _Optional[_Union[KvFormat, _Mapping]] = ..., first_token: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class RenewTransfersRequest(_message.Message):
    __slots__ = ("epoch", "instance_id", "transfer_ids", "lease_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    instance_id: str
    transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    lease_ms: int
    def __init__(self, epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., transfer_ids: _Optional[_Iterable[str]] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewTransfersResponse(_message.Message):
    __slots__ = ("num_renewed",)
    NUM_RENEWED_FIELD_NUMBER: _ClassVar[int]
    num_renewed: int
    def __init__(self, num_renewed: _Optional[int] = ...) -> None: ...

class TransferRegion(_message.Message):
    __slots__ = ("transfer_id", "incarnation", "instance_id", "epoch", "first_token", "num_tokens", "num_bytes", "kv", "shared_memory", "nixl", "device")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NIXL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    incarnation: int
    instance_id: str
    epoch: int
    first_token: int
    num_tokens: int
    num_bytes: int
    kv: KvFormat
    shared_memory: SharedMemory
    nixl: NixlRegion
    device: DeviceMemory
    def __init__(self, transfer_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., kv: _Optional[_Union[KvFormat, _Mapping]] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., nixl: _Optional[_Union[NixlRegion, _Mapping]] = ..., device: _Optional[_Union[DeviceMemory, _Mapping]] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("handle", "offset", "owner")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    owner: HostProcess
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., owner: _Optional[_Union[HostProcess, _Mapping]] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("host", "pid", "fd", "inode")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    host: str
    pid: int
    fd: int
    inode: int
    def __init__(self, host: _Optional[str] = ..., pid: _Optional[int] = ..., fd: _Optional[int] = ..., inode: _Optional[int] = ...) -> None: ...

class WriteTransferRequest(_message.Message):
    __slots__ = ("region", "writer", "offset", "data", "last_word", "checksum", "num_written", "writer_process", "is_ending", "gather_start")
    REGION_FIELD_NUMBER: _ClassVar[int]
    WRITER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_WORD_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    WRITER_PROCESS_FIELD_NUMBER: _ClassVar[int]
    IS_ENDING_FIELD_NUMBER: _ClassVar[int]
    GATHER_START_FIELD_NUMBER: _ClassVar[int]
    region: TransferRegion
    writer: str
    offset: int
    data: bytes
    last_word: TransferLastWord
    checksum: int
    num_written: int
    writer_process: HostProcess
    is_ending: bool
    gather_start: GatherStart
    def __init__(self, region: _Optional[_Union[TransferRegion, _Mapping]] = ..., writer: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last_word: _Optional[_Union[TransferLastWord, str]] = ..., checksum: _Optional[int] = ..., num_written: _Optional[int] = ..., writer_process: _Optional[_Union[HostProcess, _Mapping]] = ..., is_ending: bool = ..., gather_start: _Optional[_Union[GatherStart, _Mapping]] = ...) -> None: ...

class GatherStart(_message.Message):
    __slots__ = ("host", "monotonic_ns", "num_bytes")
    HOST_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    host: str
    monotonic_ns: int
    num_bytes: int
    def __init__(self, host: _Optional[str] = ..., monotonic_ns: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class HostProcess(_message.Message):
    __slots__ = ("host", "pid", "started")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    host: str
    pid: int
    started: int
    def __init__(self, host: _Optional[str] = ..., pid: _Optional[int] = ..., started: _Optional[int] = ...) -> None: ...

class WriteTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "instance_id", "after_step", "pages", "generations", "previous_page", "ids", "cache_namespace", "other_transfer_ids", "takes_scattering", "takes_pieces")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_PAGE_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    OTHER_TRANSFER_IDS_FIELD_NUMBER: _ClassVar[int]
    TAKES_SCATTERING_FIELD_NUMBER: _ClassVar[int]
    TAKES_PIECES_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    instance_id: str
    after_step: int
    pages: bytes
    generations: bytes
    previous_page: int
    ids: bytes
    cache_namespace: str
    other_transfer_ids: _containers.RepeatedScalarFieldContainer[str]
    takes_scattering: bool
    takes_pieces: bool
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., after_step: _Optional[int] = ..., pages: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., previous_page: _Optional[int] = ..., ids: _Optional[bytes] = ..., cache_namespace: _Optional[str] = ..., other_transfer_ids: _Optional[_Iterable[str]] = ..., takes_scattering: bool = ..., takes_pieces: bool = ...) -> None: ...

class CommitTransferResponse(_message.Message):
    __slots__ = ("state", "failure")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    state: TransferState
    failure: TransferFailure
    def __init__(self, state: _Optional[_Union[TransferState, str]] = ..., failure: _Optional[_Union[TransferFailure, str]] = ...) -> None: ...

class TransferPeer(_message.Message):
    __slots__ = ("instance_id", "group_generation", "layout")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_GENERATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    group_generation: int
    layout: RankLayout
    def __init__(self, instance_id: _Optional[str] = ..., group_generation: _Optional[int] = ..., layout: _Optional[_Union[RankLayout, _Mapping]] = ...) -> None: ...

class KvFormat(_message.Message):
    __slots__ = ("weights_digest", "kv_dtype", "kv_layout", "first_head", "end_head", "num_heads")
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    END_HEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    weights_digest: str
    kv_dtype: str
    kv_layout: str
    first_head: int
    end_head: int
    num_heads: int
    def __init__(self, weights_digest: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., first_head: _Optional[int] = ..., end_head: _Optional[int] = ..., num_heads: _Optional[int] = ...) -> None: ...

class PrepareTransferResponse(_message.Message):
    __slots__ = ("segments", "region", "writer_rank")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    WRITER_RANK_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[NixlRegion]
    region: TransferRegion
    writer_rank: int
    def __init__(self, segments: _Optional[_Iterable[_Union[NixlRegion, _Mapping]]] = ..., region: _Optional[_Union[TransferRegion, _Mapping]] = ..., writer_rank: _Optional[int] = ...) -> None: ...

class StartTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "epoch", "source_pages", "source_generations", "num_tokens", "segments", "receiver", "kv", "first_token", "is_last", "instance_id", "region", "address", "after_step")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PAGES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    epoch: int
    source_pages: bytes
    source_generations: bytes
    num_tokens: int
    segments: _containers.RepeatedCompositeFieldContainer[NixlRegion]
    receiver: TransferPeer
    kv: KvFormat
    first_token: int
    is_last: bool
    instance_id: str
    region: TransferRegion
    address: str
    after_step: int
    def __init__(self, transfer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., source_pages: _Optional[bytes] = ..., source_generations: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[NixlRegion, _Mapping]]] = ..., receiver: _Optional[_Union[TransferPeer, _Mapping]] = ..., kv: _Optional[_Union[KvFormat, _Mapping]] = ..., first_token: _Optional[int] = ..., is_last: bool = ..., instance_id: _Optional[str] = ..., region: _Optional[_Union[TransferRegion, _Mapping]] = ..., address: _Optional[str] = ..., after_step: _Optional[int] = ...) -> None: ...

class StartTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchTransferRequest(_message.Message):
    __slots__ = ("transfer_id",)
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    def __init__(self, transfer_id: _Optional[str] = ...) -> None: ...

class WatchTransferResponse(_message.Message):
    __slots__ = ("state", "error", "chunks", "failure", "num_bytes", "is_ending")
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_ENDING_FIELD_NUMBER: _ClassVar[int]
    state: TransferState
    error: _common_pb2.Error
    chunks: _containers.RepeatedCompositeFieldContainer[TransferChunk]
    failure: TransferFailure
    num_bytes: int
    is_ending: bool
    def __init__(self, state: _Optional[_Union[TransferState, str]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., chunks: _Optional[_Iterable[_Union[TransferChunk, _Mapping]]] = ..., failure: _Optional[_Union[TransferFailure, str]] = ..., num_bytes: _Optional[int] = ..., is_ending: bool = ...) -> None: ...

class TransferChunk(_message.Message):
    __slots__ = ("first_token", "num_tokens")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    num_tokens: int
    def __init__(self, first_token: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AbortTransferRequest(_message.Message):
    __slots__ = ("transfer_id", "is_writer_gone")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    IS_WRITER_GONE_FIELD_NUMBER: _ClassVar[int]
    transfer_id: str
    is_writer_gone: bool
    def __init__(self, transfer_id: _Optional[str] = ..., is_writer_gone: bool = ...) -> None: ...

class AbortTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchPagesRequest(_message.Message):
    __slots__ = ("epoch", "instance_id", "after_step", "ids", "host_pages", "previous_page", "cache_namespace")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    HOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_PAGE_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    instance_id: str
    after_step: int
    ids: bytes
    host_pages: bytes
    previous_page: int
    cache_namespace: str
    def __init__(self, epoch: _Optional[int] = ..., instance_id: _Optional[str] = ..., after_step: _Optional[int] = ..., ids: _Optional[bytes] = ..., host_pages: _Optional[bytes] = ..., previous_page: _Optional[int] = ..., cache_namespace: _Optional[str] = ...) -> None: ...

class FetchPagesResponse(_message.Message):
    __slots__ = ("num_pages",)
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    def __init__(self, num_pages: _Optional[int] = ...) -> None: ...
