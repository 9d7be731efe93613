"""Batches of texts and chats to ids, and ids to texts. No grpc, no event loop: run it in any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray, as_ints, empty_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.vocabulary import Vocabulary
from radixmesh.daemons.tokenizer.chat import Chat
from radixmesh.daemons.tokenizer.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class TextItem:
    """A text, encoded as it is. add_special_tokens: with what the tokenizer puts around a text (BOS)."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """max_items: of a batch. max_text_bytes: UTF-8 bytes of one text or rendered chat. max_messages: of one chat."""

    max_items: int = 4096
    max_text_bytes: int = 4 << 20
    max_messages: int = 4096


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

    def encode(self, items: Sequence[TextItem | Chat | MeshError]) -> list[Encoded]:
        """One answer per item, in order; an item that is or becomes an error leaves the others alone.

        Raises MeshError TOO_LARGE for too many items.
        """
        self.check_num_items(len(items))
        results: dict[int, Encoded] = {}
        # The library takes one add_special_tokens a batch.
        batches: dict[bool, list[tuple[int, str, str]]] = {True: [], False: []}
        for place, item in enumerate(items):
            try:
                if isinstance(item, MeshError):
                    raise item
                if isinstance(item, Chat):
                    text = self._render(item)
                    batches[False].append((place, text, text))
                else:
                    self._check_size(item.text)
                    batches[item.add_special_tokens].append((place, item.text, ""))
            except MeshError as error:
                results[place] = Encoded(empty_ints(), "", error)
        for add_special_tokens, batch in batches.items():
            encoded = self._encode_texts([text for _, text, _ in batch], add_special_tokens)
            for (place, _, rendered), ids in zip(batch, encoded, strict=True):
                results[place] = (
                    Encoded(empty_ints(), error=ids) if isinstance(ids, MeshError) else Encoded(ids, rendered)
                )
        return [results[place] for place in range(len(items))]

    def decode(self, batch: Sequence[IntArray], skip_special_tokens: bool) -> list[str]:
        """Texts of whole id arrays. Raises MeshError TOKEN_OUT_OF_VOCABULARY, or TOO_LARGE for too many items."""
        self.check_num_items(len(batch))
        for item, ids in enumerate(batch):
            self._check_ids(ids, item)
        lists = [ids.tolist() for ids in batch]
        return self.vocabulary.tokenizer.decode_batch(lists, skip_special_tokens=skip_special_tokens)

    def check_num_items(self, num_items: int) -> None:
        """Raises MeshError TOO_LARGE for more than a batch may hold."""
        if num_items > self._limits.max_items:
            raise _too_large(f"a batch of {num_items} items", num_items, self._limits.max_items)

    def _render(self, chat: Chat) -> str:
        if len(chat.messages) > self._limits.max_messages:
            raise _too_large(f"a chat of {len(chat.messages)} messages", len(chat.messages), self._limits.max_messages)
        text = self.template.render(chat)
        self._check_size(text)
        return text

    def _check_size(self, text: str) -> None:
        limit = self._limits.max_text_bytes
        # Characters first: only a text near the limit is worth encoding to count its bytes.
        if len(text) * 4 <= limit:
            return
        num_bytes = len(text) if text.isascii() else len(text.encode())
        if num_bytes > limit:
            raise _too_large(f"a text of {num_bytes} bytes", num_bytes, limit)

    def _encode_texts(self, texts: list[str], add_special_tokens: bool) -> list[IntArray | MeshError]:
        tokenizer = self.vocabulary.tokenizer
        try:
            # encode_batch lets go of the interpreter lock, encode does not.
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except Exception as error:  # Whatever the library raises; one text spoils its batch.
            if len(texts) > 1:
                return [ids for text in texts for ids in self._encode_texts([text], add_special_tokens)]
            return [MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, f"this text cannot be encoded: {error}")]
        return [as_ints(encoding.ids) for encoding in encodings]

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


def _too_large(what: str, size: int, limit: int) -> MeshError:
    message = f"{what} is more than the {limit} that this tokenizer takes: send less at once"
    return MeshError(ErrorReason.ERROR_REASON_TOO_LARGE, message, {"size": str(size), "max": str(limit)})
