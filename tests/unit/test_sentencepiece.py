"""SentencePiece vocabularies with byte fallback and added tokens, from text to ids and back, piece by piece."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.small_tokenizers import SENTENCEPIECE_KINDS, TEXTS, vocabulary_of

from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary
from radixmesh.daemons.runtime.tokenize.chat_template import ChatTemplate
from radixmesh.daemons.runtime.tokenize.text_codec import Limits, TextCodec, TextItem

_KINDS = sorted(SENTENCEPIECE_KINDS)
# Of each kind: special tokens, and those that are added to the vocabulary and show in texts.
_SPECIAL = {"bpe": "<start_of_turn>", "unigram": "</s>"}
_ADDED = {"bpe": ("\n\n", "unused99"), "unigram": ("<extra_id_0>",)}


@cache
def _vocabulary(kind: str) -> Vocabulary:
    return vocabulary_of(SENTENCEPIECE_KINDS[kind]())


def _encode(kind: str, text: str) -> list[int]:
    codec = TextCodec(_vocabulary(kind), ChatTemplate({}, {}), Limits())
    (item,) = codec.encode([TextItem(text=text)])
    assert item.error is None
    ids: list[int] = item.ids.tolist()
    return ids


def _pieces(kind: str, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """Text as a client sees it token by token, and the remainder at the end."""
    decoder = family_of(_vocabulary(kind)).new_decoder(skip_special_tokens=skip_special_tokens, prompt_tail_ids=[])
    return [*(decoder.push([i]) for i in ids), decoder.remainder()]


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_and_characters_come_whole(kind: str, text: str) -> None:
    known = _vocabulary(kind)
    ids = _encode(kind, text)
    assert ids == known.tokenizer.encode(text).ids
    pieces = _pieces(kind, ids)
    expected = known.tokenizer.decode(ids)
    assert "".join(pieces) == expected
    # No piece of a character: it is held back until its last byte is there.
    assert not any("\ufffd" in piece for piece in pieces)
    if kind == "bpe":
        assert expected == text
    else:  # A unigram's space is the border of a word, at the beginning too.
        assert expected.split() == text.split()


@pytest.mark.parametrize("kind", _KINDS)
def test_characters_that_the_vocabulary_lacks_are_bytes(kind: str) -> None:
    tokens = [_vocabulary(kind).tokens[i] for i in _encode(kind, "日")]
    assert [token for token in tokens if token.startswith("<0x")] == ["<0xE6>", "<0x97>", "<0xA5>"]
    assert [piece for piece in _pieces(kind, _encode(kind, "日")) if piece.strip()] == ["日"]


@pytest.mark.parametrize("kind", _KINDS)
def test_added_tokens_are_one_id_and_special_ones_do_not_show(kind: str) -> None:
    special = _SPECIAL[kind]
    for added in _ADDED[kind]:
        text = f"It was{added}the best{special}of times"
        ids = _encode(kind, text)
        assert _vocabulary(kind).tokenizer.token_to_id(added) in ids
        shown, all_of_it = "".join(_pieces(kind, ids)), "".join(_pieces(kind, ids, skip_special_tokens=False))
        assert added in shown and special not in shown and special in all_of_it
        assert shown == _vocabulary(kind).tokenizer.decode(ids)
        assert all_of_it == _vocabulary(kind).tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", _KINDS)
@given(text=st.text(max_size=20), cut=st.integers(0, 40))
def test_any_text_continues_a_prompt_as_it_would_be_read_whole(kind: str, text: str, cut: int) -> None:
    """Output behind a prompt: the prompt's tail tells whether a space shows."""
    known = _vocabulary(kind)
    ids = _encode(kind, text)
    at = min(cut, len(ids))
    while at < len(ids) and known.tokens[ids[at]].startswith("<0x"):  # A character's bytes are not torn apart.
        at += 1
    prompt, output = ids[:at], ids[at:]
    decoder = family_of(known).new_decoder(skip_special_tokens=True, prompt_tail_ids=prompt)
    shown = decoder.push(output) + decoder.remainder()
    whole = known.tokenizer.decode(ids)
    assert whole.endswith(shown)
    assert known.tokenizer.decode(prompt) + shown == whole
