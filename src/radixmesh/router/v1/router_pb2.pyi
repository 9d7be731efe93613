from radixmesh.common.v1 import common_pb2 as _common_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2 as _tokenizer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ABORT_OUTCOME_UNSPECIFIED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_FOUND: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_FINISHED: _ClassVar[AbortOutcome]
    ABORT_OUTCOME_UNKNOWN: _ClassVar[AbortOutcome]
ABORT_OUTCOME_UNSPECIFIED: AbortOutcome
ABORT_OUTCOME_FOUND: AbortOutcome
ABORT_OUTCOME_FINISHED: AbortOutcome
ABORT_OUTCOME_UNKNOWN: AbortOutcome

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "prompt_ids", "chat", "n", "sampling", "stop", "grammar", "ids_only", "cache_salt", "priority", "deadline_ms", "tenant", "resume", "task", "session", "ttft_deadline_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    IDS_ONLY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTFT_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    prompt_ids: bytes
    chat: _tokenizer_pb2.ChatInput
    n: int
    sampling: _common_pb2.SamplingParams
    stop: _common_pb2.StopParams
    grammar: _common_pb2.Grammar
    ids_only: bool
    cache_salt: str
    priority: int
    deadline_ms: int
    tenant: str
    resume: Resume
    task: _common_pb2.Task
    session: str
    ttft_deadline_ms: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., prompt_ids: _Optional[bytes] = ..., chat: _Optional[_Union[_tokenizer_pb2.ChatInput, _Mapping]] = ..., n: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopParams, _Mapping]] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., ids_only: bool = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., task: _Optional[_Union[_common_pb2.Task, str]] = ..., session: _Optional[str] = ..., ttft_deadline_ms: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("resolved", "outputs", "resumption")
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    RESUMPTION_FIELD_NUMBER: _ClassVar[int]
    resolved: Resolved
    outputs: _containers.RepeatedCompositeFieldContainer[OutputProgress]
    resumption: int
    def __init__(self, resolved: _Optional[_Union[Resolved, _Mapping]] = ..., outputs: _Optional[_Iterable[_Union[OutputProgress, _Mapping]]] = ..., resumption: _Optional[int] = ...) -> None: ...

class OutputProgress(_message.Message):
    __slots__ = ("output_ids", "text_bytes", "is_finished")
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    output_ids: bytes
    text_bytes: int
    is_finished: bool
    def __init__(self, output_ids: _Optional[bytes] = ..., text_bytes: _Optional[int] = ..., is_finished: bool = ...) -> None: ...

class Resolved(_message.Message):
    __slots__ = ("request_id", "model", "model_identity", "prompt_ids", "seeds", "sampling", "stop", "grammar", "ids_only", "cache_salt", "priority", "tenant", "task", "trace_context", "session")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    IDS_ONLY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    model_identity: _common_pb2.ModelIdentity
    prompt_ids: bytes
    seeds: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.SamplingParams
    stop: _common_pb2.StopParams
    grammar: _common_pb2.Grammar
    ids_only: bool
    cache_salt: str
    priority: int
    tenant: str
    task: _common_pb2.Task
    trace_context: str
    session: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., model_identity: _Optional[_Union[_common_pb2.ModelIdentity, _Mapping]] = ..., prompt_ids: _Optional[bytes] = ..., seeds: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_common_pb2.StopParams, _Mapping]] = ..., grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., ids_only: bool = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., task: _Optional[_Union[_common_pb2.Task, str]] = ..., trace_context: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("resolved", "deltas", "prompt_logprobs", "finished", "prompt_logprobs_start")
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    resolved: Resolved
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    prompt_logprobs: _common_pb2.Logprobs
    finished: _containers.RepeatedCompositeFieldContainer[OutputFinished]
    prompt_logprobs_start: int
    def __init__(self, resolved: _Optional[_Union[Resolved, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., finished: _Optional[_Iterable[_Union[OutputFinished, _Mapping]]] = ..., prompt_logprobs_start: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("index", "first_output_index", "text_offset", "ids", "text", "logprobs", "weights_version", "vector")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    index: int
    first_output_index: int
    text_offset: int
    ids: bytes
    text: str
    logprobs: _common_pb2.Logprobs
    weights_version: int
    vector: bytes
    def __init__(self, index: _Optional[int] = ..., first_output_index: _Optional[int] = ..., text_offset: _Optional[int] = ..., ids: _Optional[bytes] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., weights_version: _Optional[int] = ..., vector: _Optional[bytes] = ...) -> None: ...

class OutputFinished(_message.Message):
    __slots__ = ("index", "reason", "num_output", "text_bytes", "stop_id", "stop", "usage", "error")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STOP_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: _common_pb2.FinishReason
    num_output: int
    text_bytes: int
    stop_id: int
    stop: str
    usage: _common_pb2.Usage
    error: _common_pb2.Error
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., num_output: _Optional[int] = ..., text_bytes: _Optional[int] = ..., stop_id: _Optional[int] = ..., stop: _Optional[str] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: AbortOutcome
    def __init__(self, outcome: _Optional[_Union[AbortOutcome, str]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "items")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    model: str
    items: _containers.RepeatedCompositeFieldContainer[_tokenizer_pb2.EncodeItem]
    def __init__(self, model: _Optional[str] = ..., items: _Optional[_Iterable[_Union[_tokenizer_pb2.EncodeItem, _Mapping]]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_tokenizer_pb2.EncodedItem]
    def __init__(self, items: _Optional[_Iterable[_Union[_tokenizer_pb2.EncodedItem, _Mapping]]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "base_model", "num_schedulers")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BASE_MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelIdentity
    base_model: str
    num_schedulers: int
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelIdentity, _Mapping]] = ..., base_model: _Optional[str] = ..., num_schedulers: _Optional[int] = ...) -> None: ...

class AddSchedulerRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class AddSchedulerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveSchedulerRequest(_message.Message):
    __slots__ = ("address", "finish_outputs")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINISH_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    finish_outputs: bool
    def __init__(self, address: _Optional[str] = ..., finish_outputs: bool = ...) -> None: ...

class RemoveSchedulerResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...

class DrainSchedulerRequest(_message.Message):
    __slots__ = ("address", "move_outputs")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MOVE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    move_outputs: bool
    def __init__(self, address: _Optional[str] = ..., move_outputs: bool = ...) -> None: ...

class DrainSchedulerResponse(_message.Message):
    __slots__ = ("num_running", "num_moved")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_moved: int
    def __init__(self, num_running: _Optional[int] = ..., num_moved: _Optional[int] = ...) -> None: ...

class MoveOutputsRequest(_message.Message):
    __slots__ = ("request_id", "from_address", "to_address", "max_outputs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TO_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    from_address: str
    to_address: str
    max_outputs: int
    def __init__(self, request_id: _Optional[str] = ..., from_address: _Optional[str] = ..., to_address: _Optional[str] = ..., max_outputs: _Optional[int] = ...) -> None: ...

class MoveOutputsResponse(_message.Message):
    __slots__ = ("num_moved",)
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    num_moved: int
    def __init__(self, num_moved: _Optional[int] = ...) -> None: ...

class ListSchedulersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSchedulersResponse(_message.Message):
    __slots__ = ("schedulers", "queue", "sources")
    SCHEDULERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    schedulers: _containers.RepeatedCompositeFieldContainer[SchedulerInfo]
    queue: QueueInfo
    sources: _containers.RepeatedCompositeFieldContainer[DiscoverySourceInfo]
    def __init__(self, schedulers: _Optional[_Iterable[_Union[SchedulerInfo, _Mapping]]] = ..., queue: _Optional[_Union[QueueInfo, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[DiscoverySourceInfo, _Mapping]]] = ...) -> None: ...

class QueueInfo(_message.Message):
    __slots__ = ("num_outputs", "max_outputs", "num_bytes", "num_tenants", "longest_wait_ms", "num_refused", "retry_after_ms")
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    LONGEST_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    num_outputs: int
    max_outputs: int
    num_bytes: int
    num_tenants: int
    longest_wait_ms: int
    num_refused: int
    retry_after_ms: int
    def __init__(self, num_outputs: _Optional[int] = ..., max_outputs: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_tenants: _Optional[int] = ..., longest_wait_ms: _Optional[int] = ..., num_refused: _Optional[int] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class DiscoverySourceInfo(_message.Message):
    __slots__ = ("source", "num_addresses", "error", "num_ignored")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NUM_IGNORED_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_addresses: int
    error: str
    num_ignored: int
    def __init__(self, source: _Optional[str] = ..., num_addresses: _Optional[int] = ..., error: _Optional[str] = ..., num_ignored: _Optional[int] = ...) -> None: ...

class SchedulerInfo(_message.Message):
    __slots__ = ("address", "is_connected", "is_draining", "instance_id", "models", "num_running", "group", "epoch", "trust", "num_outputs", "queued_tokens", "num_routed", "routed_tokens", "routed_cached_tokens", "max_outputs")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUTED_FIELD_NUMBER: _ClassVar[int]
    ROUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    is_connected: bool
    is_draining: bool
    instance_id: str
    models: _containers.RepeatedScalarFieldContainer[str]
    num_running: int
    group: str
    epoch: int
    trust: str
    num_outputs: int
    queued_tokens: int
    num_routed: int
    routed_tokens: int
    routed_cached_tokens: int
    max_outputs: int
    def __init__(self, address: _Optional[str] = ..., is_connected: bool = ..., is_draining: bool = ..., instance_id: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., num_running: _Optional[int] = ..., group: _Optional[str] = ..., epoch: _Optional[int] = ..., trust: _Optional[str] = ..., num_outputs: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., num_routed: _Optional[int] = ..., routed_tokens: _Optional[int] = ..., routed_cached_tokens: _Optional[int] = ..., max_outputs: _Optional[int] = ...) -> None: ...
