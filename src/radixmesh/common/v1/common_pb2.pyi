from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_MALFORMED_MESSAGE: _ClassVar[ErrorReason]
    ERROR_REASON_MISSING_FIELD: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_ARGUMENT: _ClassVar[ErrorReason]
    ERROR_REASON_EMPTY_PROMPT: _ClassVar[ErrorReason]
    ERROR_REASON_PROMPT_TOO_LONG: _ClassVar[ErrorReason]
    ERROR_REASON_TOKEN_OUT_OF_VOCABULARY: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_STOPS: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_CHAT: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_RESUME: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_MODEL: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_BLOB: _ClassVar[ErrorReason]
    ERROR_REASON_DUPLICATE_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_STALE_ATTEMPT: _ClassVar[ErrorReason]
    ERROR_REASON_VERSION_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_MODEL_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_TOKENIZER_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_SAMPLER_MISMATCH: _ClassVar[ErrorReason]
    ERROR_REASON_PROTOCOL_VIOLATION: _ClassVar[ErrorReason]
    ERROR_REASON_EPOCH_FENCED: _ClassVar[ErrorReason]
    ERROR_REASON_STEP_GAP: _ClassVar[ErrorReason]
    ERROR_REASON_SLOT_CONFLICT: _ClassVar[ErrorReason]
    ERROR_REASON_PAGE_CONFLICT: _ClassVar[ErrorReason]
    ERROR_REASON_GROUP_GENERATION: _ClassVar[ErrorReason]
    ERROR_REASON_UNSUPPORTED: _ClassVar[ErrorReason]
    ERROR_REASON_NEVER_FITS: _ClassVar[ErrorReason]
    ERROR_REASON_OVERLOADED: _ClassVar[ErrorReason]
    ERROR_REASON_JOURNAL_FULL: _ClassVar[ErrorReason]
    ERROR_REASON_BLOB_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_LARGE: _ClassVar[ErrorReason]
    ERROR_REASON_NO_REPLICA: _ClassVar[ErrorReason]
    ERROR_REASON_NOT_SERVING: _ClassVar[ErrorReason]
    ERROR_REASON_GROUP_LOST: _ClassVar[ErrorReason]
    ERROR_REASON_DEADLINE_EXCEEDED: _ClassVar[ErrorReason]
    ERROR_REASON_STEP_TIMEOUT: _ClassVar[ErrorReason]
    ERROR_REASON_CLIENT_STALLED: _ClassVar[ErrorReason]
    ERROR_REASON_ABORTED: _ClassVar[ErrorReason]
    ERROR_REASON_SUPERSEDED: _ClassVar[ErrorReason]
    ERROR_REASON_INTERNAL: _ClassVar[ErrorReason]
    ERROR_REASON_STEP_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_CHECKPOINT: _ClassVar[ErrorReason]
    ERROR_REASON_INVALID_GRAMMAR: _ClassVar[ErrorReason]
    ERROR_REASON_RESNAPSHOT: _ClassVar[ErrorReason]
    ERROR_REASON_UNAUTHENTICATED: _ClassVar[ErrorReason]
    ERROR_REASON_PERMISSION_DENIED: _ClassVar[ErrorReason]
    ERROR_REASON_RANKS_DIVERGED: _ClassVar[ErrorReason]
    ERROR_REASON_TRANSFER_FAILED: _ClassVar[ErrorReason]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_GENERATE: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_SCORE: _ClassVar[Task]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_HANDED_OVER: _ClassVar[FinishReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_MALFORMED_MESSAGE: ErrorReason
ERROR_REASON_MISSING_FIELD: ErrorReason
ERROR_REASON_INVALID_ARGUMENT: ErrorReason
ERROR_REASON_EMPTY_PROMPT: ErrorReason
ERROR_REASON_PROMPT_TOO_LONG: ErrorReason
ERROR_REASON_TOKEN_OUT_OF_VOCABULARY: ErrorReason
ERROR_REASON_TOO_MANY_STOPS: ErrorReason
ERROR_REASON_INVALID_CHAT: ErrorReason
ERROR_REASON_INVALID_RESUME: ErrorReason
ERROR_REASON_UNKNOWN_MODEL: ErrorReason
ERROR_REASON_UNKNOWN_REQUEST: ErrorReason
ERROR_REASON_UNKNOWN_BLOB: ErrorReason
ERROR_REASON_DUPLICATE_REQUEST: ErrorReason
ERROR_REASON_STALE_ATTEMPT: ErrorReason
ERROR_REASON_VERSION_MISMATCH: ErrorReason
ERROR_REASON_MODEL_MISMATCH: ErrorReason
ERROR_REASON_TOKENIZER_MISMATCH: ErrorReason
ERROR_REASON_SAMPLER_MISMATCH: ErrorReason
ERROR_REASON_PROTOCOL_VIOLATION: ErrorReason
ERROR_REASON_EPOCH_FENCED: ErrorReason
ERROR_REASON_STEP_GAP: ErrorReason
ERROR_REASON_SLOT_CONFLICT: ErrorReason
ERROR_REASON_PAGE_CONFLICT: ErrorReason
ERROR_REASON_GROUP_GENERATION: ErrorReason
ERROR_REASON_UNSUPPORTED: ErrorReason
ERROR_REASON_NEVER_FITS: ErrorReason
ERROR_REASON_OVERLOADED: ErrorReason
ERROR_REASON_JOURNAL_FULL: ErrorReason
ERROR_REASON_BLOB_TOO_LARGE: ErrorReason
ERROR_REASON_TOO_LARGE: ErrorReason
ERROR_REASON_NO_REPLICA: ErrorReason
ERROR_REASON_NOT_SERVING: ErrorReason
ERROR_REASON_GROUP_LOST: ErrorReason
ERROR_REASON_DEADLINE_EXCEEDED: ErrorReason
ERROR_REASON_STEP_TIMEOUT: ErrorReason
ERROR_REASON_CLIENT_STALLED: ErrorReason
ERROR_REASON_ABORTED: ErrorReason
ERROR_REASON_SUPERSEDED: ErrorReason
ERROR_REASON_INTERNAL: ErrorReason
ERROR_REASON_STEP_FAILED: ErrorReason
ERROR_REASON_BAD_CHECKPOINT: ErrorReason
ERROR_REASON_INVALID_GRAMMAR: ErrorReason
ERROR_REASON_RESNAPSHOT: ErrorReason
ERROR_REASON_UNAUTHENTICATED: ErrorReason
ERROR_REASON_PERMISSION_DENIED: ErrorReason
ERROR_REASON_RANKS_DIVERGED: ErrorReason
ERROR_REASON_TRANSFER_FAILED: ErrorReason
TASK_UNSPECIFIED: Task
TASK_GENERATE: Task
TASK_EMBED: Task
TASK_SCORE: Task
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_HANDED_OVER: FinishReason

class Error(_message.Message):
    __slots__ = ("reason", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("instance_id", "daemon", "min_contract_version", "max_contract_version", "model", "build")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DAEMON_FIELD_NUMBER: _ClassVar[int]
    MIN_CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTRACT_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    daemon: str
    min_contract_version: int
    max_contract_version: int
    model: ModelIdentity
    build: str
    def __init__(self, instance_id: _Optional[str] = ..., daemon: _Optional[str] = ..., min_contract_version: _Optional[int] = ..., max_contract_version: _Optional[int] = ..., model: _Optional[_Union[ModelIdentity, _Mapping]] = ..., build: _Optional[str] = ...) -> None: ...

class ModelIdentity(_message.Message):
    __slots__ = ("name", "model_fingerprint", "tokenizer_fingerprint", "grammar_format", "sampler_version", "vocab_size", "max_total_len", "eos_ids", "default_sampling")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FORMAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOTAL_LEN_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    grammar_format: str
    sampler_version: int
    vocab_size: int
    max_total_len: int
    eos_ids: bytes
    default_sampling: SamplingDefaults
    def __init__(self, name: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., grammar_format: _Optional[str] = ..., sampler_version: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_total_len: _Optional[int] = ..., eos_ids: _Optional[bytes] = ..., default_sampling: _Optional[_Union[SamplingDefaults, _Mapping]] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias_ids", "logit_bias_values", "temperature", "top_k", "top_p", "min_p", "seed", "num_top_logprobs", "prompt_logprobs", "prompt_logprobs_start")
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_START_FIELD_NUMBER: _ClassVar[int]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias_ids: bytes
    logit_bias_values: bytes
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_top_logprobs: int
    prompt_logprobs: bool
    prompt_logprobs_start: int
    def __init__(self, repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[bytes] = ..., logit_bias_values: _Optional[bytes] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., num_top_logprobs: _Optional[int] = ..., prompt_logprobs: bool = ..., prompt_logprobs_start: _Optional[int] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_ids", "ignore_eos", "include_stop", "skip_special_tokens")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_ids: bytes
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_ids: _Optional[bytes] = ..., ignore_eos: bool = ..., include_stop: bool = ..., skip_special_tokens: bool = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "structural_tag", "any_json", "thought")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    ANY_JSON_FIELD_NUMBER: _ClassVar[int]
    THOUGHT_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    ebnf: str
    structural_tag: str
    any_json: bool
    thought: Thought
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., structural_tag: _Optional[str] = ..., any_json: bool = ..., thought: _Optional[_Union[Thought, _Mapping]] = ...) -> None: ...

class Thought(_message.Message):
    __slots__ = ("begin", "end", "is_open", "is_always")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    IS_ALWAYS_FIELD_NUMBER: _ClassVar[int]
    begin: str
    end: str
    is_open: bool
    is_always: bool
    def __init__(self, begin: _Optional[str] = ..., end: _Optional[str] = ..., is_open: bool = ..., is_always: bool = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "cached_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_PREDICTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., accepted_prediction_tokens: _Optional[int] = ..., rejected_prediction_tokens: _Optional[int] = ...) -> None: ...

class Blob(_message.Message):
    __slots__ = ("hash", "data")
    HASH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    hash: str
    data: bytes
    def __init__(self, hash: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class EmbeddingSpan(_message.Message):
    __slots__ = ("blob_hash", "position", "num_tokens")
    BLOB_HASH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    blob_hash: str
    position: int
    num_tokens: int
    def __init__(self, blob_hash: _Optional[str] = ..., position: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("token_logprobs", "num_top", "top_ids", "top_logprobs")
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_logprobs: bytes
    num_top: int
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, token_logprobs: _Optional[bytes] = ..., num_top: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...
