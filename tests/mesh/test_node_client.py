"""The Node client's own tests (node:test): its parts, and the whole against a live mesh whose routers it kills."""

import json
import shlex

import pytest
from support.jobs import MODEL
from support.mesh import running_mesh
from support.node import NODE, node_or_skip, run_node

MIN_NODE = 18


async def test_node_is_new_enough() -> None:
    version = await run_node(node_or_skip(), "--version")
    assert int(version.removeprefix("v").split(".")[0]) >= MIN_NODE, version


async def test_lock_file_names_no_host() -> None:
    lock = json.loads((NODE / "package-lock.json").read_text())
    assert lock["packages"]["node_modules/@grpc/grpc-js"]["integrity"].startswith("sha512-")
    assert [name for name, package in lock["packages"].items() if "resolved" in package] == []


@pytest.mark.slow
async def test_node_client_against_a_live_mesh() -> None:
    node = node_or_skip()
    async with running_mesh("cpu", scale={"router": 2}) as mesh:
        pids = {mesh.cluster.address("router", replica): mesh.cluster.pids[f"router-{replica}"] for replica in (1, 2)}
        given = json.dumps({"routers": pids, "recitations": str(MODEL / "recitations.json")})
        output = await run_node(node, "--test", "--test-reporter=tap", RADIXMESH_NODE_TEST=given)
        # Reported as skipped is not tested.
        assert "# fail 0" in output and "# skipped 0" in output, output[-6000:]
        assert all(mesh.cluster.status("router", replica).restarts >= 1 for replica in (1, 2))
        assert (await mesh.scheduler_state()).num_page_violations == 0


async def test_the_example_ends_well_when_its_reader_leaves() -> None:
    node = node_or_skip()
    async with running_mesh("simulated") as mesh:
        example = f"{shlex.quote(node)} examples/stream.js 'The Tyger' {mesh.routers[0]} 2>&1 | head -c 4"
        assert await run_node("/bin/bash", "-c", f"{example}; exit ${{PIPESTATUS[0]}}") == "The "
