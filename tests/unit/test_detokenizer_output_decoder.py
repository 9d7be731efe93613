"""One output against a brute-force oracle: arbitrary ids, stop strings, cuts and restarts."""

from __future__ import annotations

import itertools
from codecs import getincrementaldecoder
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.small_tokenizers import BYTE_LETTERS, TEXTS, byte_level, vocabulary_of

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.detokenize.output_decoder import OutputDecoder, StopHit
from radixmesh.daemons.runtime.detokenize.stop_finder import StopFinder, StopSet
from radixmesh.daemons.runtime.detokenize.text_decoder import DecoderFamily, family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.model_folder.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    ids: list[int]
    stops: list[str]
    eos_ids: frozenset[int]
    include_stop: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    text: str
    num_tokens: int
    stop: StopHit | None


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(byte_level())


@cache
def family() -> DecoderFamily:
    return family_of(vocabulary())


def new_output(case: Case) -> OutputDecoder:
    return OutputDecoder(
        family().new_decoder(skip_special_tokens=case.skip_special_tokens, prompt_tail_ids=[]),
        stops=StopSet(case.stops) if case.stops else None,
        eos_ids=case.eos_ids,
        include_stop=case.include_stop,
    )


def brute_force(case: Case) -> Outcome:
    """Decode everything, then look for stop strings character by character."""
    eos_index = next((index for index, i in enumerate(case.ids) if i in case.eos_ids), None)
    num_counted = len(case.ids) if eos_index is None else eos_index + 1
    shown = case.ids if eos_index is None else case.ids[: num_counted if case.include_stop else eos_index]
    full = vocabulary().tokenizer.decode(shown, skip_special_tokens=case.skip_special_tokens)
    for end in range(1, len(full) + 1):
        stop = max((s for s in case.stops if full[:end].endswith(s)), key=len, default=None)
        if stop is None:
            continue
        lengths = [len(text) for text in texts_so_far(shown, case.skip_special_tokens)]
        num_tokens = next((k for k, length in enumerate(lengths) if length >= end), num_counted)
        text = full[:end] if case.include_stop else full[: end - len(stop)]
        return Outcome(text=text, num_tokens=num_tokens, stop=StopHit(stop, num_tokens))
    return Outcome(text=full, num_tokens=num_counted, stop=None)


def texts_so_far(ids: list[int], skip_special_tokens: bool) -> list[str]:
    """Text that is certain after 0, 1, ... tokens, by the standard library's incremental decoder."""
    decoder = getincrementaldecoder("utf-8")("replace")
    texts = [""]
    for i in ids:
        texts.append(texts[-1] + decoder.decode(bytes_of(i, skip_special_tokens)))
    return texts


def bytes_of(token_id: int, skip_special_tokens: bool) -> bytes:
    known = vocabulary()
    if token_id >= len(known.tokens) or (skip_special_tokens and token_id in known.special_ids):
        return b""
    token = known.tokens[token_id]
    if all(letter in BYTE_LETTERS for letter in token):
        return bytes(BYTE_LETTERS.index(letter) for letter in token)
    return token.encode()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokenizer = vocabulary().tokenizer
    any_id = st.integers(0, vocabulary().vocab_size - 1)
    some_text = st.one_of(st.text(max_size=8), st.sampled_from(TEXTS), st.text("abc ", max_size=12))
    chunk = st.one_of(
        st.lists(any_id, max_size=4), some_text.map(lambda s: tokenizer.encode(s, add_special_tokens=False).ids)
    )
    ids = [i for chunk_ids in draw(st.lists(chunk, max_size=5)) for i in chunk_ids][:60]
    full = tokenizer.decode(ids, skip_special_tokens=False)
    from_text = (
        st.integers(0, max(0, len(full) - 1)).flatmap(
            lambda a: st.integers(a + 1, min(len(full), a + 12)).map(lambda b: full[a:b])
        )
        if full
        else st.nothing()
    )
    stop = st.one_of(from_text, st.text("abc ", min_size=1, max_size=5), st.text(min_size=1, max_size=3))
    return Case(
        ids=ids,
        stops=draw(st.lists(stop, max_size=4)),
        eos_ids=frozenset(draw(st.lists(any_id, max_size=2))),
        include_stop=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


def outcome_of(output: OutputDecoder, text: str) -> Outcome:
    return Outcome(text=text, num_tokens=output.num_tokens, stop=output.stop)


@settings(max_examples=100)
@given(cases(), st.lists(st.integers(0, 60)))
def test_deltas_concatenate_to_the_oracle(case: Case, cuts: list[int]) -> None:
    output = new_output(case)
    text = "".join(output.push(ids, is_last=False) for ids in pieces(case.ids, cuts))
    text += output.push([], is_last=True)
    assert outcome_of(output, text) == brute_force(case)
    assert output.is_final
    assert output.text_bytes == len(text.encode())


@settings(max_examples=100)
@given(cases(), st.data())
def test_a_decoder_lost_at_any_moment_is_rebuilt(case: Case, data: st.DataObject) -> None:
    """The router holds the ids and what of the text was delivered, which may be less than what was decoded."""
    output = new_output(case)
    delivered = ""
    num_seen = 0
    while num_seen < len(case.ids) and not output.is_final:
        num_next = data.draw(st.integers(num_seen, len(case.ids)))
        delta = output.push(case.ids[num_seen:num_next], is_last=False)
        num_seen = num_next
        if not data.draw(st.booleans()):
            delivered += delta
            continue
        # The delta is lost with its decoder; tokens that came meanwhile are in the replay.
        num_seen = data.draw(st.integers(num_seen, len(case.ids)))
        output = new_output(case)
        delivered += output.resume(case.ids[:num_seen], len(delivered.encode()))
    delivered += output.push([], is_last=True)
    assert outcome_of(output, delivered) == brute_force(case)


@given(cases())
def test_an_output_that_is_all_delivered_resumes_to_nothing(case: Case) -> None:
    """Also where its text was completed by the last row only: an incomplete character, the start of a stop string."""
    whole = brute_force(case)
    output = new_output(case)
    text = output.resume(case.ids, len(whole.text.encode()))
    text += output.push([], is_last=True)
    assert text == ""
    assert outcome_of(output, whole.text) == whole


@given(cases(), st.integers(1, 10))
def test_more_text_than_there_is_cannot_be_resumed(case: Case, num_more: int) -> None:
    output = new_output(case)
    with pytest.raises(MeshError) as error:
        output.resume(case.ids, len(brute_force(case).text.encode()) + num_more)
        output.push([], is_last=True)
    assert error.value.reason == ErrorReason.ERROR_REASON_INVALID_RESUME


def test_half_a_character_cannot_be_resumed() -> None:
    ids = vocabulary().tokenizer.encode("a日本", add_special_tokens=False).ids
    case = Case(ids=ids, stops=[], eos_ids=frozenset(), include_stop=False, skip_special_tokens=True)
    for num_bytes in range(8):
        output = new_output(case)
        if num_bytes in (0, 1, 4, 7):
            assert output.resume(ids, num_bytes).encode() == "a日本".encode()[num_bytes:]
            continue
        with pytest.raises(MeshError, match="within a character"):
            output.resume(ids, num_bytes)


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6), st.lists(st.text("abc", max_size=6)))
@example(stops=["aab", "b"], texts=["aa", "aa", "ab"])
@example(stops=["ab", "xaby", "aby"], texts=["xa", "by"])
def test_only_what_may_become_a_stop_string_is_held(stops: list[str], texts: list[str]) -> None:
    finder = StopFinder(StopSet(stops))
    seen = shown = ""
    for text in texts:
        delta, match = finder.push(text)
        seen, shown = seen + text, shown + delta
        end = next((e for e in range(1, len(seen) + 1) if seen[:e].endswith(tuple(stops))), None)
        if end is not None:
            assert match is not None
            assert match.stop == max((s for s in stops if seen[:end].endswith(s)), key=len)
            assert shown == seen[:end]
            return
        assert match is None
        start = next(a for a in range(len(seen) + 1) if any(s.startswith(seen[a:]) for s in stops))
        assert (shown, finder.held) == (seen[:start], seen[start:])


def test_the_stop_that_is_complete_first_wins_and_then_the_longest() -> None:
    def first_of(stops: list[str], text: str) -> tuple[str, str]:
        shown, match = StopFinder(StopSet(stops)).push(text)
        assert match is not None
        return match.stop, shown[: match.start]

    assert first_of(["abcd", "bc"], "xabcd") == ("bc", "xa")
    assert first_of(["c", "bc", "abc"], "xabcd") == ("abc", "x")
    assert first_of(["zzz", "x", "a"], "xa") == ("x", "")


def test_eos_is_left_out_and_ends_the_output() -> None:
    known = vocabulary()
    hello, stop_id, eos = known.tokenizer.encode("a", add_special_tokens=False).ids[0], 50, known.special_ids[1]
    for eos_id, include_stop, skip_special_tokens, shown in (
        (eos, False, True, ""),
        (eos, False, False, ""),
        (eos, True, True, ""),
        (eos, True, False, "</s>"),
        (stop_id, False, True, ""),
        (stop_id, True, True, known.tokenizer.decode([stop_id])),
    ):
        ids = [hello, eos_id, hello]
        case = Case(
            ids=ids,
            stops=[],
            eos_ids=frozenset([eos_id]),
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
        )
        output = new_output(case)
        assert output.push(ids, is_last=False) == "a" + shown
        assert (output.is_final, output.num_tokens, output.stop) == (True, 2, None)
        assert output.push([hello], is_last=True) == ""


@pytest.mark.parametrize("stop", ["a" * 1023 + "b", "ab" * 512])
def test_the_worst_stop_strings_cost_linear_time(stop: str) -> None:
    """64 nearly equal, nearly matching stop strings of 1024 characters: steps are counted, not seconds."""
    stops = [stop[:-2] + chr(0x100 + rank) + stop[-1] for rank in range(64)]
    counting = CountingStops(stops)
    finder = StopFinder(counting)
    num_pushes = 3000
    for _ in range(num_pushes):
        finder.push(stop[0])
    # Each character is given up once, and each push finds one position that stays open.
    assert counting.num_looks <= 2 * num_pushes


class CountingStops(StopSet):
    __slots__ = ("num_looks",)

    def __init__(self, stops: list[str]) -> None:
        super().__init__(stops)
        self.num_looks = 0

    def _is_beginning(self, text: str) -> bool:
        self.num_looks += 1
        return super()._is_beginning(text)
