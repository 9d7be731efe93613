"""Mutates random lines of daemons/ and lists the mutants that no quick test notices. Not a part of CI.

    python tests/mutation.py [--num 200] [--seed 0] [--under daemons/scheduler ...] [--json FILE]

A mutant differs from the code in one place: an operator, a comparison, a condition, a constant, or a statement that is
gone. It is run in a copy of the tree, against the files of tests/unit and tests/contract that import its module, or
where none does, against those that import what imports it. A file that takes more CPU time than --max-file-s is
left out. A survivor is a line that can be wrong unnoticed by these, or a mutant that means the same: read it, and try
the tests of tests/mesh that run it, before a test is written for it.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/unit", "tests/contract")
# Code that needs a GPU, and flags: a default or a help text has no behaviour to test.
LEFT_OUT = ("daemons/worker/cuda/", "/__main__.py", "/config.py")
_MOST = 3  # Test files run for one mutant.
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """start, end: bytes of the file that `text` replaces."""

    path: str
    line: int
    start: int
    end: int
    text: str
    change: str


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file. Nothing in assertions, log calls, annotations and error messages is changed."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, new in _changes(ast.parse(source)):
        assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno is not None and node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = " ".join(source[start:end].decode().split())
        change = f"{old[:90]}  ->  {new[:90]}"
        # Brackets: the new text may bind less tightly than the old one did.
        text = new if isinstance(node, ast.stmt) or new.isidentifier() or new.lstrip("-").isdigit() else f"({new})"
        found.append(Mutant(path=path, line=node.lineno, start=start, end=end, text=text, change=change))
    return found


def _changes(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Nodes, and the text that takes their place."""
    for node in ast.iter_child_nodes(tree):
        if _is_left_alone(node):
            continue
        if _is_removable(node):
            yield node, "pass"
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node.test, f"not ({ast.unparse(node.test)})"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            swapped = ast.Compare(node.left, [_SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)  # type: ignore[list-item]
            yield node, ast.unparse(swapped)
        elif isinstance(node, ast.BoolOp):
            yield node, ast.unparse(ast.BoolOp(_SWAPS[type(node.op)](), node.values))  # type: ignore[arg-type]
            yield node, ast.unparse(node.values[0])
        elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS and not _is_text(node):
            yield node, ast.unparse(ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right))  # type: ignore[arg-type]
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            yield node, str(node.value + 1)
        yield from _changes(node)


def _is_removable(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await | ast.Yield)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Delete | ast.Break | ast.Continue)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.arg):
        return True
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func)
        return function.startswith("log.") or function in ("setting", "MeshError", "dataclass", "field")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_left_alone(node.value)


def _is_text(node: ast.BinOp) -> bool:
    """Joined texts and unions of types, which have no arithmetic."""
    parts = (node.left, node.right)
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and (part.value is None or isinstance(part.value, str | bytes)))
        for part in parts
    ) or (isinstance(node.op, ast.BitOr) and any(isinstance(part, ast.Name | ast.Subscript) for part in parts))


class TestMap:
    """Test files by the modules that they import, with the distance of each."""

    __test__ = False

    def __init__(self) -> None:
        files = [path for folder in ("daemons", "tests/support") for path in sorted((ROOT / folder).rglob("*.py"))]
        self._imports = {_module_of(path): _imported_by(path) for path in files}
        tests = [path for folder in TESTS for path in sorted((ROOT / folder).glob("test_*.py"))]
        self._of_tests = {str(path.relative_to(ROOT)): self._own(_imported_by(path)) for path in tests}

    def near(self, module: str) -> list[str]:
        """Test files that import it themselves, those with the fewest imports first."""
        found = [name for name, modules in self._of_tests.items() if module in modules]
        return sorted(found, key=lambda name: len(self._of_tests[name]))

    def far(self, module: str) -> list[str]:
        """Those that import a module which imports it, or one that imports that, the nearest first."""
        distance: dict[str, int] = {}
        for name, modules in self._of_tests.items():
            reached, seen, steps = set(modules), set(modules), 0
            while reached and module not in seen and steps < 2:
                reached = {other for one in reached for other in self._imports.get(one, ())} - seen
                seen |= reached
                steps += 1
            if module in seen and steps:
                distance[name] = steps
        return sorted(distance, key=lambda name: (distance[name], len(self._of_tests[name])))

    def _own(self, modules: set[str]) -> set[str]:
        """Imports of a test, with those of its support modules in their place."""
        support = {module for module in modules if module.startswith("support")}
        while support:
            modules = (modules - support).union(*(self._imports.get(module, set()) for module in support))
            support = {module for module in modules if module.startswith("support")}
        return modules


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "tests" else ("radixmesh", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_by(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    own = {name for name in found if name.startswith(("radixmesh.daemons", "support"))}
    return own - {_module_of(path)} if "tests" not in path.parts[-3:-1] else own


class Copy:
    """A copy of the tree in which one file at a time is mutated."""

    def __init__(self, folder: Path, max_file_s: float) -> None:
        self._root = folder / "tree"
        self._max_file_s = max_file_s
        self._seconds: dict[str, float] = {}
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT, capture_output=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (source := ROOT / name).exists() or source.is_symlink():
                (self._root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self._root / name, follow_symlinks=False)

    def quick(self, tests: Sequence[str], most: int) -> list[str]:
        """The first of them that pass unmutated in time."""
        found: list[str] = []
        for name in tests:
            if len(found) == most:
                break
            if name not in self._seconds:
                passed, seconds = self._run([name], 10 * self._max_file_s)
                self._seconds[name] = seconds if passed else float("inf")
            if self._seconds[name] <= self._max_file_s:
                found.append(name)
        return found

    def survives(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        path = self._root / mutant.path
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.text.encode() + source[mutant.end :])
        try:
            return self._run(tests, 30 + 15 * sum(self._seconds[name] for name in tests))[0]
        finally:
            path.write_bytes(source)

    def _run(self, tests: Sequence[str], timeout_s: float) -> tuple[bool, float]:
        """In a fork of this process, which has imported what takes long: whether all pass, and the CPU time of it."""
        child = os.fork()
        if not child:
            os.setsid()
            _pytest_in(self._root, tests)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status) == 0, usage.ru_utime + usage.ru_stime
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return False, timeout_s


def _pytest_in(root: Path, tests: Sequence[str]) -> None:
    import pytest

    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root / "src")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path[:] = [str(root / "src"), *(path for path in sys.path if not path.startswith(str(ROOT)) or "venv" in path)]
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        status = 1
        try:
            status = int(pytest.main(["-x", "-q", "-m", "not full", "-p", "no:cacheprovider", *tests]))
        finally:
            os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--under", nargs="+", default=["daemons"], help="folders and files of the lines")
    parser.add_argument(
        "--max-file-s", type=float, default=20.0, help="test files that take more CPU time are left out"
    )
    parser.add_argument("--json", type=Path, help="write the survivors there, after each")
    options = parser.parse_args()
    for module in ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis.stateful", "numpy", "torch", "grpc.aio"):
        __import__(module)  # Forks have them.
    found = {
        path
        for name in options.under
        for path in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])
    }
    paths = [str(path.relative_to(ROOT)) for path in sorted(found)]
    mutants = {path: mutants_of(path, (ROOT / path).read_bytes()) for path in paths if not _is_excluded(path)}
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in (mutant for found in mutants.values() for mutant in found):
        by_line.setdefault((mutant.path, mutant.line), []).append(mutant)
    rng = random.Random(options.seed)
    lines = rng.sample(sorted(by_line), min(options.num, len(by_line)))
    chosen = [rng.choice(by_line[line]) for line in lines]
    folder = Path(tempfile.mkdtemp())
    try:
        _report(Copy(folder, options.max_file_s), chosen, options.json)
    finally:
        shutil.rmtree(folder)


def _is_excluded(path: str) -> bool:
    return any(part in path for part in LEFT_OUT)


def _report(copy: Copy, mutants: Sequence[Mutant], file: Path | None) -> None:
    tests = TestMap()
    survivors: list[dict[str, object]] = []
    for number, mutant in enumerate(mutants, 1):
        module = _module_of(ROOT / mutant.path)
        chosen = copy.quick(tests.near(module), _MOST) or copy.quick(tests.far(module), _MOST)
        survives = not chosen or copy.survives(mutant, chosen)
        outcome = "killed" if not survives else "SURVIVES" if chosen else "UNTESTED by quick tests"
        print(f"{number}/{len(mutants)} {outcome}: {mutant.path}:{mutant.line}  {mutant.change}", flush=True)
        if survives:
            survivors.append({**asdict(mutant), "outcome": outcome, "tests": chosen})
            if file is not None:
                file.write_text(json.dumps(survivors, indent=1) + "\n")
    print(f"{len(survivors)} of {len(mutants)} survive")


if __name__ == "__main__":
    main()
