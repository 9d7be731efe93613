"""The seam between token ids and text: how one output's ids become text while more of them arrive.

A family is what a vocabulary needs once (tables); a decoder is what one output needs. Families are picked by the kind
of the tokenizer's decoder: see `family_of`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.token_bytes import decoder_kinds
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary


class TextDecoder(ABC):
    """Turns the ids of one output into text, piece by piece.

    The text is a function of the ids alone: however they are split over calls, the pieces concatenate to the same.
    """

    __slots__ = ()

    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids add and that no later id can change. Ids lie within the vocabulary (the caller checks).

        What may still become another character (an incomplete UTF-8 sequence) is kept back, nothing else is.
        """

    @abstractmethod
    def remainder(self) -> str:
        """Text of what is kept back, as it reads if no id follows; the decoder stays as it is."""

    @abstractmethod
    def fork(self) -> TextDecoder:
        """An independent decoder at the same position. Its cost does not grow with the output."""


class DecoderFamily(ABC):
    """Makes decoders for one vocabulary; holds the tables they share."""

    @abstractmethod
    def new_decoder(self, *, skip_special_tokens: bool, prompt_tail_ids: Sequence[int]) -> TextDecoder:
        """A decoder at the start of an output. prompt_tail_ids: the prompt's last ids, context that shows no text."""


def family_of(vocabulary: Vocabulary, name: str | None = None) -> DecoderFamily:
    """The family that fits a vocabulary, or the one of that name ("byte_level", "prefix_diff").

    Raises MeshError UNSUPPORTED where the tokenizer's decoder gives text that later tokens take back.
    """
    return _FAMILIES[name or _family_name(vocabulary)](vocabulary)


def _byte_level(vocabulary: Vocabulary) -> DecoderFamily:
    from radixmesh.daemons.runtime.detokenize.byte_level import ByteLevelFamily

    return ByteLevelFamily(vocabulary)


def _prefix_diff(vocabulary: Vocabulary) -> DecoderFamily:
    from radixmesh.daemons.runtime.detokenize.prefix_diff import PrefixDiffFamily

    return PrefixDiffFamily(vocabulary)


_FAMILIES: Mapping[str, Callable[[Vocabulary], DecoderFamily]] = {
    "byte_level": _byte_level,
    "prefix_diff": _prefix_diff,
}
# Decoders whose text only grows at its end when a token is appended.
_GROWING = {"Metaspace", "WordPiece", "BPEDecoder", "Replace", "ByteFallback", "Fuse", "Strip"}


def _family_name(vocabulary: Vocabulary) -> str:
    kinds = decoder_kinds(vocabulary)
    if kinds == ("ByteLevel",):
        return "byte_level"
    unfit = sorted(set(kinds) - _GROWING)
    if unfit:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"this tokenizer decodes by {' then '.join(kinds)}; {', '.join(unfit)} cannot be decoded as tokens come",
            {"feature": "decoder " + "+".join(kinds)},
        )
    return "prefix_diff"
