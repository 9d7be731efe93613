"""/version, /health_generate, /get_model_info and /server_info: a server about itself, in SGLang's shapes."""

from __future__ import annotations

import json

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import radixmesh
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.messages import identity_to_proto
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.served_models import ServedModel
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.rpc.health.progress import State
from radixmesh.scheduler.v1 import scheduler_pb2

_GROUPS = {number: name.removeprefix("GROUP_STATE_").lower() for name, number in scheduler_pb2.GroupState.items()}


class VersionEndpoint:
    """GET: {version} of radixmesh."""

    def __init__(self, context: HttpContext) -> None:
        self._body = {"version": radixmesh.__version__}

    async def __call__(self, request: Request) -> Response:
        return JSONResponse(self._body)


class HealthGenerateEndpoint:
    """GET: 200 while this router serves and a scheduler's workers make progress, else 503. Runs no forward pass."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        state = self._context.progress.state
        num_serving = sum(link.is_group_serving for link in self._context.router.schedulers.links)
        is_able = state is State.SERVING and num_serving > 0
        return JSONResponse({"status": state.value, "num_serving_schedulers": num_serving}, 200 if is_able else 503)


class ModelInfoEndpoint:
    """GET: the first served model; its default sampling is JSON text. Raises NO_REPLICA while none is served."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        model = _first_model(self._context)
        defaults = MessageToDict(identity_to_proto(model.identity).default_sampling, preserving_proto_field_name=True)
        return JSONResponse(
            {
                "model_path": model.name,
                "tokenizer_path": model.name,
                "is_generation": True,
                "preferred_sampling_params": json.dumps(defaults) if defaults else None,
                "vocab_size": model.identity.vocab_size,
                "max_model_len": model.identity.max_total_len,
            }
        )


class ServerInfoEndpoint:
    """GET: version, first model, limits, and one entry of `internal_states` per scheduler. Raises NO_REPLICA while no
    model is served. Addresses of daemons are left to operators."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, request: Request) -> Response:
        model = _first_model(self._context)
        links = self._context.router.schedulers.links
        return JSONResponse(
            {
                "version": radixmesh.__version__,
                "status": self._context.progress.state.value,
                "model_path": model.name,
                "tokenizer_path": model.name,
                "served_model_name": model.name,
                "context_length": model.identity.max_total_len,
                "max_total_num_tokens": sum(link.kv_tokens for link in links if link.is_connected),
                "max_req_input_len": model.max_request_len - 1,
                "internal_states": [_state_of(link) for link in links],
            }
        )


def _state_of(link: SchedulerLink) -> dict[str, object]:
    """Tokens of KV; numbers of requests of all routers, by the scheduler's latest load."""
    load = link.load
    return {
        "is_connected": link.is_connected,
        "group": _GROUPS.get(load.group, "unknown") if link.is_connected and load.group else "",
        "is_draining": link.is_draining or load.is_draining,
        "models": list(link.models),
        "num_running_reqs": load.num_running if link.is_connected else 0,
        "num_waiting_reqs": load.num_waiting if link.is_connected else 0,
        "max_total_num_tokens": link.kv_tokens,
    }


def _first_model(context: HttpContext) -> ServedModel:
    models = context.router.schedulers.models()
    if models:
        return models[0]
    message = "no scheduler has announced a model yet: come again"
    raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})
