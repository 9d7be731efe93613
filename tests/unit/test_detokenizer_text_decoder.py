"""The contract of TextDecoder: every family, every kind of tokenizer, arbitrary ids."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_tokenizers import BYTE_LETTERS, KINDS, TEXTS, vocabulary_of
from tokenizers import Tokenizer, decoders, models

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily, TextDecoder, family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary

KIND_NAMES = sorted(KINDS)


@cache
def vocabulary(kind: str) -> Vocabulary:
    return vocabulary_of(KINDS[kind]())


@cache
def family(kind: str) -> DecoderFamily:
    return family_of(vocabulary(kind))


def token_id(kind: str, token: str) -> int:
    found = vocabulary(kind).tokenizer.token_to_id(token)
    assert found is not None, token
    return found


def pieces_of(decoder: TextDecoder, ids: list[int], cuts: list[int]) -> str:
    borders = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return "".join(decoder.push(ids[a:b]) for a, b in itertools.pairwise(borders))


@st.composite
def kinds_and_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    kind = draw(st.sampled_from(KIND_NAMES))
    known = vocabulary(kind)
    any_id = st.integers(0, known.vocab_size - 1)
    if kind == "byte_level":
        text = st.text(max_size=8).map(lambda s: known.tokenizer.encode(s, add_special_tokens=False).ids)
        chunk = st.one_of(st.lists(any_id, max_size=6), text)
    elif kind == "byte_fallback":
        # A character goes in whole; the tokens that are no bytes lie between.
        plain = st.sampled_from([i for i, t in enumerate(known.tokens) if not t.startswith("<0x")])
        as_bytes = st.characters(exclude_categories=["Cs"]).map(
            lambda c: [token_id("byte_fallback", f"<0x{b:02X}>") for b in c.encode()]
        )
        chunk = st.one_of(st.lists(plain, max_size=4), as_bytes)
    else:
        chunk = st.lists(any_id, max_size=8)
    return kind, [i for ids in draw(st.lists(chunk, max_size=8)) for i in ids]


@given(kinds_and_ids(), st.lists(st.integers(0, 40)), st.booleans())
def test_pieces_concatenate_to_the_full_decode(
    case: tuple[str, list[int]], cuts: list[int], skip_special_tokens: bool
) -> None:
    kind, ids = case
    decoder = family(kind).new_decoder(skip_special_tokens=skip_special_tokens, prompt_tail_ids=[])
    text = pieces_of(decoder, ids, cuts) + decoder.remainder()
    assert text == vocabulary(kind).tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KIND_NAMES)
@given(data=st.data())
def test_how_ids_are_cut_never_matters(kind: str, data: st.DataObject) -> None:
    """Any ids at all, broken runs of byte tokens among them: text so far is a function of the ids so far."""
    ids = data.draw(st.lists(st.integers(0, vocabulary(kind).vocab_size - 1), max_size=24))
    cuts = data.draw(st.lists(st.integers(0, 24)))
    one = family(kind).new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    other = one.fork()
    assert "".join(one.push([i]) for i in ids) == pieces_of(other, ids, cuts)
    assert one.remainder() == other.remainder()


@pytest.mark.parametrize("kind", KIND_NAMES)
@given(data=st.data())
def test_a_fork_goes_its_own_way(kind: str, data: st.DataObject) -> None:
    any_ids = st.lists(st.integers(0, vocabulary(kind).vocab_size - 1), max_size=12)
    before, after, elsewhere = data.draw(any_ids), data.draw(any_ids), data.draw(any_ids)
    decoder = family(kind).new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    decoder.push(before)
    undisturbed = decoder.fork()
    decoder.fork().push(elsewhere)
    assert (decoder.push(after), decoder.remainder()) == (undisturbed.push(after), undisturbed.remainder())


@given(data=st.data())
def test_both_families_agree_where_both_apply(data: st.DataObject) -> None:
    """Without tokens that cut a character, asking the library for differences is as good as reading bytes."""
    known = vocabulary("byte_level")
    ascii_ids = [i for i, token in enumerate(known.tokens) if token.isascii() and token]
    ids = data.draw(st.lists(st.sampled_from(ascii_ids), max_size=20))
    naive = family_of(known, "prefix_diff").new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    exact = family_of(known, "byte_level").new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    assert [naive.push([i]) for i in ids] == [exact.push([i]) for i in ids]


@given(st.binary(max_size=12), st.lists(st.integers(0, 12)))
def test_bytes_that_are_no_utf8_read_as_in_the_full_decode(data: bytes, cuts: list[int]) -> None:
    known = vocabulary("byte_level")
    ids = [token_id("byte_level", BYTE_LETTERS[byte]) for byte in data]
    decoder = family("byte_level").new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    assert pieces_of(decoder, ids, cuts) + decoder.remainder() == data.decode("utf-8", "replace")
    assert known.tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_text_comes_out_as_soon_as_its_characters_are_whole() -> None:
    for text in TEXTS:
        ids = vocabulary("byte_level").tokenizer.encode(text, add_special_tokens=False).ids
        decoder = family("byte_level").new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
        shown = ""
        for index, i in enumerate(ids):
            shown += decoder.push([i])
            full = vocabulary("byte_level").tokenizer.decode(ids[: index + 1])
            assert shown == full.rstrip("\ufffd")
        assert shown == text


def test_a_broken_run_of_byte_tokens_keeps_what_was_shown() -> None:
    ids = [token_id("byte_fallback", f"<0x{byte:02X}>") for byte in "你".encode() + b"\xff" + b"a\xe4"]
    decoder = family("byte_fallback").new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    assert decoder.push(ids) + decoder.remainder() == "你" + "\ufffd" * 3
    # Broken from its first character on, a run reads as the library reads it.
    decoder = family("byte_fallback").new_decoder(skip_special_tokens=True, prompt_tail_ids=[])
    rest = [*ids[3:], token_id("byte_fallback", "a")]
    assert decoder.push(rest) == vocabulary("byte_fallback").tokenizer.decode(rest) == "\ufffd\ufffd\ufffda"


@pytest.mark.parametrize(
    ("kind", "tail", "first", "alone", "after"),
    [
        ("byte_fallback", "a", "▁hello", "hello", " hello"),
        ("byte_fallback", "<0x41>", "▁hello", "hello", " hello"),
        ("metaspace", "a", "▁hello", "hello", " hello"),
        ("word_piece", "the", "best", "best", " best"),
        ("word_end", "the</w>", "a", "a", " a"),
        ("no_decoder", "word", "a", "a", " a"),
        ("byte_level", "a", "Ġthe", " the", " the"),
        ("byte_fallback", "<s>", "▁hello", "hello", "hello"),
    ],
)
def test_the_prompts_tail_is_context(kind: str, tail: str, first: str, alone: str, after: str) -> None:
    for prompt_tail_ids, expected in (([], alone), ([token_id(kind, tail)], after)):
        decoder = family(kind).new_decoder(skip_special_tokens=True, prompt_tail_ids=prompt_tail_ids)
        assert decoder.push([token_id(kind, first)]) == expected


def test_a_decoder_that_takes_text_back_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<pad>": 1}, unk_token="<pad>"))
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(MeshError) as error:
        family_of(vocabulary_of(tokenizer))
    assert error.value.reason == ErrorReason.ERROR_REASON_UNSUPPORTED
    assert error.value.metadata == {"feature": "decoder CTC"}
