"""Tokens of a thought: those that share a byte with it, however tokens and text arrive."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.router.chat.formats import ChatFormat
from radixmesh.daemons.router.chat.parts import ToolUse, join
from radixmesh.daemons.router.chat.reasoning_tokens import ReasoningTokens
from radixmesh.daemons.router.chat.text_reader import TextReader

# Each piece in [] is the thought of the answer around it. The prompt opens that of the second format.
ANSWERS = {
    "closed": (
        "qwen3",
        "",
        "\n<think>\n[Hm, </ the ünïted 😀 \n\n plan <think> goes]\n\n</think>\n\nYes, 日本 <think>.",
    ),
    "open": ("deepseek_r1", "<think>", "[Ob es geht? <thi 日]  </think> Ja.</think>"),
    "cut off": ("deepseek_r1", "<think>", "  [Ob es 日本 geht] \n"),
    "none": ("qwen3", "", "Yes <think>that</think>."),
    "empty": ("qwen3", "", "<think>\n\n</think>\n\nYes."),
    "kimi": ("kimi_k2", "", "<think>[a, b]<|tool_calls_section_begin|>x"),
    "harmony": (
        "gpt_oss",
        "",
        "<|channel|>analysis<|message|>[ Hm, 日 ]<|end|><|start|>assistant<|channel|>commentary<|message|>So.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>[Then <b>]<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes",
    ),
}


def parser_of(parser: str, prompt: str) -> TextReader:
    made = ChatFormat.of("none", parser, "").parser(ToolUse(), prompt, request_id="r", index=0)
    assert isinstance(made, TextReader) and made.has_reasoning
    return made


def read(parser: TextReader, steps: Sequence[tuple[str, Sequence[bytes]]]) -> tuple[int, str]:
    """The count after (text, tokens) came in these steps, and the thought."""
    counter, parts = ReasoningTokens(lambda token: table[token]), []
    table = [token for _, tokens in steps for token in tokens]
    at = 0
    for text, tokens in steps:
        parts += parser.feed(text)
        counter.add(range(at, at := at + len(tokens)), parser.reasoning_read())
    parts += parser.finish()
    counter.add((), parser.reasoning_read())
    return counter.num, join(parts).reasoning


def touching(tokens: Sequence[bytes], spans: Sequence[tuple[int, int]]) -> int:
    """Brute force over bytes."""
    ends = list(accumulate(map(len, tokens)))
    placed = [(end - len(token), end) for token, end in zip(tokens, ends, strict=True) if token]
    return sum(any(start < b and end > a for a, b in spans) for start, end in placed)


@given(st.sampled_from(sorted(ANSWERS)), st.integers(1, 9), st.integers(0, 40), st.integers(0, 2**32))
def test_tokens_that_share_a_byte_with_the_thought_count(name: str, longest: int, lag: int, seed: int) -> None:
    rng = random.Random(seed)
    parser, prompt, marked = ANSWERS[name]
    spans, text, size = [], "", 0
    for piece in re.split(r"(\[.*?\])", marked, flags=re.DOTALL):
        shown = piece[1:-1] if piece.startswith("[") else piece
        if shown is not piece:
            spans.append((size, size + len(shown.encode())))
        text, size = text + shown, size + len(shown.encode())
    tokens, left = [], text.encode()
    while left:
        # Some tokens show nothing.
        cut = rng.randint(0, longest)
        tokens.append(left[:cut])
        left = left[cut:]
    steps: list[tuple[str, Sequence[bytes]]] = []
    at = told = 0
    while at < len(tokens) or told < len(text):
        more = rng.randint(0, 5)
        # Text is held back for a while, as before a stop string.
        known = len(b"".join(tokens[: at + more]).decode(errors="ignore"))
        until = len(text) if at >= len(tokens) else max(told, known - rng.randint(0, lag))
        steps.append((text[told:until], tokens[at : at + more]))
        at, told = at + more, until
    num, reasoning = read(parser_of(parser, prompt), steps)
    assert reasoning == "".join(text.encode()[a:b].decode() for a, b in spans)
    assert num == touching(tokens, spans)
    # All at once, and text that is ahead of its tokens.
    assert read(parser_of(parser, prompt), [(text, tokens)])[0] == num
    ahead = [(text, ()), *[("", [token]) for token in tokens]]
    assert read(parser_of(parser, prompt), ahead)[0] == num


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ([b"<think>", b"a", b"\xe5", b"</think>", b"x"], "<think>a\ufffd</think>x", 2),
        ([b"<think>", b"\xf0\x9f", b"\x98", b"\x80", b"</think>"], "<think>😀</think>", 3),
        ([b"<think>", b"\xff", b"\xff", b"</think>"], "<think>\ufffd\ufffd</think>", 2),
        ([b"<think>a", b"b</think>x", b"y"], "<think>ab</think>xy", 2),
        ([b"<think>", b"\n", b"a", b" ", b"b", b"\n", b"</think>"], "<think>\na b\n</think>", 3),
        ([b"<think>", b"a", b"\xe6\x97"], "<think>a\ufffd", 2),
    ],
)
def test_broken_characters_and_tokens_that_straddle(tokens: list[bytes], text: str, expected: int) -> None:
    for steps in ([(text, tokens)], [("", [token]) for token in tokens] + [(text, [])]):
        assert read(parser_of("qwen3", ""), steps)[0] == expected


def test_tokens_are_kept_no_longer_than_their_text_is_unread() -> None:
    for name, parser in (("qwen3", "<think>a</think>"), ("gpt_oss", "<|channel|>final<|message|>")):
        reader, counter = parser_of(name, ""), ReasoningTokens(lambda _: b"word ")
        reader.feed(parser)
        most = 0
        for _ in range(2_000):
            reader.feed("word " * 4)
            counter.add(range(4), reader.reasoning_read())
            most = max(most, sum(len(run.pieces) for run in counter.runs))
        # Blanks at the end may be no part of what comes before them, and the marks' own length is not in the table.
        assert most < 12, name
