"""Masks of every backend against a naive matcher that tries each token: equal at each step, whatever came before."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.grammars import AnyText, AnyTextBackend, allowed_ids, as_bools
from support.regex_oracle import Bytes, NaiveMatcher, OneOf, Or, Repeat, Then, Tree, as_ebnf, as_regex

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.guided.backend import (
    BACKENDS,
    CompiledGrammar,
    GrammarBackend,
    GuidedVocabulary,
    MaskWords,
    load_backend,
)
from radixmesh.daemons.runtime.guided.source import GrammarForm, GrammarSource
from radixmesh.daemons.worker.guided.guide import Guide
from radixmesh.daemons.worker.guided.shared_calls import run_together

# Single bytes, pieces that cross the borders of letters and of characters, ids that stand for nothing, two ends.
LETTERS = 'ab0- "{é'
PIECES = ("aa", "ab", "ba", "abab", "0-", "--", "a0", ' "', '{"', "éa", "aé", "éé", "a b", "bb0")
TEXTS = (
    [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in PIECES] + [b"\xa9a", b"a\xc3", b"", b"", b""]
)
VOCABULARY = GuidedVocabulary(TEXTS, (len(TEXTS) - 2, len(TEXTS) - 1), len(TEXTS) + 7)
NUM_WORDS = -(-VOCABULARY.vocab_size // 32)


@cache
def backend(name: str) -> GrammarBackend:
    pytest.importorskip(name)
    return load_backend(name, VOCABULARY)


_leaves = st.one_of(
    st.text(st.sampled_from(LETTERS), min_size=1, max_size=4).map(lambda text: Bytes(text.encode())),
    st.sets(st.sampled_from('ab0- "{'), min_size=1).map(lambda letters: OneOf(frozenset(map(ord, letters)))),
)


def _larger(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    return st.one_of(
        st.tuples(inner, inner).map(lambda pair: Then(*pair)),
        st.frozensets(inner, min_size=2, max_size=3).map(Or),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(lambda x: Repeat(x[0], x[1], max(1, x[1] + x[2]))),
        st.tuples(inner, st.integers(0, 2)).map(lambda x: Repeat(x[0], x[1], None)),
    )


trees = st.recursive(_leaves, _larger, max_leaves=6)


@pytest.mark.parametrize("form", [GrammarForm.REGEX, GrammarForm.EBNF])
@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, seed=st.integers(0, 1000))
def test_masks_are_those_of_the_naive_matcher(name: str, form: GrammarForm, tree: Tree, seed: int) -> None:
    text = as_regex(tree) if form is GrammarForm.REGEX else f"root ::= {as_ebnf(tree)}"
    try:
        compiled = backend(name).compile(GrammarSource(form, text))
    except MeshError as error:
        # The library's reader of EBNF has no repeated repetitions.
        assert name == "llguidance" and form is GrammarForm.EBNF and "Expected value" in error.message, text
        return
    matcher, naive = backend(name).load(compiled).matcher(), NaiveMatcher(tree, VOCABULARY)
    rng, words, num_accepted = random.Random(seed), np.zeros(NUM_WORDS, np.int32), 0
    for _ in range(12):
        assert matcher.is_over == naive.is_over
        if not naive.is_over:
            words[:] = -1
            matcher.fill(words)
            allowed = naive.allowed()
            filled, forced_text = set(allowed_ids(words)), naive.forced_text()
            assert filled <= allowed, text
            forced = backend(name).tokens.forced(as_bools(words))
            if forced is not None:
                assert forced in filled, text
                around = (TEXTS[forced], *(TEXTS[other] for other in filled))
                assert all(one.startswith(around[0]) or around[0].startswith(one) for one in around), text
            # llguidance leaves the longest token of a forced text alone, and its EBNF is cut into lexemes first.
            if name == "xgrammar" or not (forced_text or form is GrammarForm.EBNF):
                assert filled == allowed, text
            if not filled:
                break
        forbidden = rng.choice(sorted(set(range(VOCABULARY.vocab_size)) - naive.allowed()))
        assert not matcher.accept(forbidden), text
        if num_accepted and rng.random() < 0.3:
            back = rng.randint(1, num_accepted)
            matcher.rollback(back)
            naive.rollback(back)
            num_accepted -= back
        elif not naive.is_over:
            token = rng.choice(sorted(filled))
            assert matcher.accept(token) and naive.accept(token), text
            num_accepted += 1


@pytest.mark.parametrize("name", BACKENDS)
def test_artefacts_are_read_back_and_others_refused(name: str) -> None:
    source = GrammarSource(GrammarForm.REGEX, "a{2,3}b")
    artefact = backend(name).compile(source)
    assert backend(name).compile(source) == artefact and artefact.startswith(f"{backend(name).format}\n".encode())
    assert backend(name).format.startswith(f"{name}/")
    for wrong in (b"", b"other/1\n{}", backend(name).format.encode() + b"\n\xff{", artefact[: len(artefact) // 2]):
        with pytest.raises(MeshError) as caught:
            backend(name).load(wrong)
        assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_GRAMMAR


@pytest.mark.parametrize("name", BACKENDS)
def test_forced_tokens_are_told(name: str) -> None:
    grammar = backend(name).load(backend(name).compile(GrammarSource(GrammarForm.REGEX, "abab(0|-)éa")))
    matcher, words = grammar.matcher(), np.zeros(NUM_WORDS, np.int32)

    def forced() -> bytes:
        matcher.fill(words)
        token = backend(name).tokens.forced(as_bools(words))
        return b"" if token is None else TEXTS[token]

    assert forced() == b"abab"
    for byte in b"abab":
        assert matcher.accept(byte)
    assert forced() == b"" and matcher.accept(ord("0"))
    assert forced() == "éa".encode()
    for byte in "éa".encode():
        assert matcher.accept(byte)
    assert forced() == b"" and matcher.accept(VOCABULARY.eos_ids[1]) and matcher.is_over


def test_a_forced_text_of_gigabytes_takes_the_time_of_its_first_tokens() -> None:
    """30 rules of two parts each force 2**30 letters; the last rule forces letters without an end."""
    pytest.importorskip("xgrammar")
    doubled = "\n".join(f"r{level} ::= r{level + 1} r{level + 1}" for level in range(30))
    for text in (f'root ::= r0 "b"\n{doubled}\nr30 ::= "a"', 'root ::= "a" root'):
        grammar = backend("xgrammar").load(backend("xgrammar").compile(GrammarSource(GrammarForm.EBNF, text)))
        guide = Guide(
            lambda grammar=grammar: (grammar.matcher(), backend("xgrammar").tokens),  # type: ignore[misc]
            VOCABULARY.vocab_size,
            position=1,
            output_ids=np.zeros(0, np.int32),
            max_drafts=5,
        )
        guide.run()
        assert guide.is_ready and list(guide.forced_ids(9)) == 5 * [TEXTS.index(b"aa")]
        assert Guide.begin([(guide, guide.forced_ids(9))]) == ([], [guide])
        guide.run()
        assert guide.is_ready and len(guide.forced_ids(9)) == 5


def _guide(grammar: CompiledGrammar, name: str) -> Guide:
    guide = Guide(
        lambda: (grammar.matcher(), backend(name).tokens),
        VOCABULARY.vocab_size,
        position=1,
        output_ids=np.zeros(0, np.int32),
    )
    guide.run()
    return guide


@pytest.mark.parametrize("name", BACKENDS)
def test_outputs_that_share_calls_have_the_masks_that_each_has_alone(name: str) -> None:
    """Some end, some get a token that their grammar forbids, some get two tokens at once."""
    sources = [GrammarSource(GrammarForm.REGEX, text) for text in ("(ab|a0|b){1,6}", "[ab]{2}é*", "a{3}")]
    grammars = [backend(name).load(backend(name).compile(source)) for source in sources]
    rng, num = random.Random(1), 24
    together = [_guide(grammars[index % 3], name) for index in range(num)]
    alone = [_guide(grammars[index % 3], name) for index in range(num)]
    num_over = num_failed = 0
    for _ in range(8):
        moves: list[tuple[Guide, list[int]]] = []
        for one, other in zip(together, alone, strict=True):
            tokens: list[int] = []
            if one.error is None:
                allowed = one.allowed()
                ids = [ord("a")] if allowed is None else np.flatnonzero(allowed).tolist()
                tokens = [ord("{") if rng.random() < 0.05 else rng.choice(ids)]
                if rng.random() < 0.2 and allowed is not None and other.allowed(tokens) is not None:
                    tokens.append(rng.choice(np.flatnonzero(other.allowed(tokens)).tolist()))
            moves.append((one, tokens))
            other.suspect()  # Has a call of its own.
            assert Guide.begin([(other, tokens)]) == ([], [other])
            other.run()
        num_shared = 0
        for start in range(0, num, 8):
            shared, by_themselves = Guide.begin(moves[start : start + 8])
            num_shared += len(shared)
            assert len(shared) + len(by_themselves) == 8 and not run_together(shared, by_themselves).slow
        assert num_shared or num_over + num_failed > num // 2
        for one, other in zip(together, alone, strict=True):
            assert one.is_ready == other.is_ready and str(one.error) == str(other.error)
            if one.is_ready:
                mask, expected = one.allowed(), other.allowed()
                assert (mask is None) == (expected is None) and (mask is None or (mask == expected).all())
        num_over = sum(guide.is_ready and guide.allowed() is None for guide in together)
        num_failed = sum(guide.error is not None for guide in together)
    assert num_over and num_failed and num_over + num_failed > num // 2


class BrokenLater(AnyText):
    """Its library fails at the second mask."""

    num_fills = 0

    def fill(self, words: MaskWords) -> None:
        self.num_fills += 1
        if self.num_fills > 1:
            raise RuntimeError("no memory")
        words[:] = -1


def test_a_mask_that_a_library_fails_at_ends_its_own_output_alone() -> None:
    guides = [
        Guide(
            lambda grammar=grammar: (grammar.matcher(), AnyTextBackend.tokens),
            64,
            position=1,
            output_ids=np.zeros(0, np.int32),
        )  # type: ignore[misc]
        for grammar in (AnyText(), BrokenLater(), AnyText())
    ]
    for guide in guides:
        guide.run()
        assert guide.is_ready
    shared, alone = Guide.begin([(guide, [1]) for guide in guides])
    assert len(shared) == 3 and not run_together(shared, alone).slow
    assert [guide.is_ready for guide in guides] == [True, False, True]
    assert guides[1].error is not None and "no memory" in guides[1].error.message
