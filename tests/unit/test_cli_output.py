"""What the command line writes: log lines for people, tables, usage."""

import io
import json
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
