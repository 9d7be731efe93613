"""Batches of texts and chats, and their limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_tokenizers import byte_level, vocabulary_of
from tokenizers import Tokenizer, models

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import as_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.tokenize.chat import Chat
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_codec import Limits, TextCodec, TextItem

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
TEMPLATE = ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": "<s>"})


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_of(byte_level())


@pytest.fixture(scope="module")
def codec(vocabulary: Vocabulary) -> TextCodec:
    return TextCodec(vocabulary, TEMPLATE, Limits(max_items=8, max_text_bytes=64, max_messages=2))


def test_items_are_answered_in_order_and_fail_alone(codec: TextCodec, vocabulary: Vocabulary) -> None:
    wrong = MeshError(ErrorReason.ERROR_REASON_MISSING_FIELD, "set text or chat")
    results = codec.encode(
        [
            TextItem(text="a"),
            Chat(messages=[{"role": "user", "content": "a"}]),
            wrong,
            TextItem(text="a", add_special_tokens=False),
            TextItem(text="x" * 65),
            TextItem(text="é" * 33),
            Chat(messages=[{"role": "user", "content": "y" * 70}]),
            Chat(messages=[{"role": "user", "content": "z"}] * 3),
        ]
    )
    bos, a = vocabulary.tokenizer.token_to_id("<s>"), vocabulary.tokenizer.token_to_id("a")
    assert [result.ids.tolist() for result in results] == [[bos, a], [bos, a], [], [a], [], [], [], []]
    assert [result.rendered for result in results] == ["", "<s>a", "", "", "", "", "", ""]
    assert results[2].error is wrong
    too_large = [result.error.metadata for result in results[4:] if result.error]
    assert too_large == [{"size": s, "max": m} for s, m in (("65", "64"), ("66", "64"), ("73", "64"), ("3", "2"))]
    assert all(result.error.reason == ErrorReason.ERROR_REASON_TOO_LARGE for result in results[4:] if result.error)


def test_a_batch_has_a_limit(codec: TextCodec) -> None:
    assert codec.encode([]) == []
    with pytest.raises(MeshError) as error:
        codec.encode([TextItem(text="a")] * 9)
    assert error.value.reason == ErrorReason.ERROR_REASON_TOO_LARGE


@given(texts=st.lists(st.text(max_size=15), max_size=8))
def test_texts_come_back_whole(codec: TextCodec, texts: list[str]) -> None:
    encoded = codec.encode([TextItem(text=text) for text in texts])
    assert all(item.ids.dtype == np.int32 for item in encoded)
    # Special tokens that a text spells out are encoded as such, and do not show.
    shown = [text.replace("<s>", "").replace("</s>", "") for text in texts]
    assert codec.decode([item.ids for item in encoded], skip_special_tokens=True) == shown


def test_one_text_that_the_library_refuses_does_not_spoil_its_batch() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    codec = TextCodec(vocabulary_of(tokenizer), TEMPLATE, Limits())
    results = codec.encode([TextItem(text="a"), TextItem(text="b"), TextItem(text="a")])
    assert [result.ids.tolist() for result in results] == [[0], [], [0]]
    assert results[1].error is not None
    assert results[1].error.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_not_decoded(codec: TextCodec, bad: int) -> None:
    with pytest.raises(MeshError) as error:
        codec.decode([as_ints([1]), as_ints([1, bad])], skip_special_tokens=True)
    assert error.value.reason == ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY
    assert (error.value.metadata["item"], error.value.metadata["position"]) == ("1", "1")


def test_ids_that_only_the_model_has_read_as_nothing(codec: TextCodec, vocabulary: Vocabulary) -> None:
    assert codec.decode([as_ints([vocabulary.vocab_size - 1])], skip_special_tokens=False) == [""]


def test_the_tiny_model_encodes_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(TINY)
    codec = TextCodec(Vocabulary.load(TINY), ChatTemplate.load(TINY), Limits())
    texts = ["It was the best of times", "", " é日本😀\n\n", "</s><s>"]
    chat = [{"role": "user", "content": "Who are you?"}]
    results = codec.encode(
        [
            *(TextItem(text=text) for text in texts),
            *(TextItem(text=text, add_special_tokens=False) for text in texts),
            Chat(messages=chat),
        ]
    )
    expected = [oracle(text).input_ids for text in texts]
    expected += [oracle(text, add_special_tokens=False).input_ids for text in texts]
    expected.append(oracle.apply_chat_template(chat, add_generation_prompt=True, tokenize=True).input_ids)
    assert [result.ids.tolist() for result in results] == expected
