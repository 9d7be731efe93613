"""The seam to a library that compiles grammars and follows them token by token."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

import numpy as np
import numpy.typing as npt

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.source import GrammarSource, invalid_grammar
from radixmesh.daemons.runtime.model_folder.token_bytes import token_bytes
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

MaskWords = npt.NDArray[np.int32]
"""A bit a token, [ceil(vocab_size / 32)]: bit i of word w is id 32 w + i; 1 = the token may follow."""

_MODULES = {
    "xgrammar": "radixmesh.daemons.runtime.guided.xgrammar_backend",
    "llguidance": "radixmesh.daemons.runtime.guided.llguidance_backend",
}
BACKENDS = tuple(_MODULES)
# Words of a mask with a token in them, at most, where a text may be forced: its beginnings are not many.
_MOST_WORDS = 64


@dataclass(frozen=True, slots=True)
class GuidedVocabulary:
    """token_bytes: what each id stands for in text; b"" for those that stand for nothing (special tokens, unused ids).

    eos_ids: what may follow a complete text. vocab_size: ids of the model's logits, at least len(token_bytes).
    """

    token_bytes: Sequence[bytes]
    eos_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> GuidedVocabulary:
        """Special tokens never match text: a string that reads "<|im_end|>" is made of ordinary tokens."""
        texts = token_bytes(vocabulary)
        for special in vocabulary.special_ids:
            texts[special] = b""
        for eos in vocabulary.identity.eos_ids:
            if eos < len(texts):
                texts[eos] = b""
        return cls(texts, tuple(vocabulary.identity.eos_ids), vocabulary.vocab_size)


class GreedyTokens:
    """Texts as tokens, the longest first: mostly as the model's own tokenizer cuts them, and always their bytes."""

    def __init__(self, vocabulary: GuidedVocabulary) -> None:
        self._texts = vocabulary.token_bytes
        # -1: of a token that stands for no text.
        self._first_bytes = np.array([text[0] if text else -1 for text in self._texts], np.int16)
        self._ids = {text: token for token, text in enumerate(vocabulary.token_bytes) if text}
        self._longest = max(map(len, self._ids))
        bytes_alone = np.array([token for text, token in self._ids.items() if len(text) == 1], np.int32)
        self._byte_words, self._byte_bits = bytes_alone >> 5, bytes_alone & 31

    def encode(self, text: bytes, most: int = sys.maxsize) -> list[int]:
        """At most so many tokens. Bytes that no token stands for are left out."""
        ids: list[int] = []
        start = 0
        while start < len(text) and len(ids) < most:
            for end in range(min(len(text), start + self._longest), start, -1):
                token = self._ids.get(text[start:end])
                if token is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                start += 1
        return ids

    def forced(self, allowed: npt.NDArray[np.bool_]) -> int | None:
        """The longest allowed token (bool [vocabulary]) of the text that must come next; None where there is a choice.

        Each allowed token is a beginning of that token's text, or goes on behind it. The text may end within the token.
        """
        return self._forced(np.flatnonzero(allowed))

    def forced_by(self, words: MaskWords) -> int | None:
        """The same of a mask; also None where so many tokens are allowed that a look at them all would take long."""
        indexes = np.flatnonzero(words)
        if len(indexes) > _MOST_WORDS:
            return None
        bits = np.unpackbits(words[indexes].view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
        which, bit = np.nonzero(bits)
        return self._forced(32 * indexes[which] + bit)

    def may_force(self, words: npt.NDArray[np.int32], rows: Sequence[int] | npt.NDArray[np.int32]) -> list[bool]:
        """False of each of these masks, rows of int32 [any, words], that allows two single bytes: it forces no text."""
        bits = words[np.asarray(rows, np.int64)[:, None], self._byte_words] >> self._byte_bits & 1
        may_be: list[bool] = (bits.sum(axis=1) < 2).tolist()
        return may_be

    def _forced(self, ids: npt.NDArray[np.intp]) -> int | None:
        if not len(ids) or ids[-1] >= len(self._texts):
            return None
        first_bytes = self._first_bytes[ids]
        if first_bytes[0] < 0 or (first_bytes != first_bytes[0]).any():
            return None
        id_of = {self._texts[token]: token for token in ids.tolist()}
        *others, last = sorted(id_of)
        # In this order what a text shares with the last one never gets shorter: the first that branches off decides.
        branch = next((text for text in others if not last.startswith(text)), last)
        pairs = enumerate(zip(branch, last, strict=False))
        end = next((index for index, (one, other) in pairs if one != other), len(branch))
        return next((id_of[last[:size]] for size in range(end, 0, -1) if last[:size] in id_of), None)


class GrammarMatcher(ABC):
    """One output on its way through its grammar. One thread at a time."""

    fill_threads: int = 1
    """Threads of the library's own, without the interpreter's lock, among which fill_all() shares many masks."""

    @abstractmethod
    def fill(self, words: MaskWords) -> None:
        """Writes which tokens may come next; EOS ids are among them where the text may end."""

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Goes on by one token. False, and nothing changed, if the grammar does not allow it."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Takes the last accepted tokens back."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """An EOS id was accepted: nothing follows."""

    @staticmethod
    def accept_all(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        """accept() of several matchers of one backend, none of which is over."""
        return [matcher.accept(token) for matcher, token in zip(matchers, tokens, strict=True)]

    @staticmethod
    def over_among(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[int]:
        """Indexes of those that are over, of matchers that have just gone over these tokens."""
        return [index for index, matcher in enumerate(matchers) if matcher.is_over]

    @staticmethod
    def fill_all(matchers: Sequence[GrammarMatcher], words: npt.NDArray[np.int32], rows: Sequence[int]) -> None:
        """fill() of several matchers of one backend, none of which is over, into these rows of int32 [any, words]."""
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(words[row])


class CompiledGrammar(ABC):
    """Shared by all outputs that follow it."""

    num_bytes: int
    """Memory that it takes."""

    @abstractmethod
    def matcher(self) -> GrammarMatcher:
        """At the start of a text."""


class GrammarBackend(ABC):
    """A library with a vocabulary. format: name and version of its artefacts, e.g. "xgrammar/0.2.8"."""

    format: str
    tokens: GreedyTokens
    """The vocabulary, for texts that a grammar forces."""

    @abstractmethod
    def compile(self, source: GrammarSource) -> bytes:
        """The artefact, which begins with the format and a newline; equal sources give equal bytes.

        Raises INVALID_GRAMMAR for what it cannot express, MemoryError beyond the process's limit. May take any time and
        memory: called in a process of its own.
        """

    def load(self, artefact: bytes) -> CompiledGrammar:
        """Raises INVALID_GRAMMAR for bytes that are no artefact of this format and vocabulary."""
        head, _, data = artefact.partition(b"\n")
        if head != self.format.encode():
            given = head[:64].decode(errors="replace")
            message = f"the grammar is of format {given!r}, this worker follows {self.format!r}: compile it anew"
            raise invalid_grammar(message, "format")
        return self._read(data)

    def use_one_thread(self) -> None:
        """From now on masks are filled on the calling thread alone: this process is one of several that do."""
        return

    @abstractmethod
    def _read(self, data: bytes) -> CompiledGrammar:
        """data: the artefact behind its format. Raises INVALID_GRAMMAR."""


def installed_format(name: str) -> str:
    """The format of a backend's artefacts, without importing its library, which takes seconds; "" = not installed."""
    try:
        return f"{name}/{metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return ""


def load_backend(name: str, vocabulary: GuidedVocabulary) -> GrammarBackend:
    """Raises MeshError UNSUPPORTED where the library is not installed."""
    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        message = f"guided decoding needs {name} ({error}): install radixmesh[guided]"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "grammar"}) from error
    backend: GrammarBackend = module.make_backend(vocabulary)
    return backend
