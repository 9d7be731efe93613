"""Runs the daily suite or that of the compose files, reruns what may be rerun, and says at the end what was missing.

python tests/run_tests.py daily|compose [PYTEST-ARGUMENT...]

The daily suite runs in three processes, for two cores: one of tests that compute, and two of tests that mostly wait,
the second of which begins in the middle of the list. A process that is through takes files of the others from the end
of their lists: the computing one any that wait, the others those in SHARED, which compute.

Tests of real processes (tests/mesh, tests/compose) meet whatever machine there is: at most two that failed are run once
more, alone. Any other test that fails, fails the run. Every first failure is written with its output to
tests/.first-failures and printed at the end; tests/first_failures.json has those that are known, and the rule.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMPUTING = (
    "tests/unit",
    "tests/kernels",
    "tests/gpu",
    "tests/contract",
    "tests/mesh/test_vectors.py",
    "tests/mesh/test_scheduler_service.py",
)
# Of what computes, the longest last: files that a process which waited can begin late, or that take long.
SHARED = (
    "tests/contract/test_protos_compatible.py",
    "tests/unit/test_http_bodies.py",
    "tests/unit/test_chat_parsers.py",
    "tests/unit/test_poison_requests.py",
    "tests/unit/test_detokenizer_output_decoder.py",
    "tests/contract/test_unary_gate.py",
    "tests/contract/test_runtime_lifecycle.py",
    "tests/unit/test_planner_machine.py",
    "tests/contract/test_queue_policy_contract.py",
    "tests/contract/test_stubs_current.py",
    "tests/unit/test_asynchronous_worker.py",
    "tests/mesh/test_scheduler_service.py",
    "tests/unit/test_scheduler_hour.py",
    "tests/unit/test_radix_machine.py",
    "tests/unit/test_bench_scheduler.py",
    "tests/unit/test_cpu_determinism.py",
    "tests/unit/test_deepseek_determinism.py",
    "tests/unit/test_families.py",
    "tests/unit/test_cpu_llama.py",
    "tests/unit/test_deepseek.py",
    "tests/contract/test_kv_store_contract.py",
    "tests/unit/test_grammar_compiler.py",
    "tests/kernels/test_device_families.py",
    "tests/kernels/test_device_deepseek.py",
    "tests/kernels/test_fp8_deepseek.py",
    "tests/kernels/test_verify_warm_up.py",
    "tests/kernels/test_ngram_steps.py",
    "tests/kernels/test_peer_collectives.py",
    "tests/kernels/test_network_steps.py",
    "tests/kernels/test_gemm_sm90.py",
    "tests/kernels/test_guided_device.py",
    "tests/kernels/test_forced_drafts.py",
    "tests/kernels/test_device_rank_daemons.py",
)
RERUN_FOLDERS = ("tests/mesh/", "tests/compose/")
MOST_RERUN = 2
REPORT = "TESTS_REPORT"
CLAIMS = "TESTS_CLAIMS"
FORKED = "TESTS_FORK_DAEMONS"
# Missing things by the reasons of skips; programs are looked for besides, since some tests are not even collected.
WANTS = {
    "tmux": ("tmux",),
    "prometheus": ("prometheus", "promtool"),
    "npm": ("npm", "no node", "node_modules"),
    "Docker": ("docker",),
    "g++": ("g++", "C++ compiler"),
    "openssl": ("openssl",),
    "a GPU": ("CUDA", "GPU", "flashinfer", "compute capability"),
}
_NOTHING_SELECTED = 5


class Failure(NamedTuple):
    """A test that failed, and all that pytest has to say of it."""

    test: str
    output: str


class Report(NamedTuple):
    """One pytest run. skipped: (test, reason)."""

    failures: list[Failure]
    skipped: list[tuple[str, str]]

    @classmethod
    def read(cls, path: Path) -> Report:
        if not path.is_file():
            return cls([], [])
        loaded = json.loads(path.read_text())
        return cls([Failure(*item) for item in loaded["failures"]], [(a, b) for a, b in loaded["skipped"]])


def to_rerun(failures: Sequence[Failure]) -> list[str]:
    """Tests to run once more: all that failed, or none if one of them must not be or there are too many."""
    tests = sorted({failure.test for failure in failures})
    is_allowed = all(test.startswith(RERUN_FOLDERS) for test in tests) and len(tests) <= MOST_RERUN
    return tests if is_allowed else []


def missing_lines(skipped: Sequence[tuple[str, str]], absent: Sequence[str] = ()) -> list[str]:
    """A line for each thing that this machine lacks: the tests that were skipped for want of it."""
    tests: dict[str, list[str]] = defaultdict(list)
    for test, reason in skipped:
        want = next((want for want, words in WANTS.items() if any(word in reason for word in words)), reason)
        tests[want].append(test)
    for want in absent:
        tests.setdefault(want, [])
    lines = []
    for want, names in sorted(tests.items()):
        files = sorted({name.split("::")[0] for name in names})
        text = f"{len(names)} tests skipped: {', '.join(files)}" if names else "needed by tests that are run apart"
        lines.append(f"{want}: {text}")
    return lines


def known_lines(failures: Sequence[Failure], known: dict[str, object]) -> list[str]:
    """For each first failure, what the committed list says of it."""
    entries = known["first_failures"]
    assert isinstance(entries, list)
    lines = []
    for failure in failures:
        runs = [entry["run"] for entry in entries if entry["test"] == failure.test]
        lines.append(
            f"{failure.test}: also first in {', '.join(runs)}: two of the last ten runs, a bug to be mended"
            if runs
            else f"{failure.test}: not known; add it to tests/first_failures.json"
        )
    return lines


def main(suite: str, arguments: list[str]) -> int:
    folder = Path(tempfile.mkdtemp())
    try:
        is_daily = suite == "daily"
        code = _daily(folder, arguments) if is_daily else _pytest(["tests/compose", *arguments], folder / "0.json")
        found = [Report.read(path) for path in sorted(folder.glob("*.json"))]
        failures = [failure for report in found for failure in report.failures]
        again = to_rerun(failures) if code == 1 else []
        if again:
            print(f"=== {len(again)} failed at first, run once more: {' '.join(again)}", flush=True)
            code = _pytest([*again, *_options(arguments)], folder / "again.json")
        _say(failures, [skip for report in found for skip in report.skipped])
        return code
    finally:
        shutil.rmtree(folder)


def _daily(folder: Path, arguments: list[str]) -> int:
    waiting = _waiting_files()
    middle = len(waiting) // 2
    shared = [name for name in SHARED if (ROOT / name).is_file()]
    computing = _files_under(COMPUTING)
    orders = [
        [*waiting, *reversed(shared)],
        [*waiting[middle:], *waiting[:middle], *reversed(shared)],
        [*(name for name in computing if name not in shared), *shared, *reversed(waiting)],
    ]
    with tempfile.TemporaryDirectory() as claims, ExitStack() as stack:
        # The first says at once what it does, the others when all are through.
        outputs = [None, *(stack.enter_context(tempfile.TemporaryFile("w+")) for _ in orders[1:])]
        runs = [
            _start([*order, *arguments], folder / f"{number}.json", output, claims)
            for number, (order, output) in enumerate(zip(orders, outputs, strict=True))
        ]
        try:
            codes = [run.wait() for run in runs]
        finally:
            for run in runs:
                run.kill()
        for order, output in zip(orders, outputs, strict=True):
            if output is not None:
                output.seek(0)
                print(f"\n=== from {order[0]}\n{output.read()}", flush=True)
    # One of them may have had nothing to run.
    return max((code for code in codes if code != _NOTHING_SELECTED), default=_NOTHING_SELECTED)


def _waiting_files() -> list[str]:
    """Test files of the daily suite that are not in COMPUTING."""
    return [name for name in _files_under(("tests",)) if not name.startswith((*COMPUTING, "tests/compose/"))]


def _files_under(names: Sequence[str]) -> list[str]:
    """Test files, and those in folders."""
    paths = [
        path
        for name in names
        for path in ([ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("test_*.py")))
    ]
    return [str(path.relative_to(ROOT)) for path in paths]


def _pytest(arguments: list[str], report: Path) -> int:
    return _start(arguments, report, None).wait()


def _start(arguments: list[str], report: Path, output: object, claims: str = "") -> subprocess.Popen[str]:
    """claims: folder in which conftest.py notes the process that runs a file; empty = all files are run."""
    options = ("-m", "not full", "-p", "no:cacheprovider", "--durations=20")
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    stream = {} if output is None else {"stdout": output, "stderr": subprocess.STDOUT}
    environment = {**os.environ, REPORT: str(report), CLAIMS: claims, **({FORKED: "1"} if claims else {})}
    # Hundreds of daemons are started: without bytecode each of them compiles its own sources again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **stream)  # type: ignore[call-overload, no-any-return]


def _options(arguments: list[str]) -> list[str]:
    """Without names of tests, which a rerun has of its own, and what selects among them."""
    return [argument for argument in arguments if argument.startswith("-") and not argument.startswith(("-k", "-m"))]


def _say(failures: Sequence[Failure], skipped: Sequence[tuple[str, str]]) -> None:
    if failures:
        folder = ROOT / "tests" / ".first-failures"
        folder.mkdir(exist_ok=True)
        artefact = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.txt"
        artefact.write_text("\n".join(f"{'=' * 30} {failure.test}\n{failure.output}\n" for failure in failures))
        print(f"=== first failures ({artefact.relative_to(ROOT)}), with their output:\n{artefact.read_text()}")
        known = json.loads((ROOT / "tests" / "first_failures.json").read_text())
        print("\n".join(f"=== first failure: {line}" for line in known_lines(failures, known)))
    absent = [name for name, program in (("Docker", "docker"), ("tmux", "tmux"), ("npm", "npm"), ("prometheus",) * 2)
              if shutil.which(program) is None]  # fmt: skip
    for line in missing_lines(skipped, absent):
        print(f"=== missing on this machine: {line}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("daily", "compose"):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
