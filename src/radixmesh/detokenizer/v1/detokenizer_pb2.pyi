from radixmesh.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DetokenizeRequest(_message.Message):
    __slots__ = ("hello", "opens", "tokens", "close_handles")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLOSE_HANDLES_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    opens: _containers.RepeatedCompositeFieldContainer[Open]
    tokens: TokenRows
    close_handles: bytes
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[Open, _Mapping]]] = ..., tokens: _Optional[_Union[TokenRows, _Mapping]] = ..., close_handles: _Optional[bytes] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("handle", "request_id", "prompt_tail_ids", "output_ids", "emitted_text_bytes", "stop", "eos_ids", "trace_context", "shares_with")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TAIL_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    EOS_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    SHARES_WITH_FIELD_NUMBER: _ClassVar[int]
    handle: int
    request_id: str
    prompt_tail_ids: bytes
    output_ids: bytes
    emitted_text_bytes: int
    stop: _common_pb2.StopParams
    eos_ids: bytes
    trace_context: str
    shares_with: int
    def __init__(self, handle: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_tail_ids: _Optional[bytes] = ..., output_ids: _Optional[bytes] = ..., emitted_text_bytes: _Optional[int] = ..., stop: _Optional[_Union[_common_pb2.StopParams, _Mapping]] = ..., eos_ids: _Optional[bytes] = ..., trace_context: _Optional[str] = ..., shares_with: _Optional[int] = ...) -> None: ...

class TokenRows(_message.Message):
    __slots__ = ("handles", "first_output_indexes", "counts", "ids", "finals")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_INDEXES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    FINALS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    first_output_indexes: bytes
    counts: bytes
    ids: bytes
    finals: bytes
    def __init__(self, handles: _Optional[bytes] = ..., first_output_indexes: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., finals: _Optional[bytes] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("hello", "rows", "failures")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    hello: _common_pb2.Hello
    rows: _containers.RepeatedCompositeFieldContainer[TextRow]
    failures: _containers.RepeatedCompositeFieldContainer[EntryFailure]
    def __init__(self, hello: _Optional[_Union[_common_pb2.Hello, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[TextRow, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[EntryFailure, _Mapping]]] = ...) -> None: ...

class TextRow(_message.Message):
    __slots__ = ("handle", "text_offset", "text", "num_tokens", "stop", "is_final")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_FIELD_NUMBER: _ClassVar[int]
    handle: int
    text_offset: int
    text: str
    num_tokens: int
    stop: StopMatch
    is_final: bool
    def __init__(self, handle: _Optional[int] = ..., text_offset: _Optional[int] = ..., text: _Optional[str] = ..., num_tokens: _Optional[int] = ..., stop: _Optional[_Union[StopMatch, _Mapping]] = ..., is_final: bool = ...) -> None: ...

class StopMatch(_message.Message):
    __slots__ = ("stop", "num_tokens")
    STOP_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stop: str
    num_tokens: int
    def __init__(self, stop: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class EntryFailure(_message.Message):
    __slots__ = ("handle", "is_lost", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    IS_LOST_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    is_lost: bool
    error: _common_pb2.Error
    def __init__(self, handle: _Optional[int] = ..., is_lost: bool = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...
