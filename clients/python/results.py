"""Results of a client: chunks of streams and whole completions."""

from __future__ import annotations

from dataclasses import dataclass, field

from radixmesh.client.errors import RadixMeshError, error_from_proto
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import unpack_floats, unpack_ints
from radixmesh.router.v1 import router_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural logarithms of the model's own distribution, one entry a token. top_ids, top_logprobs: the alternatives
    asked for, most likely first."""

    token_logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)

    @classmethod
    def from_proto(cls, message: common_pb2.Logprobs) -> Logprobs:
        tokens = unpack_floats(message.token_logprobs, "token_logprobs").tolist()
        shape = (len(tokens), message.num_top)
        return cls(
            token_logprobs=tokens,
            top_ids=unpack_ints(message.top_ids, "top_ids").reshape(shape).tolist(),
            top_logprobs=unpack_floats(message.top_logprobs, "top_logprobs").reshape(shape).tolist(),
        )

    def after(self, num_tokens: int) -> Logprobs:
        """The entries of all but the first num_tokens tokens."""
        if not num_tokens:
            return self
        return Logprobs(
            token_logprobs=self.token_logprobs[num_tokens:],
            top_ids=self.top_ids[num_tokens:],
            top_logprobs=self.top_logprobs[num_tokens:],
        )

    def extend(self, more: Logprobs) -> None:
        """Appends the entries of tokens that follow."""
        self.token_logprobs.extend(more.token_logprobs)
        self.top_ids.extend(more.top_ids)
        self.top_logprobs.extend(more.top_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one output. cached_tokens: prompt tokens whose KV was found in the cache."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Ending of an output. reason: "stop", "length", "abort" or "error". stop, stop_id: what ended it, if that did."""

    reason: str
    usage: Usage
    stop: str = ""
    stop_id: int | None = None
    error: RadixMeshError | None = None

    @classmethod
    def from_proto(cls, message: router_pb2.OutputFinished) -> Finish:
        name = common_pb2.FinishReason.Name(message.reason)
        return cls(
            reason=name.removeprefix("FINISH_REASON_").lower(),
            usage=Usage(
                prompt_tokens=message.usage.prompt_tokens,
                output_tokens=message.usage.output_tokens,
                cached_tokens=message.usage.cached_tokens,
            ),
            stop=message.stop,
            stop_id=message.stop_id if message.HasField("stop_id") else None,
            error=error_from_proto(message.error) if message.HasField("error") else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New output of one index. Text may lag behind ids; finish is set on an index's last chunk."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish: Finish | None = None


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One whole output."""

    index: int
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish: Finish | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.ids.extend(chunk.ids)
        if chunk.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = Logprobs()
            self.logprobs.extend(chunk.logprobs)
        self.finish = chunk.finish or self.finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All outputs of a request, in order of index."""

    request_id: str
    model: str
    prompt_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: Logprobs | None = None

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that the mesh serves. base_model: set for adapters. num_schedulers: how many serve it now."""

    name: str
    base_model: str
    vocab_size: int
    max_total_len: int
    num_schedulers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Ids of a text or chat. rendered: the text that the model's chat template made; empty for texts."""

    ids: list[int]
    rendered: str = ""
