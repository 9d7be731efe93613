"""Dependencies are imported, pinned and explained: nothing is shipped that nobody uses."""

from __future__ import annotations

import ast
import re
import tomllib
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "dependencies.md").read_text()
FILES = sorted(path for path in (ROOT / "compose" / "requirements").glob("*.txt") if path.name != "build.txt")
# Imported by another package or by generated stubs; MarkupSafe and the like are in the files of images only.
INDIRECT = {"googleapis-common-protos", "protobuf", "types-grpcio"}


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def imported(folders: tuple[str, ...]) -> set[str]:
    """Top-level modules that code of ours imports, at whatever depth."""
    modules = set()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Import):
                    modules |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.add(node.module)
    return {module.partition(".")[0] for module in modules}


def test_every_dependency_is_imported() -> None:
    used = imported(("daemons", "kernels", "clients/cli", "clients/python"))
    providers = {
        name_of(provider)
        for module, all_providers in metadata.packages_distributions().items()
        if module in used
        for provider in all_providers
    }
    declared = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    assert declared - INDIRECT <= providers, f"imported by nothing: {sorted(declared - INDIRECT - providers)}"


@pytest.mark.parametrize("requirements", [None, *FILES], ids=lambda path: path.stem if path else "pyproject")
def test_every_dependency_is_explained(requirements: Path | None) -> None:
    if requirements is None:
        extras = [item for items in PROJECT["optional-dependencies"].values() for item in items]
        names = {name_of(item) for item in [*PROJECT["dependencies"], *extras]}
    else:
        lines = [line for line in requirements.read_text().splitlines() if line and not line.startswith("#")]
        names = {name_of(line) for line in lines}
    tables = " ".join(line.rsplit("|", 2)[0] for line in PAGE.splitlines() if line.startswith("|"))
    explained = {name.replace("_", "-") for name in re.findall(r"`([A-Za-z0-9._-]+\*?)`", tables)}
    missing = {name for name in names if not any(fnmatch(name, pattern.lower()) for pattern in explained)}
    assert not missing, f"docs/dependencies.md does not say what these are for: {sorted(missing)}"
