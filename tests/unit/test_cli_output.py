"""Output of the command line: log lines for people, tables, usage."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.cli.log_line import readable
from radixmesh.cli.terminal import Terminal

SRC = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("line", ["plain text", "", "{not json", '{"no": "event"}', '{"event"', "[1]"])
def test_other_lines_stay_as_they_are(line):
    assert readable(line) == line


def test_structured_lines_lose_what_the_reader_knows():
    known = {"ts": "2026-01-01", "daemon": "worker", "instance": "abc", "logger": "x"}
    record = known | {
        "level": "info",
        "event": "serving",
        "addresses": ["a:1", "b:2"],
        "n": 3,
        "why": "two words",
        "no": None,
    }
    assert readable(json.dumps(record)) == 'serving addresses=a:1,b:2 n=3 why="two words"'
    failed = known | {"level": "error", "event": "failed", "traceback": "Traceback\n  line"}
    assert readable(json.dumps(failed)) == "error failed\nTraceback\n  line"


def test_every_line_of_an_output_has_the_prefix_and_prefixes_align():
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.name_width(["a-1", "longer-1"])
    terminal.prefixed("a-1", "one\ntwo")
    terminal.prefixed("longer-1", "three")
    assert stream.getvalue() == "a-1      | one\na-1      | two\nlonger-1 | three\n"


ERASE = "\x1b[2J\x1b[1A\x1b[2K"
CLIPBOARD = "\x1b]52;c;cm0gLXJm\x07"
HOSTILE = (CLIPBOARD, ERASE, "\x9b31m", "\r", "\x08", "\x7f", "\x00", "\x85", "\u2028", "\u202e", "\ud800")


class Screen(io.StringIO):
    """A terminal, and what reached it."""

    def isatty(self) -> bool:
        return True


def steers(text: str) -> str:
    """Characters of a text that could steer a terminal, except our own colours."""
    rest = re.sub(r"\x1b\[\d{1,2}m", "", text)
    return "".join(char for char in rest if not char.isprintable() and char not in "\n\t")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_nothing_that_others_say_steers_the_terminal(hostile, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    terminal = Terminal(screen)
    terminal.line(f"a{hostile}b")
    terminal.error(f"a{hostile}b")
    terminal.write(f"a{hostile}b\n")
    terminal.prefixed("x-1", f"a{hostile}b")
    terminal.prefixed("x-1", readable(json.dumps({"event": f"a{hostile}b", hostile: [hostile], "traceback": hostile})))
    terminal.progress("x-1", "healthy", f"a{hostile}b\nforged", "[1/1]")
    terminal.table(("A",), [(f"a{hostile}b\nforged",)])
    terminal.line(terminal.colour(f"a{hostile}b", "2"))
    assert steers(screen.getvalue()) == ""
    assert "\nforged" not in screen.getvalue(), "one line stays one line"
    screen.getvalue().encode()


def test_a_colour_that_others_send_is_shown_and_not_worn(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    Terminal(screen).prefixed("x-1", "\x1b[8mhidden")
    assert "\\x1b[8mhidden" in screen.getvalue()


def test_a_log_line_cannot_forge_another():
    record = {"event": "refused", "request_id": "x\nrouter-1 | all is well", "field": "a level=error"}
    assert readable(json.dumps(record)) == 'refused request_id="x\\nrouter-1 | all is well" field="a level=error"'
    assert readable('{"event": "x", "a": "\\u001b[2J"}') == 'x a="\\u001b[2J"'
    assert readable('{"event": "x", "v": ' + "[" * 20_000) == '{"event": "x", "v": ' + "[" * 20_000


def test_a_pipe_gets_a_models_text_as_it_is():
    stream = io.StringIO()
    Terminal(stream).write("a\x1b[2Jb")
    assert stream.getvalue() == "a\x1b[2Jb"


def test_a_table_aligns_and_leaves_out_empty_columns():
    stream = io.StringIO()
    Terminal(stream).table(("A", "B", "C"), [("wide cell", "", "x"), ("y", "", "z")])
    assert stream.getvalue() == "A          C\nwide cell  x\ny          z\n"


def run_cli(*arguments):
    command = [sys.executable, "-m", "radixmesh.cli", *arguments]
    return subprocess.run(command, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=60)


def test_usage_names_every_verb_and_daemon():
    shown = run_cli()
    assert shown.returncode == 0
    for verb in (
        "up",
        "down",
        "status",
        "generate",
        "health",
        "tokenizer",
        "detokenizer",
        "worker",
        "scheduler",
        "router",
    ):
        assert f"\n  {verb} " in shown.stdout
    wrong = run_cli("dwon")
    assert wrong.returncode == 2 and "'dwon'" in wrong.stderr


def test_the_health_verb_loads_neither_torch_nor_the_daemons():
    code = "import sys; from radixmesh.cli import health; health.run(['127.0.0.1:1']); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=60
    )
    modules = done.stdout.split()
    assert "grpc" in modules
    assert not {"torch", "numpy", "yaml", "radixmesh.daemons"} & set(modules)
