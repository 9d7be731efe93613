"""Any other tokenizer: ask its own decoder for the text with and without the new tokens, and take the difference.

What a token adds depends on whether another goes before it (the first loses its leading space, "##ing" joins what it
follows), so the last shown token stays in the window as context. Tokens that show nothing (special ones when they are
skipped, ids that the tokenizer does not know) never enter it. The cost per token does not depend on the output.

Byte tokens (<0x0A>: byte fallback) are put together here. The library decodes a run of them at once, and one byte that
is no UTF-8 turns the whole run into U+FFFD, each byte into one. Characters that were whole are shown by then and are
not taken back; from the bad byte on, the run reads as the library reads it. So the text equals the full decode unless
a run is bad after its first whole character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily, TextDecoder
from radixmesh.daemons.runtime.model_folder.token_bytes import decoder_kinds
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Tokens of the prompt that are context at most: one matters, a few more guard against those that show nothing.
_MAX_TAIL = 8


class PrefixDiffFamily(DecoderFamily):
    """Ids that show, ids that are bytes, and a token to stand before text where the true one cannot."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = vocabulary.tokenizer
        known = {i for i, token in enumerate(vocabulary.tokens) if token}
        self._all = frozenset(known)
        self._plain = frozenset(known.difference(vocabulary.special_ids))
        self._byte_of = _byte_tokens(vocabulary) if "ByteFallback" in decoder_kinds(vocabulary) else {}
        self._neutral = _neutral_id(self._tokenizer, sorted(self._plain - self._byte_of.keys()))

    def new_decoder(self, *, skip_special_tokens: bool, prompt_tail_ids: Sequence[int]) -> TextDecoder:
        """The output's text is what it adds to the prompt's: without a tail its first token is the first of a text."""
        shown = self._plain if skip_special_tokens else self._all
        tail = [i for i in prompt_tail_ids[-_MAX_TAIL:] if i in shown]
        decoder = PrefixDiffDecoder(self._tokenizer, shown, self._byte_of, self._neutral)
        if tail:
            last = tail[-1]
            decoder.set_context(self._neutral if last in self._byte_of else last)
        return decoder


class PrefixDiffDecoder(TextDecoder):
    """Keeps one token of context and the bytes of one incomplete character."""

    __slots__ = ("_byte_of", "_context", "_context_len", "_is_broken", "_kept", "_neutral", "_shown", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, shown: frozenset[int], byte_of: Mapping[int, int], neutral: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._byte_of = byte_of
        self._neutral = neutral
        self._context: int | None = None
        self._context_len = 0
        self._kept: list[int] = []  # Byte tokens of an incomplete character.
        self._is_broken = False  # The run of byte tokens has a byte that is no UTF-8.

    def set_context(self, token_id: int | None) -> None:
        """Decodes all that follows as if after this token; None = as the first of a text."""
        self._context = token_id
        self._context_len = 0 if token_id is None else len(self._decode([token_id]))

    def push(self, ids: Sequence[int]) -> str:
        shown = self._shown
        ids = [i for i in ids if i in shown]
        if not ids:
            return ""
        byte_of = self._byte_of
        if not byte_of or not (self._kept or self._is_broken or not byte_of.keys().isdisjoint(ids)):
            return self._push_plain(ids)
        texts: list[str] = []
        run: list[int] = []  # Consecutive tokens that are no bytes.
        for i in ids:
            if i not in byte_of:
                if self._kept or self._is_broken:
                    texts.append(self._end_bytes())
                run.append(i)
                continue
            if run:
                texts.append(self._push_plain(run))
                run = []
            texts.append(self._push_byte(i))
        if run:
            texts.append(self._push_plain(run))
        return "".join(texts)

    def remainder(self) -> str:
        return "\ufffd" * len(self._kept)

    def fork(self) -> TextDecoder:
        twin = PrefixDiffDecoder(self._tokenizer, self._shown, self._byte_of, self._neutral)
        twin._context, twin._context_len = self._context, self._context_len
        twin._kept, twin._is_broken = self._kept.copy(), self._is_broken
        return twin

    def _push_plain(self, ids: list[int]) -> str:
        text = self._text_after_context(ids)
        self.set_context(ids[-1])
        return text

    def _push_byte(self, token_id: int) -> str:
        if self._is_broken:
            return "\ufffd"
        self._kept.append(token_id)
        data = bytes(self._byte_of[i] for i in self._kept)
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return ""
            self._is_broken = True
            self.set_context(self._neutral)
            return self._take_kept()
        text = self._text_after_context(self._kept)
        self._kept.clear()
        self.set_context(self._neutral)
        return text

    def _end_bytes(self) -> str:
        if self._kept:
            self.set_context(self._neutral)
        self._is_broken = False
        return self._take_kept()

    def _take_kept(self) -> str:
        text = self.remainder()
        self._kept.clear()
        return text

    def _text_after_context(self, ids: list[int]) -> str:
        if self._context is None:
            return self._decode(ids)
        return self._decode([self._context, *ids])[self._context_len :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _byte_tokens(vocabulary: Vocabulary) -> Mapping[int, int]:
    matches = ((i, _BYTE_TOKEN.fullmatch(token)) for i, token in enumerate(vocabulary.tokens))
    return {i: int(match[1], 16) for i, match in matches if match}


def _neutral_id(tokenizer: Tokenizer, candidates: Sequence[int]) -> int | None:
    """A token after which any other reads as in the middle of a text: it shows letters when it is the first."""
    for i in candidates:
        if tokenizer.decode([i], skip_special_tokens=False).strip().isalnum():
            return i
    return None
