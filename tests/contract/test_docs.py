"""README and docs/ agree with themselves and with the code: links, line lengths, flags, metrics, paths, commands."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from support import client_list, docs_pages
from support.bench_modules import bench_imports
from support.docs_commands import COMMANDS, SNIPPETS, NotHere
from support.docs_pages import ROOT, name_of

from radixmesh.cli.__main__ import all_verbs, main
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

PAGES = docs_pages.pages()
# Flags of programs that are not ours, where pages name them.
FOREIGN_FLAGS = {
    "--build", "--secret", "--no-recreate", "--no-deps",  # docker
    "--index-url", "--prefix",  # pip, npm
}  # fmt: skip
# Files that pages name and that are not of this repository: of models, of users, of run folders.
FOREIGN_FILES = {
    "chats.json", "client.js", "cluster.log", "config.json", "generation_config.json", "model.safetensors.index.json",
    "out.json", "state.json", "tokenizer.json", "tokenizer_config.json", ".tools",
}  # fmt: skip
_PROGRAMS = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:sudo |\.venv/bin/)?"
    r"(?:radixmesh|make|curl|python|pip|docker|npm|node|compose/\S+\.sh|\.ci/run|eval) \S"
)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [f"{n}: {len(line)}" for n, line in enumerate(lines, 1) if len(line) > docs_pages.MAX_LINE]
    assert not long, f"lines of more than {docs_pages.MAX_LINE} characters in {name_of(page)}: {', '.join(long)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in docs_pages.links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        if anchor:
            assert anchor in docs_pages.anchors(target), (
                f"{name_of(page)}: {link}: {sorted(docs_pages.anchors(target))}"
            )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_files_exist(page: Path) -> None:
    gone = sorted(
        path
        for path in docs_pages.named_paths(page)
        if Path(path).name not in FOREIGN_FILES and "NAME" not in path and not docs_pages.is_there(path)
    )
    assert not gone, f"{name_of(page)} names files that are not here: {gone}"


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in docs_pages.links(index)}
    missing = {page.name for page in (ROOT / "docs").glob("*.md")} - linked - {"README.md"}
    assert not missing, f"docs/README.md does not lead to {sorted(missing)}"


def help_of(*verb: str) -> str:
    """Output of `radixmesh VERB --help`."""
    printed = io.StringIO()
    argv, sys.argv = sys.argv, ["radixmesh", *verb, "--help"]
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = argv
    return printed.getvalue()


@cache
def flags_by_verb() -> dict[str, set[str]]:
    known = {verb: docs_pages.flags(help_of(verb)) for verb in all_verbs()}
    for verb in re.findall(r"^  ([a-z-]+) ", help_of("bench"), re.MULTILINE):
        known[f"bench {verb}"] = docs_pages.flags(help_of("bench", verb))
    assert all(known[verb] for verb in ("router", "scheduler", "worker", "up", "bench serve")), known
    return known


@cache
def flags_of_script(path: Path) -> set[str]:
    return {flag for text in re.findall(r'"(--[a-z0-9-]+)"', path.read_text(encoding="utf-8")) for flag in (text,)}


@cache
def all_flags() -> set[str]:
    scripts = [flags_of_script(path) for path in (ROOT / "bench").rglob("*.py")]
    return set().union(FOREIGN_FLAGS, *flags_by_verb().values(), *scripts, {"--help", "--version"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_flags_exist(page: Path) -> None:
    unknown = docs_pages.flags(page.read_text(encoding="utf-8")) - all_flags()
    assert not unknown, f"{name_of(page)} names flags that no daemon, verb or script has: {sorted(unknown)}"


def test_commands_have_flags_and_files_that_exist() -> None:
    for command in COMMANDS:
        words = re.sub(r"'[^']*'|\"[^\"]*\"", "TEXT", command).split()
        given = {word for word in words if word.startswith("--")} - FOREIGN_FLAGS
        if "radixmesh" in words or "radixmesh.cli" in words:
            after = words[words.index("radixmesh.cli" if "radixmesh.cli" in words else "radixmesh") + 1 :]
            verb = " ".join(after[:2]) if after[0] == "bench" else after[0]
            assert verb in flags_by_verb(), f"{command}: there is no verb {verb}"
            assert given <= flags_by_verb()[verb], f"{command}: {sorted(given - flags_by_verb()[verb])}"
        elif words[0] == "make":
            targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert words[1] in targets, command
        for word in words:
            if re.match(r"(bench|tests|compose|clients|docs|daemons)/\S*[\w/]$", word) and "*" not in word:
                assert (ROOT / word).exists() or word in ("compose/wheels/",), f"{command}: {word} is not here"
            if word.startswith("bench/") and word.endswith(".py"):
                assert given <= flags_of_script(ROOT / word) | {"--quick"}, command


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_metrics_exist(page: Path) -> None:
    known = {info.name for info in Metrics().infos}
    named = docs_pages.metrics(page.read_text(encoding="utf-8"))
    unknown = {name for name in named if name not in known and f"{name}_total" not in known}
    assert not unknown, f"{name_of(page)} names metrics that no daemon has: {sorted(unknown)}"


@cache
def known_variables() -> frozenset[str]:
    flags = set().union(*flags_by_verb().values())
    known = {f"RADIXMESH_{flag.removeprefix('--').replace('-', '_').upper()}" for flag in flags}
    sources = (".py", ".yml", ".sh", "Dockerfile", "Makefile")
    for path in docs_pages.tracked():
        if path.endswith(sources):
            known |= docs_pages.variables((ROOT / path[1:]).read_text(encoding="utf-8"))
    return frozenset(known)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_variables_exist(page: Path) -> None:
    unknown = docs_pages.variables(page.read_text(encoding="utf-8")) - known_variables()
    assert not unknown, f"{name_of(page)} names variables that nothing reads: {sorted(unknown)}"


def test_every_command_is_run_by_a_test_or_listed_with_the_reason_why_not() -> None:
    shown = {command for page in PAGES for command in docs_pages.commands(page)}
    assert shown - COMMANDS.keys() == set(), "add these to tests/support/docs_commands.py"
    assert COMMANDS.keys() - shown == set(), "no page shows these any more: tests/support/docs_commands.py"


def test_every_snippet_is_run_by_a_test_or_listed_with_the_reason_why_not() -> None:
    shown = {
        f"{name_of(page)} {language} {number}"
        for page in PAGES
        for language in ("python", "js", "yaml")
        for number, _ in enumerate(docs_pages.snippets(page, language), 1)
    }
    assert shown == SNIPPETS.keys(), "tests/support/docs_commands.py lists them: page, language, number on the page"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_snippets_compile(page: Path) -> None:
    for text in docs_pages.snippets(page, "python"):
        compile(text, name_of(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_tests_that_run_commands_exist() -> None:
    for name, by in (*COMMANDS.items(), *SNIPPETS.items()):
        if isinstance(by, NotHere):
            assert len(by.reason) > 10, name
            continue
        path, _, test = by.partition("::")
        assert (ROOT / path).exists(), f"{name}: {by}"
        assert not test or re.search(rf"^(?:async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), (
            f"{name}: {by}"
        )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_hides_in_a_block_of_another_kind(page: Path) -> None:
    for block in docs_pages.blocks(page):
        if block.language in ("", "indented", "text"):
            hidden = [line for line in block.text.splitlines() if _PROGRAMS.match(line.strip())]
            assert not hidden, f"{block.page}:{block.line}: write ```sh (or console), so that it is checked: {hidden}"


def test_the_results_page_is_current() -> None:
    with bench_imports():
        import results_page
    page = (ROOT / "docs" / "gpu-results.md").read_text()
    assert page == results_page.page(), "run: python bench/results_page.py"


def test_the_page_of_clients_tells_one_run_of_all() -> None:
    outcome = json.loads(client_list.OUTCOME.read_text())
    assert outcome.keys() == client_list.CLIENTS.keys(), "a run of all: CLIENTS_OUTCOME=... make test-clients"
    for name, client in client_list.CLIENTS.items():
        assert tuple(outcome[name]["checked"]) == client.checks and (ROOT / client.code).exists(), name
    page = (ROOT / "docs" / "clients.md").read_text()
    assert page == client_list.in_page(page), "run: python tests/support/client_list.py docs/clients.md"


def test_the_trip_has_one_number_of_files_and_all_of_them_exist() -> None:
    page = (ROOT / "docs" / "trip.md").read_text(encoding="utf-8")
    counted = json.loads((ROOT / "bench" / "results" / "trip.json").read_text(encoding="utf-8"))["latest"]
    files = re.findall(r"^\| `(daemons/[\w/]+\.py)` \|", page, re.MULTILINE)
    assert len(files) == len(set(files)) == counted["num_files"] and all((ROOT / file).is_file() for file in files)
    assert f"\n{len(files)} files.\n" in page and f": {len(files)} at commit\n{counted['commit']}," in page
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"lists all files that it passes ({len(files)})" in architecture
