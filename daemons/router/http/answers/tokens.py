"""Tokens as texts: what logprobs, echoes and tool-makers want to read beside the ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from radixmesh.daemons.router.http.bodies.json_text import dump
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import unpack_ints
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError


class TokenTable:
    """By id: bytes, and a spelling that is text for every token ("bytes:\\xe5" for a part of a character).

    template: the chat template; "" = none."""

    def __init__(self, data: Sequence[bytes], special_ids: Sequence[int], template: str = "") -> None:
        self._data = data
        self._special_ids = frozenset(special_ids)
        self._special_texts = [text for text in map(self.spelling, self._special_ids) if text]
        self.template = template

    def data(self, token: int) -> bytes:
        """Bytes of a token inside a text; b"" for ids that the model has and its tokenizer does not."""
        return self._data[token] if 0 <= token < len(self._data) else b""

    def data_in_text(self, skips_special: bool) -> Callable[[int], bytes]:
        """data() of texts that leave special tokens out, or show them."""
        special_ids, data = self._special_ids, self.data
        return (lambda token: b"" if token in special_ids else data(token)) if skips_special else data

    def spelling(self, token: int) -> str:
        data = self.data(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def has_special_in(self, text: str) -> bool:
        """True if a special token's spelling is part of the text."""
        return any(special in text for special in self._special_texts)

    def is_special(self, token: int) -> bool:
        return token in self._special_ids


def prompt_ids_of(resolved: ResolvedRequest) -> msgspec.Raw:
    """The prompt's ids as JSON, written once for all choices: 128 of a long prompt would hold the event loop for more
    than a second."""
    return msgspec.Raw(dump(unpack_ints(resolved.prompt_ids, "prompt_ids").tolist()))


class TokenTables:
    """One table per vocabulary, asked of a tokenizer when it is first needed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tables: dict[str, TokenTable] = {}
        self._loading: dict[str, asyncio.Task[TokenTable]] = {}

    async def of(self, identity: ServedIdentity) -> TokenTable:
        """The table of a model. Raises NO_REPLICA, or TOKENIZER_MISMATCH where tokenizers have another vocabulary."""
        wanted = identity.tokenizer_fingerprint
        if (table := self._tables.get(wanted)) is not None:
            return table
        task = self._loading.get(wanted)
        if task is None:
            task = self._loading[wanted] = asyncio.create_task(self._load(identity))
            task.add_done_callback(lambda done: self._loaded(wanted, done))
        # All who wait share one attempt, and its failure. A client that leaves does not end it for others.
        return await asyncio.shield(task)

    def _loaded(self, wanted: str, task: asyncio.Task[TokenTable]) -> None:
        del self._loading[wanted]
        # An exception is read although all who waited may have left.
        if not task.cancelled() and task.exception() is None:
            self._tables[wanted] = task.result()

    async def _load(self, identity: ServedIdentity) -> TokenTable:
        vocabulary = await self._router.vocabulary()
        found = vocabulary.model.tokenizer_fingerprint
        if identity.tokenizer_fingerprint and found and found != identity.tokenizer_fingerprint:
            raise MeshError(
                ErrorReason.ERROR_REASON_TOKENIZER_MISMATCH,
                f"tokenizer and model {identity.name!r} have different vocabularies: start both on one folder",
                {"ours": found, "theirs": identity.tokenizer_fingerprint},
            )
        if len(vocabulary.token_bytes) != len(vocabulary.tokens):
            message = "the tokenizer does not tell what its tokens stand for: update it, or leave logprobs out"
            raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "logprobs"})
        special_ids = unpack_ints(vocabulary.special_ids, "special_ids").tolist()
        return TokenTable(tuple(vocabulary.token_bytes), special_ids, vocabulary.chat_template)
