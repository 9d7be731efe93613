"""The paths by which clients of other engines probe a server, and their description."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from support.http import http_client
from support.http_process import DEADLINE_S, http_process
from support.mesh import running_mesh
from support.router_mesh import RouterMesh, router_mesh

import radixmesh
from radixmesh.daemons.router.daemon import RouterDaemon
from radixmesh.daemons.router.http.app import make_app
from radixmesh.daemons.router.http.openapi import OPEN_PATHS, OPERATIONS, PAGE_PATHS, NoBody, description

KEY = "key-0123456789abcdef"
ADMIN_KEY = "admin-0123456789abcdef"
PROBES = ("/health", "/ping", "/health_generate", "/version", "/get_model_info", "/server_info", "/get_server_info")


def test_every_route_is_described() -> None:
    """The endpoints only keep what they are given until the first request."""
    routes = {
        (path.replace(":path}", "}"), method.lower())
        for route in make_app(_NoContext()).routes  # type: ignore[arg-type]
        for path, methods in [(getattr(route, "path"), getattr(route, "methods"))]  # noqa: B009
        for method in methods - {"HEAD"}
    }
    paths = json.loads(json.dumps(description()))["paths"]
    assert routes == {(path, method) for path, item in paths.items() for method in item}
    assert paths.keys() == OPERATIONS.keys() and paths.keys() > OPEN_PATHS


async def test_paths_that_a_flag_leaves_out_are_not_described() -> None:
    app = make_app(_NoContext(), PAGE_PATHS)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
        described = (await http.get("/openapi.json")).json()["paths"]
        assert described.keys() == OPERATIONS.keys() - PAGE_PATHS
        assert (await http.get("/docs")).status_code == 404


class _NoContext:
    metrics = None


def test_bodies_are_described_by_the_types_that_parse_them() -> None:
    whole = json.loads(json.dumps(description()))
    schemas = whole["components"]["schemas"]
    chat = schemas["ChatRequest"]
    assert chat["required"] == ["messages"] and "ignored" not in chat["properties"]
    assert chat["properties"]["temperature"] == {"anyOf": [{"type": "number"}, {"type": "null"}]}
    for path, operation in OPERATIONS.items():
        if operation.body not in (None, NoBody):
            (reference,) = whole["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].values()
            assert reference.removeprefix("#/components/schemas/") in schemas
    assert "$defs" not in json.dumps(schemas)


async def test_a_served_model_is_told_in_sglangs_shapes() -> None:
    async with running_mesh("simulated", worker={"num_pages": 5000, "max_total_len": 1000}) as mesh:
        async with http_client(mesh) as http:
            answers = {path: await http.get(path) for path in PROBES}
            assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(PROBES, 200)
            assert answers["/ping"].json() == answers["/health"].json() == {"status": "serving"}
            assert answers["/version"].json() == {"version": radixmesh.__version__}
            assert answers["/health_generate"].json() == {"status": "serving", "num_serving_schedulers": 1}
            model = answers["/get_model_info"].json()
            assert (model["model_path"], model["is_generation"], model["max_model_len"]) == ("tiny-llama", True, 1000)
            defaults = model["preferred_sampling_params"]
            assert defaults is None or isinstance(json.loads(defaults), dict)
            info = answers["/server_info"].json()
            assert info.keys() == answers["/get_server_info"].json().keys()
            assert (info["served_model_name"], info["context_length"]) == ("tiny-llama", 1000)
            (state,) = info["internal_states"]
            assert (state["is_connected"], state["group"], state["models"]) == (True, "serving", ["tiny-llama"])
            assert state["max_total_num_tokens"] == info["max_total_num_tokens"] > 0
            assert mesh.routers[0] not in json.dumps(info), "addresses are the operator's to see"
            assert (await http.post("/version", json={})).status_code == 405
        assert mesh.bugs == []


async def test_without_a_scheduler_and_without_a_key(tmp_path: Path) -> None:
    """Health, ping and version need no key; what depends on a scheduler says that there is none."""
    (tmp_path / "keys").write_text(KEY + "\n")
    (tmp_path / "admin-keys").write_text(ADMIN_KEY + "\n")
    flags = ["--api-keys-file", str(tmp_path / "keys"), "--admin-keys-file", str(tmp_path / "admin-keys")]
    async with (
        http_process(tmp_path, *flags) as router,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.port}", trust_env=False, timeout=DEADLINE_S) as http,
    ):
        for path in ("/v1/models", "/openapi.json", "/metrics", *PROBES):
            status = (await http.get(path)).status_code
            assert status == (200 if path in ("/health", "/ping", "/version") else 401), path
        known = {"authorization": f"Bearer {KEY}"}
        for key, status in (("", 401), (known["authorization"], 403), (f"Bearer {ADMIN_KEY}", 503)):
            answer = await http.post("/flush_cache", headers={"authorization": key} if key else {})
            assert answer.status_code == status, "admins only; no scheduler is connected"
        answer = await http.get("/health_generate", headers=known)
        assert (answer.status_code, answer.json()) == (503, {"status": "serving", "num_serving_schedulers": 0})
        for path in ("/get_model_info", "/server_info", "/get_server_info"):
            answer = await http.get(path, headers=known)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "NO_REPLICA"), path
            assert int(answer.headers["retry-after"]) >= 1
        assert (await http.get("/openapi.json", headers=known)).json()["openapi"].startswith("3.")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/alias", "/api/tags"])
async def test_a_router_that_came_up_first_lists_models_once_it_has_a_scheduler(path: str) -> None:
    """It serves, says /health, before it has reached one: no client is told meanwhile that there is no model."""
    async with router_mesh(http_listen="127.0.0.1:0", model_aliases=("alias=tiny-llama",)) as mesh:
        await _restart_without_scheduler(mesh)
        async with httpx.AsyncClient(base_url=_http_of(mesh), trust_env=False, timeout=DEADLINE_S) as http:
            assert (await http.get("/health")).status_code == 200
            asked = asyncio.create_task(http.get(path))
            done, _ = await asyncio.wait((asked,), timeout=0.2)
            assert not done, asked.result().text
            await mesh.schedulers[0].start()
            answer = await asked
    assert answer.status_code == 200 and "alias" in answer.text and "tiny-llama" in answer.text, answer.text


async def test_models_over_grpc_wait_for_the_first_scheduler() -> None:
    async with router_mesh() as mesh, mesh.client() as client:
        await _restart_without_scheduler(mesh)
        asked = asyncio.create_task(client.models())
        done, _ = await asyncio.wait((asked,), timeout=0.2)
        assert not done, asked.result()
        await mesh.schedulers[0].start()
        assert [model.name for model in await asked] == ["tiny-llama"]


async def test_a_list_of_models_does_not_wait_for_ever() -> None:
    """Of schedulers that never come; and not at all for one that was reached and is away."""
    async with router_mesh() as mesh:
        schedulers = mesh.router().schedulers
        await mesh.schedulers[0].kill()
        async with asyncio.timeout(1):
            assert [model.name for model in await schedulers.list_models(60)] == ["tiny-llama"]
        await mesh.routers[0].restart()
        async with asyncio.timeout(30):
            assert await mesh.router().schedulers.list_models(0.2) == []


async def _restart_without_scheduler(mesh: RouterMesh) -> None:
    await mesh.schedulers[0].kill()
    await mesh.routers[0].restart()


def _http_of(mesh: RouterMesh) -> str:
    daemon = mesh.routers[0].daemon
    assert isinstance(daemon, RouterDaemon) and daemon.http is not None
    return f"http://127.0.0.1:{daemon.http.port}"
