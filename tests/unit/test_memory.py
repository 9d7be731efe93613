"""The memory that a process may use, and the router's defaults that follow from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.runtime.memory import memory_bytes
from radixmesh.daemons.runtime.settings import load_settings

MIB = 1 << 20


def machine(root: Path, cgroup: str, **limits: str) -> Path:
    """A machine of 8 GiB. limits: file below /sys/fs/cgroup, "__" for "/", to its text."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:        8388608 kB\nMemFree: 1 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max").replace("_in", ".limit_in")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "limits", "mib"),
    [
        ("0::/\n", {"memory_max": f"{512 * MIB}\n"}, 512),  # A container, version 2.
        ("0::/\n", {"memory_max": "max\n"}, 8192),
        ("0::/a/b\n", {"a__memory_max": f"{700 * MIB}", "a__b__memory_max": "max"}, 700),
        ("0::/a/b\n", {"a__memory_max": f"{700 * MIB}", "a__b__memory_max": f"{900 * MIB}"}, 700),
        (
            "5:cpu:/x\n4:memory:/docker/1\n",
            {"memory__memory_in_bytes": f"{256 * MIB}"},
            256,
        ),  # Version 1, in a container.
        ("4:memory:/x\n", {"memory__memory_in_bytes": "9223372036854771712"}, 8192),
        ("0::/gone\n", {}, 8192),
        ("", {}, 8192),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, cgroup: str, limits: dict[str, str], mib: int) -> None:
    assert memory_bytes(machine(tmp_path, cgroup, **limits)) == mib * MIB


def test_the_routers_shares_of_a_small_container_fit_it() -> None:
    """journal + bodies + views + messages: they were 1.3 GiB whatever the container."""
    code = (
        "from radixmesh.daemons.runtime import memory\n"
        "memory.memory_bytes = lambda: 512 << 20\n"
        "from radixmesh.daemons.router.config import RouterSettings\n"
        "s = RouterSettings()\n"
        "print(s.journal_bytes, s.http_bodies_bytes, s.view_bytes, s.grpc_message_bytes, s.http_body_bytes)"
    )
    sources = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(sources)},
    )  # fmt: skip
    journal, bodies, views, message, body = map(int, done.stdout.split())
    assert (journal, bodies, views, message, body) == (128 * MIB, 64 * MIB, 32 * MIB, 16 * MIB, 16 * MIB)


def test_a_body_that_would_never_be_read_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        load_settings(RouterSettings, ["--http-bodies-bytes", "8000000"], "radixmesh-router", {})
    said = capsys.readouterr().err
    assert left.value.code == 2 and "--http-body-bytes 6000000 or less" in said, said
    load_settings(RouterSettings, ["--http-bodies-bytes", "8000000", "--http-body-bytes", "6000000"], "x", {})
