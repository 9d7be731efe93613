"""The bytes that each token of a vocabulary stands for inside a text.

Byte-level alphabets (GPT-2's) spell each byte as one printable character. Byte fallback spells single bytes as <0xNN>,
beside tokens whose spaces are U+2581. Of any other kind of tokenizer a token's bytes are its own decoding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """By id, as many as the vocabulary has tokens. A special token stands for its own spelling."""
    kinds = decoder_kinds(vocabulary)
    added = vocabulary.tokenizer.get_added_tokens_decoder()
    if kinds == ("ByteLevel",):
        to_bytes = byte_level_table()
        found = [byte_level_bytes(token, to_bytes) for token in vocabulary.tokens]
    elif "ByteFallback" in kinds:
        found = [_fallback_bytes(token) for token in vocabulary.tokens]
    else:
        ids = [[i] for i in range(len(vocabulary.tokens))]
        texts = vocabulary.tokenizer.decode_batch(ids, skip_special_tokens=False)
        found = [text.encode("utf-8", "replace") for text in texts]
    for i, token in added.items():
        if token.special:
            found[i] = token.content.encode()
    return found


def byte_level_table() -> Mapping[int, int]:
    """str.translate table from the byte-level alphabet to U+0000-U+00FF, the byte values.

    Printable Latin-1 characters stand for themselves, the others for U+0100 and up in order. What is below U+0100 and
    not in the alphabet goes to a character that no byte has.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {code: code if code in printable else 0xFFFF for code in range(256)}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({0x100 + rank: byte for rank, byte in enumerate(others)})
    return table


def byte_level_bytes(token: str, to_bytes: Mapping[int, int]) -> bytes:
    """A token with any character outside the alphabet (an added token, as a rule) stands for itself as a whole."""
    try:
        return token.translate(to_bytes).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def decoder_kinds(vocabulary: Vocabulary) -> tuple[str, ...]:
    """Kinds of the tokenizer's decoder steps in order, e.g. ("Replace", "ByteFallback", "Fuse", "Strip")."""
    decoder = vocabulary.tokenizer.decoder
    if decoder is None:
        return ()
    return _kinds_in(json.loads(decoder.__getstate__()))


def _fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("\u2581", " ").encode()


def _kinds_in(state: Mapping[str, object]) -> tuple[str, ...]:
    if state.get("type") != "Sequence":
        return (str(state.get("type")),)
    steps = state.get("decoders")
    assert isinstance(steps, list), state
    return tuple(kind for step in steps for kind in _kinds_in(step))
