"""Rules for the prose of sources that a script can check."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_IMPORT = re.compile(r"^\s*(?:from|import) radixmesh\.daemons(?:\.| import )(\w+)", re.MULTILINE)
FOLDERS = ("daemons", "kernels", "clients", "compose", "bench", "tests")
# A docstring or a comment says what the thing is: a noun phrase or an imperative, "True if ..." for a predicate.
_WORDS = "(What|Which|Who|Whose|Whom|Where|How|Whether)"
_QUESTION = re.compile(rf"{_WORDS}\b")
# Parsing all sources takes seconds: only files with a line like this are parsed.
_SUSPECT = re.compile(rf"""(\"{{3}}|'{{3}}|#)[:\s]*{_WORDS}\b""")


def python_files(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if "node_modules" not in path.parts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_or_comment_begins_with_a_question_word(folder: str) -> None:
    files = python_files(folder)
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in texts(path.read_text())
        if _QUESTION.match(text)
    ]
    assert not found, "begin with a noun or an imperative instead:\n" + "\n".join(found)


def test_protos_explain_messages_the_same_way() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "protos").rglob("*.proto"))
        for number, line in _first_comment_lines(path.read_text(), "//")
        if _QUESTION.match(line.strip().removeprefix("//").strip())
    ]
    assert not found, "begin with a noun or an imperative instead:\n" + "\n".join(found)


@pytest.mark.parametrize("daemon", sorted(path.parent.name for path in (ROOT / "daemons").glob("*/__init__.py")))
def test_no_daemon_imports_another_one(daemon: str) -> None:
    """Importing one would start its side of an agreement in another process; both import daemons/runtime/ instead."""
    files = python_files(f"daemons/{daemon}")
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in _IMPORT.findall(path.read_text())
        if name not in (daemon, "runtime")
    ]
    assert files and not found, "move both sides' part to daemons/runtime/:\n" + "\n".join(found)


def test_imports_of_daemons_are_seen_in_every_form() -> None:
    source = "import radixmesh.daemons.a\nfrom radixmesh.daemons.b.c import d\n    from radixmesh.daemons import e\n"
    assert _IMPORT.findall(source) == ["a", "b", "e"]


def test_no_test_leaves_the_scripts_of_bench_on_the_path_of_all_others() -> None:
    """support.bench_modules does not: bench/hostile.py would stand where a test collected later means tests/hostile."""
    found = [
        f"{path.relative_to(ROOT)}:{statement.lineno}"
        for path in python_files("tests")
        if "sys.path" in (source := path.read_text())
        for statement in ast.parse(source).body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and re.search(r"\bsys\.path(\.(insert|append|extend)|\[.*\] =| \+?=)", ast.unparse(statement))
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_what_it_looks_for() -> None:
    source = '"""Which one."""\n# Where it is.\n# Who knows.\nx = 1  # How many.\n"""What x is."""\n'
    source += 'def f():\n    """True if so."""\n    # Reads it.\n    # What follows continues the sentence above.\n'
    assert [text for _, text in texts(source)] == [
        "Which one.",
        "What x is.",
        "True if so.",
        "Where it is.",
        "How many.",
        "Reads it.",
    ]


def texts(source: str) -> list[tuple[int, str]]:
    """(line, text) of docstrings and comments; none of a source that surely has no offender."""
    return [*docstrings(source), *comments(source)] if _SUSPECT.search(source) else []


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that stands alone: docstrings, and those below an attribute."""
    found = [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    yield from sorted(item for item in found if item[1])


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the first line of every comment."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        is_alone = lines[line - 1].lstrip().startswith("#") if token.type == tokenize.COMMENT else False
        is_continued = is_alone and line > 1 and lines[line - 2].lstrip().startswith("#")
        if token.type == tokenize.COMMENT and not is_continued:
            yield line, token.string.lstrip("#: ")


def _first_comment_lines(source: str, sign: str) -> Iterator[tuple[int, str]]:
    is_inside = False
    for number, line in enumerate(source.splitlines(), 1):
        is_comment = line.lstrip().startswith(sign)
        if is_comment and not is_inside:
            yield number, line
        is_inside = is_comment
