"""The commands of `radixmesh chat`: lines that begin with a slash and are not for the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from radixmesh.cli.chat.conversation import Conversation

COMMANDS = {
    "/help": "this list",
    "/clear": "forget the conversation; the system message stays",
    "/system [TEXT]": "set the system message; without TEXT show it, with - remove it",
    "/temperature [T]": "0 is greedy, higher is freer; without T show it",
    "/tokens [N]": "at most N tokens an answer; 0 is as many as fit; without N show it",
    "/retry": "ask the last question again",
    "/save FILE": "write the conversation to a new file; .json for programs, anything else to read",
    "/exit": "leave, as Ctrl-D does",
}
KEYS = {
    "Ctrl-C": "stop the answer; what came stays in the conversation",
    "Alt-Enter": "a line end within a message",
    "Up, Ctrl-R": "earlier messages, search in them",
    "//...": "a message that begins with a slash",
}
NAMES = tuple(usage.split()[0] for usage in COMMANDS)


@dataclass(slots=True, kw_only=True)
class ChatState:
    """A conversation and what its next request is sent with. None leaves a setting to the mesh."""

    conversation: Conversation = field(default_factory=Conversation)
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a command: text to show, and whether to ask the last question again, or to leave."""

    text: str = ""
    is_error: bool = False
    is_retry: bool = False
    is_exit: bool = False


def run_command(line: str, state: ChatState) -> Reply:
    """Carries out a line that begins with one slash. Never raises: what is wrong is said in the reply."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    match name:
        case "/help":
            return Reply(text=_help())
        case "/clear":
            state.conversation.clear()
            return Reply(text="the conversation begins anew")
        case "/system":
            return _set_system(argument, state)
        case "/temperature":
            return _set_temperature(argument, state)
        case "/tokens":
            return _set_max_tokens(argument, state)
        case "/retry":
            can_retry = state.conversation.reopen()
            return Reply(is_retry=True) if can_retry else _wrong("there is no question to ask again")
        case "/save":
            return _save(argument, state.conversation)
        case "/exit" | "/quit":
            return Reply(is_exit=True)
    return _wrong(f"there is no command {name}: /help lists them; a message may begin with // instead")


def _set_system(argument: str, state: ChatState) -> Reply:
    if argument:
        state.conversation.system = "" if argument == "-" else argument
    system = state.conversation.system
    return Reply(text=f"system message: {system}" if system else "no system message")


def _set_temperature(argument: str, state: ChatState) -> Reply:
    if argument:
        try:
            value = float(argument)
        except ValueError:
            return _wrong(f"{argument!r} is not a number")
        if not 0 <= value <= 100:
            return _wrong(f"the temperature is from 0 to 100, not {argument}")
        state.temperature = value
    return Reply(text=f"temperature: {'1 (default)' if state.temperature is None else f'{state.temperature:g}'}")


def _set_max_tokens(argument: str, state: ChatState) -> Reply:
    if argument:
        if not argument.isdecimal() or int(argument) >= 2**32:
            return _wrong(f"{argument!r} is not a number of tokens")
        state.max_tokens = int(argument) or None
    return Reply(text=f"at most {state.max_tokens or 'as many as fit'} tokens an answer")


def _save(argument: str, conversation: Conversation) -> Reply:
    if not argument:
        return _wrong("name a file: /save FILE")
    if not conversation.messages:
        return _wrong("nothing has been said yet")
    path = Path(argument).expanduser()
    try:
        # "x": a chat never writes over anything.
        with path.open("x", encoding="utf-8") as file:
            file.write(conversation.transcript(as_json=path.suffix == ".json"))
    except FileExistsError:
        return _wrong(f"{path} exists already: choose another name")
    except OSError as error:
        return _wrong(f"{path} cannot be written: {error.strerror}")
    return Reply(text=f"saved to {path}")


def _help() -> str:
    width = max(map(len, (*COMMANDS, *KEYS)))
    return "\n".join(f"{usage:<{width}}  {text}" for usage, text in (COMMANDS | KEYS).items())


def _wrong(text: str) -> Reply:
    return Reply(text=text, is_error=True)
