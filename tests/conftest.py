"""GPU tests are skipped with a reason, property tests have no deadline of their own; hooks for run_tests.py."""

import gc
import json
import os
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import settings

# Modules of support that hold tests: their assertions show values too. Before they are imported.
pytest.register_assert_rewrite("support.runner_contract")

# torch's store asks for the name of "::ffff:127.0.0.1" when it connects. Where a nameserver loses one answer in fifty,
# a group of ranks stood 5 s for it. Set before anything is resolved; daemons inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# Tests of run_tests.py have a copy of this file without the folder.
if os.environ.get("TESTS_FORK_DAEMONS") and Path(__file__).with_name("support").is_dir():
    from support.fork_server import fork_daemons

    fork_daemons()

# Two shared cores: a slow example says nothing about the code. pytest's own timeout catches a hang.
settings.register_profile("mesh", deadline=None)
settings.load_profile("mesh")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # Slow to import: only where a GPU test was collected.

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_collection_finish() -> None:
    """Modules and thousands of tests stay to the end: not counted again by each collection, a tenth of the CPU time."""
    gc.collect()
    gc.freeze()


_CLAIMED = pytest.StashKey[dict[Path, bool]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leaves out the tests of a file that another process of run_tests.py has begun."""
    if not (folder := os.environ.get("TESTS_CLAIMS")):
        return None
    claimed = item.config.stash.setdefault(_CLAIMED, {})
    if item.path not in claimed:
        claim = Path(folder, str(item.path.relative_to(item.config.rootpath)).replace("/", "."))
        try:
            claim.touch(exist_ok=False)
            claimed[item.path] = True
        except FileExistsError:
            claimed[item.path] = False
        else:
            # The last test's tear-down kept the folder of the test behind it, which was another process's.
            item.session._setupstate.teardown_exact(item)
    return None if claimed[item.path] else True


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Writes what failed and what was skipped where run_tests.py asked for it."""
    if not (path := os.environ.get("TESTS_REPORT")):
        return
    failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
    failures = [
        (report.nodeid, "\n".join([report.longreprtext, *(f"-- {name}\n{text}" for name, text in report.sections)]))
        for report in failed
    ]
    skipped = [
        (report.nodeid, report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr))
        for report in terminalreporter.getreports("skipped")
    ]
    Path(path).write_text(json.dumps({"failures": failures, "skipped": skipped}))
