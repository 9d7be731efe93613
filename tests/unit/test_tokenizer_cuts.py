"""Texts in parts: the ids of the whole, a bound that never refuses what fits, and an end as soon as it is certain."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_tokenizers import KINDS, byte_level, vocabulary_of
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.tokenize import text_codec, text_cuts
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_codec import Limits, TextCodec, TextItem
from radixmesh.daemons.runtime.tokenize.text_cuts import cutter_of, outer_ids
from radixmesh.daemons.runtime.tokenize.token_bounds import max_bytes_per_token

# Every class that a split tells apart, what composes under NFC, what is alike, contractions, and parts of added tokens.
PIECES = [
    *"ab'sSLéx字本。，,.  \n\n\t\r 1234+-/_<|>²Ⅷ\u064d\u0301A\u030a\u1100\u1161가\u11a8각😀\u00a0\u3000K\u212a",
    *("'s", "'LL", "<|user|>", "two words", "日本人", "  ", "\r\n", "rs", "ls", "sw", "日本"),
]


def tokenizer_of(split: tuple[str, ...], *, nfc: bool) -> Tokenizer:
    tokenizer = byte_level()
    if split != text_cuts.KNOWN_SPLITS[0]:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split]
        whole = [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(whole)
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(
        [AddedToken("rs", rstrip=True), AddedToken("ls", lstrip=True), AddedToken("sw", single_word=True)]
    )
    return tokenizer


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("split", text_cuts.KNOWN_SPLITS)
def test_parts_give_the_ids_of_the_whole(split: tuple[str, ...], nfc: bool) -> None:
    tokenizer = tokenizer_of(split, nfc=nfc)
    cutter = cutter_of(tokenizer)
    assert cutter is not None
    rng, num_parts = random.Random(7), 0
    for _ in range(1500):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 25)))
        parts = list(cutter.parts(text, 1))
        assert "".join(parts) == text
        num_parts += len(parts)
        ids = [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, (text, parts)
    assert num_parts > 3000


def test_what_is_not_known_is_not_cut() -> None:
    assert {name for name, make in KINDS.items() if cutter_of(make()) is not None} == {"byte_level"}
    for change in (
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Split(Regex("a+"), "isolated")},
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.NFKC()},
    ):
        tokenizer = byte_level()
        for name, step in change.items():
            setattr(tokenizer, name, step)
        assert cutter_of(tokenizer) is None, change


def test_a_long_text_has_its_special_tokens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_codec, "SLICE_CHARS", 100)
    tokenizer = byte_level()
    bos, eos = ("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[bos, eos])
    assert outer_ids(tokenizer) == ([bos[1]], [eos[1]])
    codec = TextCodec(vocabulary_of(tokenizer), ChatTemplate({}, {}), Limits())
    text = "It was the best of times, <s> it was the worst of times. 日本人、日本。 " * 20
    for add in (True, False):
        steps = codec.encode_steps([TextItem(text="a"), TextItem(text=text, add_special_tokens=add)])
        num_steps = 0
        try:
            while True:
                next(steps)
                num_steps += 1
        except StopIteration as end:
            assert end.value[1].ids.tolist() == tokenizer.encode(text, add_special_tokens=add).ids
        assert num_steps > 8


@given(text=st.text(max_size=60))
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_token_stands_for_more_bytes_than_the_bound(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    bound = max_bytes_per_token(tokenizer)
    assert bound is not None
    num_bytes = len(text.encode("utf-8", "replace"))
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) * bound >= num_bytes


def test_there_is_no_bound_where_text_may_vanish() -> None:
    assert {name for name, make in KINDS.items() if max_bytes_per_token(make())} == {"byte_level", "byte_fallback"}
    stripping = byte_level()
    stripping.add_tokens([AddedToken("x", lstrip=True)])
    lowering = byte_level()
    lowering.normalizer = normalizers.StripAccents()
    assert max_bytes_per_token(stripping) is None and max_bytes_per_token(lowering) is None


def test_what_cannot_fit_is_refused_unencoded_and_the_rest_as_soon_as_it_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codec = TextCodec(vocabulary_of(byte_level()), ChatTemplate({}, {}), Limits(max_text_bytes=64 << 20))
    encoded: list[int] = []
    encode = codec.encode_texts

    def counted(texts: list[str], add_special_tokens: bool) -> object:
        encoded.append(sum(map(len, texts)))
        return encode(texts, add_special_tokens)

    monkeypatch.setattr(codec, "encode_texts", counted)
    bound = max_bytes_per_token(byte_level())
    assert bound is not None
    (hopeless,) = codec.encode([TextItem(text="best of times " * 1_000_000)], max_tokens=1000)
    assert hopeless.error is not None and not sum(encoded)
    assert hopeless.error.metadata == {"prompt_tokens": str(-(-14_000_000 // bound)), "max_total_len": "1001"}
    (long,) = codec.encode([TextItem(text="x " * 500_000)], max_tokens=100_000)
    assert long.error is not None and long.error.reason == ErrorReason.ERROR_REASON_PROMPT_TOO_LONG
    assert sum(encoded) < 200_000
    (short,) = codec.encode([TextItem(text="x x")], max_tokens=4)
    assert short.error is None
    (refused,) = codec.encode([TextItem(text="x x x")], max_tokens=3)
    assert refused.error is not None and refused.error.metadata["max_total_len"] == "4"


def test_a_run_that_cannot_be_cut_is_bounded() -> None:
    codec = TextCodec(vocabulary_of(byte_level()), ChatTemplate({}, {}), Limits())
    results = codec.encode([TextItem(text="x" * ((1 << 20) + 1)), TextItem(text="a")])
    assert results[0].error is not None and results[0].error.reason == ErrorReason.ERROR_REASON_TOO_LARGE
    assert len(results[1].ids) == 2


def test_what_would_decode_to_too_much_is_refused() -> None:
    vocabulary = vocabulary_of(byte_level())
    codec = TextCodec(vocabulary, ChatTemplate({}, {}), Limits())
    longest = max(range(len(vocabulary.tokens)), key=lambda token: len(vocabulary.tokens[token]))
    for ids in ([5] * (text_codec.MAX_DECODED_IDS + 1), [longest] * (text_codec.MAX_DECODED_IDS - 1)):
        with pytest.raises(MeshError) as error:
            codec.decode([text_codec.as_ints(ids)], skip_special_tokens=True)
        assert error.value.reason == ErrorReason.ERROR_REASON_TOO_LARGE
