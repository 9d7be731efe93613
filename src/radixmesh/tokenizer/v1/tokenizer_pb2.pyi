from radixmesh.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeRequest(_message.Message):
    __slots__ = ("items", "max_tokens", "tenant")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[EncodeItem]
    max_tokens: int
    tenant: str
    def __init__(self, items: _Optional[_Iterable[_Union[EncodeItem, _Mapping]]] = ..., max_tokens: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class EncodeEachRequest(_message.Message):
    __slots__ = ("call_id", "request", "trace_context")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRACE_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    request: EncodeRequest
    trace_context: str
    def __init__(self, call_id: _Optional[int] = ..., request: _Optional[_Union[EncodeRequest, _Mapping]] = ..., trace_context: _Optional[str] = ...) -> None: ...

class EncodeEachResponse(_message.Message):
    __slots__ = ("call_id", "response", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    response: EncodeResponse
    error: _common_pb2.Error
    def __init__(self, call_id: _Optional[int] = ..., response: _Optional[_Union[EncodeResponse, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class EncodeItem(_message.Message):
    __slots__ = ("text", "chat", "add_special_tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: ChatInput
    add_special_tokens: bool
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[ChatInput, _Mapping]] = ..., add_special_tokens: bool = ...) -> None: ...

class ChatInput(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "tools_json", "template_args_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    tools_json: str
    template_args_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: bool = ..., continue_final_message: bool = ..., tools_json: _Optional[str] = ..., template_args_json: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "extra_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    extra_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., extra_json: _Optional[str] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("items", "tokenizer_fingerprint")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[EncodedItem]
    tokenizer_fingerprint: str
    def __init__(self, items: _Optional[_Iterable[_Union[EncodedItem, _Mapping]]] = ..., tokenizer_fingerprint: _Optional[str] = ...) -> None: ...

class EncodedItem(_message.Message):
    __slots__ = ("ids", "rendered", "error")
    IDS_FIELD_NUMBER: _ClassVar[int]
    RENDERED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    rendered: str
    error: _common_pb2.Error
    def __init__(self, ids: _Optional[bytes] = ..., rendered: _Optional[str] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("ids", "skip_special_tokens", "tenant")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[bytes]
    skip_special_tokens: bool
    tenant: str
    def __init__(self, ids: _Optional[_Iterable[bytes]] = ..., skip_special_tokens: bool = ..., tenant: _Optional[str] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class CompileGrammarRequest(_message.Message):
    __slots__ = ("grammar", "timeout_ms", "tenant")
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    grammar: _common_pb2.Grammar
    timeout_ms: int
    tenant: str
    def __init__(self, grammar: _Optional[_Union[_common_pb2.Grammar, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., tenant: _Optional[str] = ...) -> None: ...

class CompileGrammarResponse(_message.Message):
    __slots__ = ("hash", "artefact", "grammar_format")
    HASH_FIELD_NUMBER: _ClassVar[int]
    ARTEFACT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FORMAT_FIELD_NUMBER: _ClassVar[int]
    hash: str
    artefact: bytes
    grammar_format: str
    def __init__(self, hash: _Optional[str] = ..., artefact: _Optional[bytes] = ..., grammar_format: _Optional[str] = ...) -> None: ...

class GetVocabularyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetVocabularyResponse(_message.Message):
    __slots__ = ("model", "special_ids", "has_chat_template", "tokens", "token_bytes", "chat_template")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelIdentity
    special_ids: bytes
    has_chat_template: bool
    tokens: _containers.RepeatedScalarFieldContainer[str]
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    chat_template: str
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelIdentity, _Mapping]] = ..., special_ids: _Optional[bytes] = ..., has_chat_template: bool = ..., tokens: _Optional[_Iterable[str]] = ..., token_bytes: _Optional[_Iterable[bytes]] = ..., chat_template: _Optional[str] = ...) -> None: ...
