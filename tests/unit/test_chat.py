"""A chat's memory and commands, without terminal or mesh."""

import json
from pathlib import Path

import pytest

from radixmesh.cli.access import Access
from radixmesh.cli.chat.commands import NAMES, ChatState, run_command
from radixmesh.cli.chat.conversation import Conversation
from radixmesh.cli.chat.input import default_history_file
from radixmesh.cli.routers import find_routers


def said(*texts: str) -> Conversation:
    conversation = Conversation()
    for number, text in enumerate(texts):
        (conversation.answer if number % 2 else conversation.ask)(text)
    return conversation


def roles(conversation: Conversation) -> list[tuple[object, object]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_messages_alternate_behind_the_system_message() -> None:
    conversation = said("a", "b", "c")
    conversation.system = "s"
    assert roles(conversation) == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]


def test_a_question_without_an_answer_is_replaced() -> None:
    conversation = said("a", "b", "c")
    conversation.answer("")
    assert conversation.is_open
    conversation.ask("d")
    assert roles(conversation) == [("user", "a"), ("assistant", "b"), ("user", "d")]


def test_retry_takes_the_answer_back_once() -> None:
    state = ChatState(conversation=said("a", "b", "c", "d"))
    for _ in range(2):
        assert run_command("/retry", state).is_retry
        assert roles(state.conversation) == [("user", "a"), ("assistant", "b"), ("user", "c")]
    assert run_command("/retry", ChatState()).is_error


def test_clear_keeps_the_system_message_and_a_dash_removes_it() -> None:
    state = ChatState(conversation=said("a", "b"))
    assert run_command("/system  be brief ", state).text == "system message: be brief"
    run_command("/clear", state)
    assert roles(state.conversation) == [("system", "be brief")]
    assert run_command("/system -", state).text == "no system message"
    assert state.conversation.messages == []


def test_settings_take_numbers_and_say_what_they_are() -> None:
    state = ChatState()
    assert run_command("/temperature", state).text == "temperature: 1 (default)"
    assert run_command("/temperature 0", state).text == "temperature: 0"
    assert state.temperature == 0
    assert run_command("/tokens 7", state).text == "at most 7 tokens an answer"
    assert state.max_tokens == 7
    run_command("/tokens 0", state)
    assert state.max_tokens is None
    for line in (
        "/temperature nan",
        "/temperature -1",
        "/temperature x",
        "/tokens -1",
        "/tokens 1.5",
        f"/tokens {2**32}",
    ):
        assert run_command(line, state).is_error, line
    assert (state.temperature, state.max_tokens) == (0, None)


def test_saving_writes_json_or_text_and_never_over_a_file(tmp_path: Path) -> None:
    state = ChatState(conversation=said("Grüße?", "Ja."))
    for name in ("chat.json", "chat.txt"):
        assert not run_command(f"/save {tmp_path / name}", state).is_error
        assert "exists" in run_command(f"/save {tmp_path / name}", state).text
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved == [{"role": "user", "content": "Grüße?"}, {"role": "assistant", "content": "Ja."}]
    assert (tmp_path / "chat.txt").read_text() == "user:\nGrüße?\n\nassistant:\nJa.\n"
    for line in ("/save", f"/save {tmp_path}", f"/save {tmp_path}/none/x"):
        assert run_command(line, state).is_error, line
    assert run_command(f"/save {tmp_path / 'empty'}", ChatState()).is_error
    assert not (tmp_path / "empty").exists()


def test_every_command_of_the_help_is_one() -> None:
    text = run_command("/help", ChatState()).text
    for name in NAMES:
        assert name in text
        assert "there is no command" not in run_command(name, ChatState()).text
    assert run_command("/exit", ChatState()).is_exit
    assert "there is no command /helpme" in run_command("/helpme", ChatState()).text


def test_routers_are_those_named_then_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXMESH_ROUTER", "c:3, d:4")
    assert find_routers(["a:1,b:2", "e:5"], None, Access()) == ["a:1", "b:2", "e:5"]
    assert find_routers([], None, Access()) == ["c:3", "d:4"]


def test_history_lies_in_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXMESH_CHAT_HISTORY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_history_file() == Path("/state/radixmesh/chat_history")
    monkeypatch.setenv("RADIXMESH_CHAT_HISTORY", "/mine")
    assert default_history_file() == Path("/mine")
