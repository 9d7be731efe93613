"""The vocabulary of the guided bench: every id of a shape, all bytes, and grammars that force what they say."""

from __future__ import annotations

import json

import pytest
from support.bench_modules import bench_imports

from radixmesh.daemons.runtime.guided.backend import GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

pytest.importorskip("xgrammar")
with bench_imports():
    from gpu.guided import array_of
    from gpu.guided_vocabulary import write_vocabulary

SIZE = 4096


def test_a_made_up_vocabulary_has_every_id_and_no_array_ends_early(tmp_path):
    config = {"model_type": "llama", "vocab_size": SIZE, "eos_token_id": SIZE - 255, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_vocabulary(tmp_path, SIZE, num_bytes=100_000)
    vocabulary = GuidedVocabulary.of(Vocabulary.load(tmp_path))
    texts = vocabulary.token_bytes[: SIZE - 256]
    assert all(texts) and len(set(texts)) == len(texts) and {bytes([byte]) for byte in range(256)} <= set(texts)
    assert vocabulary.vocab_size == SIZE and vocabulary.eos_ids == (SIZE - 255,)
    backend = load_backend("xgrammar", vocabulary)
    num_tokens = 20
    schema = array_of({"a": {"enum": [1]}}, num_tokens)
    matcher = backend.load(backend.compile(GrammarSource(GrammarForm.JSON_SCHEMA, schema))).matcher()
    text = ('[{"a": 1}' + ', {"a": 1}' * (num_tokens - 2)).encode()
    assert all(matcher.accept(token) for token in backend.tokens.encode(text))
    assert not matcher.accept(SIZE - 255) and not matcher.accept(backend.tokens.encode(b"]")[0])
