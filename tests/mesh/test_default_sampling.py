"""A folder's generation_config.json reaches requests that set nothing, over gRPC and HTTP, through real daemons."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
from support.http import http_address
from support.mesh import COMPOSE, running_mesh

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2, router_pb2_grpc

DEFAULTS = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.25}


async def test_a_folders_default_sampling_is_what_requests_get(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-llama"
    shutil.copytree(COMPOSE / "models" / "tiny-llama", folder)
    config = folder / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **DEFAULTS}))
    async with running_mesh("simulated", worker={"model": folder}) as mesh, open_channel(mesh.routers[0]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.GenerateRequest(prompt_ids=pack_ints([10, 11]), stop=common_pb2.StopParams(max_tokens=3))
        resolved = (await anext(aiter(stub.Generate(request)))).resolved
        assert {name: getattr(resolved.sampling, name) for name in DEFAULTS} == DEFAULTS
        request.sampling.temperature = 0
        request.sampling.top_k = 0
        resolved = (await anext(aiter(stub.Generate(request)))).resolved
        set_by_client = {"temperature": 0, "top_k": 0}
        assert {name: getattr(resolved.sampling, name) for name in DEFAULTS} == {**DEFAULTS, **set_by_client}
        (model,) = (await stub.GetModelInfo(router_pb2.GetModelInfoRequest())).models
        assert model.model.default_sampling.top_k == 7
        async with httpx.AsyncClient(base_url=f"http://{http_address(mesh)}", timeout=60, trust_env=False) as http:
            body = {"model": "tiny-llama", "prompt": [10, 11], "max_tokens": 8, "seed": 5}
            open_request = (await http.post("/v1/completions", json=body)).json()
            spelled_out = (await http.post("/v1/completions", json={**body, **DEFAULTS})).json()
            assert open_request["choices"][0]["text"] == spelled_out["choices"][0]["text"]
        assert mesh.bugs == []
