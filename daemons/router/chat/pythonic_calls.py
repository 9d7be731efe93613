"""Tool calls in the form of Python: `[f(a=1), g(b="x")]`, Llama 4 and Llama 3.2."""

from __future__ import annotations

import ast
import json
import re
import warnings

from radixmesh.daemons.router.chat.call_reader import CallReader
from radixmesh.daemons.router.chat.json_reader import is_text
from radixmesh.daemons.router.chat.text_reader import MAX_NAME, Malformed, Reading

# Deeper arguments are none: Python's parser recurses.
_MAX_DEPTH = 32
_STEP = re.compile(r"""['"\\()\[\]{}]""")
_NAME = re.compile(r"[A-Za-z_][\w.\-]*$")


class PythonicCalls(CallReader):
    """The list is the whole answer, or stands between <|python_start|> and <|python_end|>.

    A call is held until it is whole, 32,768 characters at most.
    """

    triggers = ("<|python_start|>",)
    # Python's parser takes up to a millisecond for a thousand characters, on the event loop.
    max_held = 32 << 10

    def read_start(self) -> Reading[None]:
        if (yield from self.peek()) in ("[", " ", "\n", "\t", "\r"):
            yield from self.attempt("")

    def calls(self, marker: str) -> Reading[None]:
        yield from self.expect("[")
        while True:
            yield from self.blanks()
            name, _ = yield from self.until("(", most=MAX_NAME)
            if not _NAME.match(name):
                raise Malformed
            self.check_name(name)
            arguments = _as_json((yield from self._span()))
            self.begin_call(name)
            self.arguments(arguments)
            self.begin_raw()
            char = yield from self.blanks()
            if char not in (",", "]"):
                raise Malformed
            self.take(self._at + 1)
            if char == "]":
                break
        self.drop_raw()
        yield from self.end_marker("<|python_end|>")

    def _span(self) -> Reading[str]:
        """The text from the bracket that comes next to the one that closes it."""
        texts: list[str] = []
        depth, quote, is_escaped = 0, "", False
        while True:
            at = self._at
            while at < len(self._text):
                if is_escaped:
                    is_escaped, at = False, at + 1
                    continue
                found = _STEP.search(self._text, at)
                at = found.end() if found else len(self._text)
                char = found.group() if found else ""
                if quote:
                    is_escaped = char == "\\"
                    quote = "" if char == quote else quote
                elif char in ("'", '"'):
                    quote = char
                elif char and char != "\\":
                    depth += 1 if char in "([{" else -1
                    if depth > _MAX_DEPTH:
                        self.take(at)
                        raise Malformed
                    if depth == 0:
                        texts.append(self.take(at))
                        return "".join(texts)
            texts.append(self.take(len(self._text)))
            if not (yield from self.waits()):
                raise Malformed


def _as_json(arguments: str) -> str:
    """`(a=1, b="x")` as a JSON object. Raises Malformed for anything but literals by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of escapes that Python does not know.
            call = ast.parse(f"f{arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise Malformed
        values = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in values:
                raise Malformed
            values[keyword.arg] = ast.literal_eval(keyword.value)
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None
    if not is_text(text):
        raise Malformed
    return text
