"""Vocabularies like those of real models: byte-level BPE trained on the source of Python's own library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from radixmesh.daemons.runtime.guided.backend import GuidedVocabulary
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from support.small_tokenizers import write_folder

# Pieces that a vocabulary of any model has, and a small training text may lack.
_MORE = ("日本", '":', '",', '"}', '"]', "{}", "[]", "}}", "true", "false", "null", '{"', '["')


def trained_folder(folder: Path, size: int, num_bytes: int = 2_000_000) -> Path:
    """A model folder without weights, of a vocabulary of about `size` ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_bytes), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _MORE])
    return write_folder(folder, tokenizer)


def vocabulary_of(folder: Path) -> GuidedVocabulary:
    return GuidedVocabulary.of(Vocabulary.load(folder))


def _texts(num_bytes: int) -> Iterator[str]:
    for path in sorted(Path(os.__file__).parent.rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(errors="ignore")
        yield text
        num_bytes -= len(text)
        if num_bytes < 0:
            return
