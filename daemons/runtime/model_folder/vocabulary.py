"""The vocabulary of a model folder, as tokenizer and detokenizer both load it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import ModelIdentity, read_model_identity, tokenizer_fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A loaded tokenizer and what is known of it.

    tokenizer: truncation and padding are off; shared between threads, so nobody changes it.
    tokens: spelling by id, "" where the tokenizer has no such id. special_ids: ascending.
    vocab_size: ids of model and tokenizer; a model's vocabulary is often padded beyond its tokenizer's.
    """

    tokenizer: Tokenizer
    identity: ModelIdentity
    fingerprint: str
    tokens: Sequence[str]
    special_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Reads the folder. Raises MeshError BAD_CHECKPOINT, naming the file that is missing or broken."""
        identity = read_model_identity(folder)
        fingerprint = tokenizer_fingerprint(folder)
        path = folder / "tokenizer.json"
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain Exception for whatever it cannot parse.
            message = f"{path} is no tokenizer ({error}): it may need a newer version of the tokenizers library"
            raise MeshError(ErrorReason.ERROR_REASON_BAD_CHECKPOINT, message, {"file": str(path)}) from error
        return cls.of(tokenizer, identity, fingerprint)

    @classmethod
    def of(cls, tokenizer: Tokenizer, identity: ModelIdentity, fingerprint: str) -> Vocabulary:
        """Describes a tokenizer that is already in memory; turns its truncation and padding off."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        id_of = tokenizer.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(id_of.values(), default=-1) + 1)
        for token, i in id_of.items():
            tokens[i] = token
        added = tokenizer.get_added_tokens_decoder()
        return cls(
            tokenizer=tokenizer,
            identity=identity,
            fingerprint=fingerprint,
            tokens=tokens,
            special_ids=tuple(sorted(i for i, token in added.items() if token.special)),
            vocab_size=max(identity.vocab_size, len(tokens)),
        )
