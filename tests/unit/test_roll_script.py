"""compose/roll.sh against a docker that only writes down what it is told: order, pairs, and the end at a failure."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "compose" / "roll.sh"
DOCKER = r"""#!/usr/bin/env bash
words="$*"
case "$words" in
*"ps --services") printf '%s\n' $SERVICES ;;
*"ps -q "* | *"ps -aq "*)
    echo "${words##* }-1"
    case "${words##* }" in tokenizer | router) echo "${words##* }-2" ;; esac
    ;;
inspect*Cmd*) kind=${words##* } kind=${kind%-1} && echo "${kind%-[ab]}" ;;
inspect*Env*scheduler-a*) echo RADIXMESH_WORKERS=worker-a:50051 ;;
inspect*Env*scheduler-b*) echo RADIXMESH_WORKERS=worker-b:50051 ;;
inspect*Env*scheduler*) echo RADIXMESH_WORKERS=worker:50051 ;;
inspect*Port*front*) echo "50050/tcp " ;;
inspect*) ;;
*) echo "$words" >>"$LOG" ;;
esac
[[ -z "$FAIL" || "$words" != *"$FAIL"* ]]
"""
SCALE = "tokenizer worker-a scheduler-a worker-b scheduler-b router front"
UP = "compose -f a.yml up --detach --no-build --no-deps --wait"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("docker", DOCKER), ("sleep", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def roll(folder: Path, *services: str, up: str = SCALE, fail: str = "") -> tuple[int, list[str], str]:
    log = folder / "log"
    log.write_text("")
    environment = {**os.environ, "SERVICES": up, "FAIL": fail, "LOG": str(log)}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(SCRIPT), "a.yml", *services],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, log.read_text().splitlines(), done.stdout + done.stderr


def recreate(service: str) -> str:
    return f"{UP} --force-recreate {service}"


def test_all_are_replaced_and_pairs_together(folder: Path) -> None:
    code, told, said = roll(folder)
    assert code == 0, said
    beside = [
        [f"{UP} --no-recreate --scale {service}=3 {service}", f"stop {service}-{n}", f"rm {service}-{n}"]
        for service in ("tokenizer", "router")
        for n in (1, 2)
    ]
    pairs = [
        [f"compose -f a.yml stop scheduler-{name}", recreate(f"worker-{name}"), recreate(f"scheduler-{name}")]
        for name in "ab"
    ]
    assert told == [line for step in (*beside[:2], *pairs, *beside[2:], [recreate("front")]) for line in step]


def test_a_worker_takes_its_scheduler_along_where_another_one_serves(folder: Path) -> None:
    assert roll(folder, "worker-b")[1] == [
        "compose -f a.yml stop scheduler-b",
        recreate("worker-b"),
        recreate("scheduler-b"),
    ]


def test_the_only_scheduler_is_told_to_hurry_and_stays_where_only_its_worker_is_replaced(folder: Path) -> None:
    one = "worker scheduler router"
    assert roll(folder, "scheduler", up=one)[1] == [
        *["kill -s TERM scheduler-1"] * 2,
        recreate("scheduler"),
    ]
    assert roll(folder, "worker", up=one)[1] == [recreate("worker")]


def test_it_ends_where_a_new_container_does_not_become_healthy(folder: Path) -> None:
    code, told, said = roll(folder, "tokenizer", "router", fail="--scale tokenizer=3")
    assert code == 1 and "the old ones serve on" in said and not any(line.startswith("stop") for line in told)
    code, told, said = roll(folder, "worker-a", "router", fail="--force-recreate worker-a")
    assert code == 1 and "the new worker-a does not become healthy" in said and len(told) == 2


def test_a_service_that_is_not_up_is_refused(folder: Path) -> None:
    code, told, said = roll(folder, "tokeniser")
    assert (code, told) == (1, []) and "tokeniser is not up" in said
