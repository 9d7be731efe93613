"""A file of recorded chats in ShareGPT's format, as turns to send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from radixmesh.cli.bench.load_turn import LoadTurn, Prompt

_USERS = ("human", "user")
_MODELS = ("gpt", "assistant", "chatgpt", "bard", "bing")
# No tokenizer is asked, so that every system gets the same load: English texts have about four bytes a token.
_BYTES_PER_TOKEN = 4


def read_sharegpt(
    path: Path, *, seed: int, num_requests: int | None, as_chat: bool, out_len: int | None = None
) -> list[LoadTurn]:
    """Turns of the file's chats, which are shuffled by `seed`.

    as_chat: every question of a chat in turn, with the model's own answers between them; otherwise each chat's first
    question, as a text. An answer is asked to be as long as the recorded one, by its bytes, or out_len.
    Raises ValueError for a file that is something else, OSError for one that cannot be read.
    """
    chats = _chats_in(path)
    turns: list[LoadTurn] = []
    for index in np.random.default_rng(seed).permutation(len(chats)).tolist():
        if num_requests is not None and len(turns) >= num_requests:
            break
        pairs = chats[index] if as_chat else chats[index][:1]
        for number, (question, answer) in enumerate(pairs):
            added = Prompt(messages=({"role": "user", "content": question},)) if as_chat else Prompt(text=question)
            turns.append(
                LoadTurn(
                    parent=len(turns) - 1 if number else None,
                    added=added,
                    out_len=out_len or max(1, round(len(answer.encode()) / _BYTES_PER_TOKEN)),
                    delay_s=0.0,
                )
            )
    return turns[:num_requests]


def _chats_in(path: Path) -> list[list[tuple[str, str]]]:
    """(question, answer) pairs of every chat that begins with one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(content, list):
        raise ValueError(
            f"{path} is not in ShareGPT's format: it holds a {type(content).__name__}, not a list of chats"
        )
    chats = [pairs for chat in content if (pairs := _pairs_in(chat))]
    if not chats:
        raise ValueError(f"{path} holds no chat that begins with a question and its answer ('conversations')")
    return chats


def _pairs_in(chat: object) -> list[tuple[str, str]]:
    messages = chat.get("conversations") or chat.get("conversation") if isinstance(chat, Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    spoken = [_spoken(message) for message in messages]
    if spoken and spoken[0][0] == "system":
        spoken = spoken[1:]
    pairs: list[tuple[str, str]] = []
    for (asker, question), (answerer, answer) in zip(spoken[::2], spoken[1::2], strict=False):
        if asker not in _USERS or answerer not in _MODELS or not question.strip():
            break
        pairs.append((question, answer))
    return pairs


def _spoken(message: object) -> tuple[str, str]:
    """Role and text of a message; empty if it is none."""
    if not isinstance(message, Mapping):
        return "", ""
    who, what = message.get("from", message.get("role")), message.get("value", message.get("content"))
    return (who, what) if isinstance(who, str) and isinstance(what, str) else ("", "")
