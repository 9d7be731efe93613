"""Logprobs in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from radixmesh.daemons.router.http.answers.collected import LogprobRun
from radixmesh.daemons.router.http.answers.tokens import TokenTable
from radixmesh.daemons.router.http.bodies.field_decoders import too_large
from radixmesh.daemons.router.http.bodies.json_text import dump

# JSON has no -inf; OpenAI writes this.
_LEAST = -9999.0
# Tokens of a prompt, times alternatives: about 20 MB of JSON, which hold the event loop for some tenths of a second.
MAX_PROMPT_ENTRIES = 1 << 18


def chat_logprobs(ids: Sequence[int], run: LogprobRun, table: TokenTable) -> dict[str, object]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`, one entry per id, the one that ended the output too."""
    content = []
    for index, token in enumerate(ids):
        entry = _entry(token, run.values[index], table)
        entry["top_logprobs"] = [_entry(other, value, table) for other, value in run.top(index)]
        content.append(entry)
    return {"content": content, "refusal": None}


def check_prompt_entries(num_tokens: int, num_top: int, field: str = "prompt_logprobs") -> None:
    """num_tokens: of the prompts, each as often as it is told. field: what asked. Raises TOO_LARGE beyond
    MAX_PROMPT_ENTRIES."""
    if (num := num_tokens * (1 + num_top)) > MAX_PROMPT_ENTRIES:
        raise too_large(field, "entries", num, MAX_PROMPT_ENTRIES)


def prompt_logprobs(ids: Sequence[int], run: LogprobRun, table: TokenTable) -> msgspec.Raw:
    """vLLM's form: for each token of a prompt, by id, its own logprob and the likeliest ones; null for the first, which
    nothing predicts. rank: null for a token that is none of those. JSON, written once for all choices."""
    told: list[dict[str, dict[str, object]] | None] = [None]
    for index, token in enumerate(ids[1:]):
        entries = {
            str(other): _ranked(other, value, rank, table) for rank, (other, value) in enumerate(run.top(index), 1)
        }
        if str(token) not in entries:
            entries[str(token)] = _ranked(token, run.values[index], None, table)
        told.append(entries)
    return msgspec.Raw(dump(told))


class CompletionLogprobs:
    """The completions' form, for consecutive tokens of one text: keeps count of characters.

    skips_special: special tokens do not show in the text. A token that is a part of a character has the offset of that
    character.
    """

    def __init__(self, table: TokenTable, *, skips_special: bool) -> None:
        self._table = table
        self._skips_special = skips_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def skip(self, text: str) -> None:
        """The text begins with this, of which no logprobs are told."""
        self._offset += len(text)

    def of(self, ids: Sequence[int], run: LogprobRun, *, is_start: bool = False) -> dict[str, object]:
        """`{tokens, token_logprobs, top_logprobs, text_offset}`. is_start: the first id has no logprob, nothing
        predicts it; run starts with the second."""
        table = self._table
        values: list[float | None] = [max(value, _LEAST) for value in run.values]
        tops: list[dict[str, float] | None] = []
        for index, token in enumerate(ids[1:] if is_start else ids):
            top = {table.spelling(other): max(value, _LEAST) for other, value in run.top(index)}
            top.setdefault(table.spelling(token), max(run.values[index], _LEAST))
            tops.append(top)
        if is_start:
            values, tops = [None, *values], [None, *tops]
        return {
            "tokens": [table.spelling(token) for token in ids],
            "token_logprobs": values,
            "top_logprobs": tops if run.num_top else None,
            "text_offset": [self._advance(token) for token in ids],
        }

    def _advance(self, token: int) -> int:
        offset = self._offset
        if not (self._skips_special and self._table.is_special(token)):
            self._offset += len(self._decoder.decode(self._table.data(token)))
        return offset


def _ranked(token: int, value: float, rank: int | None, table: TokenTable) -> dict[str, object]:
    return {"logprob": max(value, _LEAST), "rank": rank, "decoded_token": table.spelling(token)}


def _entry(token: int, value: float, table: TokenTable) -> dict[str, object]:
    return {"token": table.spelling(token), "logprob": max(value, _LEAST), "bytes": list(table.data(token))}
