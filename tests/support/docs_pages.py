"""The pages of this repository: their links, code blocks, commands, flags and paths."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MAX_LINE = 160
_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"\s{2,}#.*$")
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-]*\*)")
_METRIC = re.compile(r"\bradixmesh_[a-z_]+[a-z]\b")
_VARIABLE = re.compile(r"\bRADIXMESH_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
_PATH = re.compile(
    r"^[\w.-]*(?:/[\w.-]+)*\.(?:py|md|yml|json|jsonl|proto|sh|cu|cuh|cpp|js|toml|txt|svg|png)$|^(?:[\w.-]+/)+$"
)


class Block(NamedTuple):
    """A code block. language: of a fence, "" for none, "indented" for a block without a fence."""

    page: str
    line: int
    language: str
    text: str


def pages() -> list[Path]:
    """README, docs/, and the READMEs of folders."""
    folders = ("clients/python", "clients/node", "kernels")
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *(ROOT / f / "README.md" for f in folders)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[Block]:
    """All code blocks, in order."""
    lines, start, language = page.read_text(encoding="utf-8").splitlines(), 0, None
    taken: list[str] = []
    for number, line in enumerate(lines, 1):
        fence = _FENCE.match(line)
        if language is None and fence:
            start, language, taken = number, fence[1], []
        elif language is not None and line.startswith("```"):
            yield Block(name_of(page), start, language, "\n".join(taken))
            language = None
        elif language is not None:
            taken.append(line)
        elif line.startswith("    ") and line.strip():
            yield Block(name_of(page), number, "indented", line.strip())
    assert language is None, f"{name_of(page)}:{start}: a fence that is not closed"


def commands(page: Path) -> list[str]:
    """Every shell command of a page: lines of `sh` blocks without their comments, `$` lines of `console` blocks."""
    found = []
    for block in blocks(page):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language == "sh":
            found += [_COMMENT.sub("", line).strip() for line in lines]
        elif block.language == "console":
            found += [line[2:].strip() for line in lines if line.startswith("$ ")]
    return [command for command in found if command and not command.startswith("#")]


def snippets(page: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    return [block.text for block in blocks(page) if block.language == language]


def links(page: Path) -> list[str]:
    """Targets of Markdown links, outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return _LINK.findall(re.sub(r"`[^`\n]*`", "", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        number = sum(other == slug or other.startswith(f"{slug}-") for other in found)
        found.append(slug if slug not in found else f"{slug}-{number}")
    return frozenset(found)


def flags(text: str) -> set[str]:
    """Every `--flag` of a text; what ends in `*` stands for several, and is none."""
    return set(_FLAG.findall(re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)))


def metrics(text: str) -> set[str]:
    return set(_METRIC.findall(text))


def variables(text: str) -> set[str]:
    return set(_VARIABLE.findall(text))


def named_paths(page: Path) -> set[str]:
    """Files and folders (with a slash at the end) that a page names in backquotes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return {token for token in re.findall(r"`([^`\n]+)`", text) if _PATH.match(token)}


@cache
def tracked() -> tuple[str, ...]:
    """Every file of the repository that git knows, and files that are new."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False).stdout.split(
        "\n"
    )
    if not any(listed):  # Not a checkout: an unpacked archive.
        listed = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return tuple(f"/{path}" for path in listed if path and (ROOT / path).exists())


def is_there(path: str) -> bool:
    """Tells whether a file or folder of the repository has this path, or ends with it (`http/app.py`)."""
    wanted = f"/{path}"
    if path.endswith("/"):
        return any(wanted in known for known in tracked())
    return any(known.endswith(wanted) for known in tracked())
