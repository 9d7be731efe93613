"""Byte-level BPE: tokens are strings of bytes, and text is their UTF-8.

The alphabet (GPT-2's) spells each byte as one printable character. Decoding maps tokens back to bytes, joins them and
reads UTF-8 with U+FFFD for what is none: what the tokenizers library's ByteLevel decoder does to a whole output, and
what an incremental UTF-8 decoder does to it piece by piece.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from dataclasses import dataclass

from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily, TextDecoder
from radixmesh.daemons.runtime.model_folder.token_bytes import byte_level_bytes, byte_level_table
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPieces:
    """By id: data, the token's bytes; texts, the same as text where it is whole UTF-8, else None."""

    data: Sequence[bytes]
    texts: Sequence[str | None]


class ByteLevelFamily(DecoderFamily):
    """Tables of every token's bytes, with and without the special tokens' text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        to_bytes = byte_level_table()
        data = [byte_level_bytes(token, to_bytes) for token in vocabulary.tokens]
        data += [b""] * (vocabulary.vocab_size - len(data))
        texts = [_whole_text(piece) for piece in data]
        self._all = TokenPieces(data=data, texts=texts)
        data, texts = list(data), list(texts)
        for i in vocabulary.special_ids:
            data[i], texts[i] = b"", ""
        self._plain = TokenPieces(data=data, texts=texts)

    def new_decoder(self, *, skip_special_tokens: bool, prompt_tail_ids: Sequence[int]) -> TextDecoder:
        """prompt_tail_ids change nothing: an output's text is that of its own bytes."""
        return ByteLevelDecoder(self._plain if skip_special_tokens else self._all, b"")


class ByteLevelDecoder(TextDecoder):
    """Keeps at most three bytes: the start of a UTF-8 sequence."""

    __slots__ = ("_data", "_kept", "_texts")

    def __init__(self, pieces: TokenPieces, kept: bytes) -> None:
        self._data = pieces.data
        self._texts = pieces.texts
        self._kept = kept

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            if not self._kept:
                text = self._texts[ids[0]]
                if text is not None:
                    return text
            data = self._kept + self._data[ids[0]]
        else:
            pieces = self._data
            data = self._kept + b"".join([pieces[i] for i in ids])
        text, used = utf_8_decode(data, "replace", False)
        self._kept = data[used:]
        return text

    def remainder(self) -> str:
        return self._kept.decode("utf-8", "replace") if self._kept else ""

    def fork(self) -> TextDecoder:
        return ByteLevelDecoder(TokenPieces(data=self._data, texts=self._texts), self._kept)


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
