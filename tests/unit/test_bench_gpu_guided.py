"""The vocabulary of the guided bench: every id of a shape, all bytes, and grammars that force what they say."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial

import pytest
from support.bench_modules import bench_imports

from radixmesh.daemons.runtime.guided.backend import GuidedVocabulary, load_backend
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.tokenizer.grammar.compiler import GrammarLimits

pytest.importorskip("xgrammar")
with bench_imports():
    from gpu import guided
    from gpu.guided import _masks, array_of
    from gpu.guided_vocabulary import write_vocabulary

SIZE = 4096


def _folder(tmp_path):
    config = {"model_type": "llama", "vocab_size": SIZE, "eos_token_id": SIZE - 255, "architectures": ["X"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_vocabulary(tmp_path, SIZE, num_bytes=100_000)
    return GuidedVocabulary.of(Vocabulary.load(tmp_path))


async def test_masks_of_tools_are_compiled_and_cached_however_small_the_cache(tmp_path, monkeypatch):
    """All of them after one another found none: a cache of the latest few has lost the first when it is asked again."""
    vocabulary = _folder(tmp_path)
    monkeypatch.setattr(guided, "GrammarLimits", partial(GrammarLimits, cache_bytes=700_000))
    found = await _masks(Namespace(tools=3), tmp_path, vocabulary)
    assert found["cache_hits"] == 3 and len(found["cached_us_p50_p99"]) == len(found["by_process_ms_p50_p99"]) == 2
    nothing = await _masks(Namespace(tools=0), tmp_path, vocabulary)
    assert nothing["cache_hits"] == 0 and nothing["cached_us_p50_p99"] == nothing["fill_us_p50_p99"] == []


def test_a_made_up_vocabulary_has_every_id_and_no_array_ends_early(tmp_path):
    vocabulary = _folder(tmp_path)
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
