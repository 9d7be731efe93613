"""A lower bound of a text's tokens from its bytes: what cannot fit is refused before any of it is encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import Tokenizer, pre_tokenizers

from radixmesh.daemons.runtime.tokenize.text_cuts import steps_of


def max_bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """UTF-8 bytes of text that one token stands for at most; None where no such bound is known to hold.

    It holds for BPE over all 256 bytes, where every byte of the text is in some token: a byte-level alphabet, or byte
    fallback with at most the replacements that never shorten a text (a space by U+2581). Normalizers that may shorten,
    models with an unknown token that may swallow a word, and added tokens that swallow white space have no bound.
    """
    spec = json.loads(tokenizer.to_str())
    model = spec["model"]
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in spec.get("added_tokens", ())):
        return None
    if not all(_never_shortens(step) for step in steps_of(spec.get("normalizer"), "normalizers")):
        return None
    splits = steps_of(spec.get("pre_tokenizer"), "pretokenizers")
    if not all(_keeps_all(step) for step in splits):
        return None
    vocab = model["vocab"]
    added = [len(token["content"].encode()) for token in spec.get("added_tokens", ())]
    if any(step.get("type") == "ByteLevel" for step in splits):
        # One letter of the alphabet is one byte.
        if not all(letter in vocab for letter in pre_tokenizers.ByteLevel.alphabet()):
            return None
        return max([*map(len, vocab), *added])
    if not model.get("byte_fallback") or any(f"<0x{byte:02X}>" not in vocab for byte in range(256)):
        return None
    return max([*(len(token.encode()) for token in vocab), *added])


def _never_shortens(step: Mapping[str, object]) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        return (
            isinstance(replaced, str) and isinstance(content, str) and len(content.encode()) >= len(replaced.encode())
        )
    return kind == "Prepend"


def _keeps_all(step: Mapping[str, object]) -> bool:
    kind = step.get("type")
    return kind in ("ByteLevel", "Metaspace", "Digits") or (kind == "Split" and step.get("behavior") != "Removed")
