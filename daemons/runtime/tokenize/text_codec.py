"""Batches of texts and chats to ids, and ids to texts. No grpc, no event loop: run it in any thread."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.tokenize.chat import Chat
from radixmesh.daemons.runtime.tokenize.chat_template import MAX_RENDER_S, ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_cuts import cutter_of, outer_ids
from radixmesh.daemons.runtime.tokenize.token_bounds import max_bytes_per_token

_T = TypeVar("_T")
# Work in steps, each of which yields the bytes that the next one works on: see the tokenizer's WorkQueue.
Steps: TypeAlias = Generator[int, None, _T]

# Characters of a part: 10 to 30 ms of encoding.
SLICE_CHARS = 32 << 10
# UTF-8 bytes of a part that cannot be cut, 140 MiB of the library's memory: of a text without spaces, or whose
# tokenizer is none that text_cuts.py knows.
MAX_PART_BYTES = 1 << 20
_MAX_BATCH = 256
# Ids of one Decode, and the bytes that they decode to at most: the answer is one message.
MAX_DECODED_IDS = 1 << 20
MAX_DECODED_BYTES = 16 << 20
_UNCUT = (
    "a text with {} bytes in a row that cannot be encoded in parts (it has no spaces, or its tokenizer ignores them)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextItem:
    """A text, encoded as it is. add_special_tokens: with what the tokenizer puts around a text (BOS)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """max_items: of a batch. max_text_bytes: UTF-8 bytes of one text or rendered chat. max_messages: of one chat.
    max_render_s: CPU seconds of one rendering."""

    max_items: int = 4096
    max_text_bytes: int = 4 << 20
    max_messages: int = 4096
    max_render_s: float = MAX_RENDER_S


Item: TypeAlias = TextItem | Chat | MeshError


class Encoded(NamedTuple):
    """ids: int32 [tokens]. rendered: what the chat template gave, "" for texts. error: set if the item failed."""

    ids: IntArray
    rendered: str = ""
    error: MeshError | None = None


class TextCodec:
    """Encodes and decodes by one vocabulary. Thread-safe; the tokenizers library works outside the interpreter lock."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate, limits: Limits) -> None:
        self.vocabulary = vocabulary
        self.template = template
        self._limits = limits
        self._max_bytes_per_token = max_bytes_per_token(vocabulary.tokenizer)
        self._cutter = cutter_of(vocabulary.tokenizer)
        self._outer = outer_ids(vocabulary.tokenizer) if self._cutter is not None else ([], [])
        self._num_token_bytes = np.asarray([len(token.encode()) for token in vocabulary.tokens] or [0], np.int64)

    def encode(self, items: Sequence[Item], max_tokens: int = 0) -> list[Encoded]:
        """All steps of encode_steps() at once. Raises MeshError TOO_LARGE for too many items."""
        self.check_num_items(len(items))
        return run_whole(self.encode_steps(items, max_tokens))

    def encode_steps(self, items: Iterable[Item], max_tokens: int = 0) -> Steps[list[Encoded]]:
        """One answer per item, in order; an item that is or becomes an error leaves the others alone.

        max_tokens: an item of more is PROMPT_TOO_LONG; 0 = no bound. Yields before each step the bytes it works on.
        """
        answers: list[Encoded] = []
        # Small texts go to the library together, whose batches have one add_special_tokens.
        small: list[tuple[TextItem, str]] = []
        num_small = 0
        for item in items:
            ready = self._text_of(item, max_tokens)
            is_small = not isinstance(ready, MeshError) and len(ready[0].text) <= SLICE_CHARS
            if small and not (is_small and num_small < SLICE_CHARS and len(small) < _MAX_BATCH):
                answers += self._encode_small(small, max_tokens)
                small, num_small = [], 0
                yield 0
            if isinstance(ready, MeshError):
                answers.append(Encoded(empty_ints(), error=ready))
                continue
            text, rendered = ready
            if is_small:
                small.append(ready)
                num_small += len(text.text)
            else:
                ids: Encoded = yield from self._encode_long(text, max_tokens)
                answers.append(ids if ids.error else ids._replace(rendered=rendered))
        return answers + self._encode_small(small, max_tokens)

    def decode(self, batch: Sequence[IntArray], skip_special_tokens: bool) -> list[str]:
        """Texts of whole id arrays. Raises MeshError TOKEN_OUT_OF_VOCABULARY, or TOO_LARGE for too many."""
        self.check_num_items(len(batch))
        for item, ids in enumerate(batch):
            self._check_ids(ids, item)
        self._check_decoded(batch)
        lists = [ids.tolist() for ids in batch]
        return self.vocabulary.tokenizer.decode_batch(lists, skip_special_tokens=skip_special_tokens)

    def check_num_items(self, num_items: int) -> None:
        """Raises MeshError TOO_LARGE for more than a batch may hold."""
        if num_items > self._limits.max_items:
            raise _too_large(f"a batch of {num_items} items", num_items, self._limits.max_items)

    def _text_of(self, item: Item, max_tokens: int) -> tuple[TextItem, str] | MeshError:
        """The text to encode, and what of it a chat template rendered; or the item's error."""
        rendered = ""
        try:
            if isinstance(item, MeshError):
                return item
            if isinstance(item, Chat):
                rendered = self._render(item)
                item = TextItem(text=rendered, add_special_tokens=False)
            self._check_size(item.text, max_tokens)
        except MeshError as error:
            return error
        return item, rendered

    def _render(self, chat: Chat) -> str:
        if len(chat.messages) > self._limits.max_messages:
            raise _too_large(f"a chat of {len(chat.messages)} messages", len(chat.messages), self._limits.max_messages)
        # Somewhat beyond the limit a text is still rendered, so that the error can tell its size.
        limits = self._limits
        return self.template.render(chat, max_chars=2 * limits.max_text_bytes, max_s=limits.max_render_s)

    def _check_size(self, text: str, max_tokens: int) -> None:
        limit = self._limits.max_text_bytes
        fitting = max_tokens * self._max_bytes_per_token if max_tokens and self._max_bytes_per_token else limit
        # Characters first: only a text near a limit is worth encoding to count its bytes.
        if len(text) * 4 <= min(limit, fitting):
            return
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if num_bytes > limit:
            raise _too_large(f"a text of {num_bytes} bytes", num_bytes, limit)
        if num_bytes > fitting:
            assert self._max_bytes_per_token is not None
            raise _too_long(-(-num_bytes // self._max_bytes_per_token), max_tokens)

    def _encode_small(self, items: list[tuple[TextItem, str]], max_tokens: int) -> list[Encoded]:
        """items: texts, and beside each what a chat template rendered, "" for a text as it came."""
        found: dict[int, Encoded] = {}
        for add_special_tokens in (True, False):
            indexes = [i for i, (item, _) in enumerate(items) if item.add_special_tokens == add_special_tokens]
            encoded = self.encode_texts([items[i][0].text for i in indexes], add_special_tokens)
            for index, ids in zip(indexes, encoded, strict=True):
                if isinstance(ids, MeshError):
                    found[index] = Encoded(empty_ints(), error=ids)
                elif max_tokens and len(ids) > max_tokens:
                    found[index] = Encoded(empty_ints(), error=_too_long(len(ids), max_tokens))
                else:
                    found[index] = Encoded(ids, items[index][1])
        return [found[index] for index in range(len(items))]

    def _encode_long(self, item: TextItem, max_tokens: int) -> Steps[Encoded]:
        """In parts where the text can be cut, until it is clear that it does not fit."""
        before, behind = self._outer if item.add_special_tokens and self._cutter is not None else ([], [])
        found = [as_ints(before)] if before else []
        num_tokens = len(before) + len(behind)
        parts = iter([item.text]) if self._cutter is None else self._cutter.parts(item.text, SLICE_CHARS)
        for part in parts:
            num_bytes = len(part) if part.isascii() else len(part.encode())
            if num_bytes > MAX_PART_BYTES:
                return Encoded(empty_ints(), error=_too_large(_UNCUT.format(num_bytes), num_bytes, MAX_PART_BYTES))
            yield num_bytes
            (ids,) = self.encode_texts([part], item.add_special_tokens and self._cutter is None)
            if isinstance(ids, MeshError):
                return Encoded(empty_ints(), error=ids)
            found.append(ids)
            num_tokens += len(ids)
            if max_tokens and num_tokens > max_tokens:
                return Encoded(empty_ints(), error=_too_long(num_tokens, max_tokens))
        if behind:
            found.append(as_ints(behind))
        return Encoded(np.concatenate(found) if found else empty_ints())

    def encode_texts(self, texts: list[str], add_special_tokens: bool) -> list[IntArray | MeshError]:
        if not texts:
            return []
        tokenizer = self.vocabulary.tokenizer
        try:
            # encode_batch lets go of the interpreter lock, encode does not.
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # Whatever the library raises; one text spoils its batch.
            if len(texts) > 1:
                return [ids for text in texts for ids in self.encode_texts([text], add_special_tokens)]
            return [MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"this text cannot be encoded: {error}")]
        return [as_ints(encoding.ids) for encoding in encodings]

    def _check_decoded(self, batch: Sequence[IntArray]) -> None:
        num_ids = sum(len(ids) for ids in batch)
        if num_ids > MAX_DECODED_IDS:
            raise _too_large(f"a batch of {num_ids} ids", num_ids, MAX_DECODED_IDS)
        # Ids that only the model has read as nothing.
        last = len(self._num_token_bytes) - 1
        num_bytes = sum(int(self._num_token_bytes[np.minimum(ids, last)].sum()) for ids in batch)
        if num_bytes > MAX_DECODED_BYTES:
            raise _too_large(f"a batch that decodes to {num_bytes} bytes", num_bytes, MAX_DECODED_BYTES)

    def _check_ids(self, ids: IntArray, item: int) -> None:
        vocab_size = self.vocabulary.vocab_size
        bad = ((ids < 0) | (ids >= vocab_size)).nonzero()[0]
        if len(bad) == 0:
            return
        position = int(bad[0])
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
            f"token {ids[position]} of item {item} is outside the vocabulary of {vocab_size} ids",
            {"item": str(item), "position": str(position), "id": str(ids[position]), "vocab_size": str(vocab_size)},
        )


def _too_long(num_tokens: int, max_tokens: int) -> MeshError:
    # max_total_len: a prompt leaves room for one token of output.
    return MeshError(
        ErrorReason.ERROR_REASON_PROMPT_TOO_LONG,
        f"at least {num_tokens} prompt tokens leave no room in a context of {max_tokens + 1}: shorten the prompt",
        {"prompt_tokens": str(num_tokens), "max_total_len": str(max_tokens + 1)},
    )


def _too_large(what: str, size: int, limit: int) -> MeshError:
    message = f"{what} is more than the {limit} that this tokenizer takes: send less at once"
    return MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"size": str(size), "max": str(limit)})


def run_whole(steps: Steps[_T]) -> _T:
    """All steps of a call at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(_T, end.value)
