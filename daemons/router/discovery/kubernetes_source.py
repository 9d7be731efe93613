"""The endpoints of a Kubernetes service: its EndpointSlices, listed once and then watched.

The REST API as its reference has it (discovery.k8s.io/v1, "Efficient detection of changes"). The client libraries bring
a dozen packages for the two requests that are made here.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from radixmesh.daemons.router.discovery.http_get import Endpoint, get
from radixmesh.daemons.router.discovery.source import AddressSource, SourceError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_BYTES, _MAX_LINE_BYTES = 32 << 20, 4 << 20
# The API server ends a watch after so long, and a new one goes on behind it.
_WATCH_S = 240
# Between two watches: a proxy that cannot stream ends each of them at once.
_PAUSE_S = 1.0
_GONE = 410


_T = TypeVar("_T")


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct):
    name: str = ""
    resource_version: str = msgspec.field(name="resourceVersion", default="")


class _Slice(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    items: list[_Slice]
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class KubernetesSource(AddressSource):
    """service: "namespace/name". port: a number, or a port's name. api: URL, "" = the cluster that this runs in."""

    def __init__(
        self, service: str, port: str, *, api: str = "", account: Path = ACCOUNT, pause_s: float = _PAUSE_S
    ) -> None:
        namespace, _, name = service.partition("/")
        selector = quote(f"kubernetes.io/service-name={name}")
        base = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
        self._target = f"{base}?labelSelector={selector}"
        self.port = port
        self._api = api
        self._account = account
        self._pause_s = pause_s
        self._slices: dict[str, frozenset[str]] = {}
        self._version = ""

    async def watch(self) -> AsyncGenerator[frozenset[str], None]:
        yield await self._list()
        while True:
            target = f"{self._target}&watch=1&allowWatchBookmarks=true&timeoutSeconds={_WATCH_S}"
            target += f"&resourceVersion={quote(self._version)}"
            async with get(self._endpoint(), target, self._headers(), idle_s=_WATCH_S + 30) as response:
                if response.status not in (200, _GONE):
                    raise SourceError(_refusal(response.status))
                is_known = response.status == 200
                lines = response.lines(_MAX_LINE_BYTES)
                while is_known and (line := await anext(lines, None)) is not None:
                    is_known = self._apply(line)
                    if is_known:
                        yield self._all()
            if not is_known:  # Changes since then are not kept any more.
                yield await self._list()
            await asyncio.sleep(self._pause_s)

    async def _list(self) -> frozenset[str]:
        async with get(self._endpoint(), self._target, self._headers()) as response:
            body = await response.whole(_MAX_BYTES)
        if response.status != 200:
            raise SourceError(_refusal(response.status))
        found = _decode(body, _List)
        self._version = found.metadata.resource_version
        self._slices = {item.metadata.name: self._addresses_of(item) for item in found.items}
        return self._all()

    def _apply(self, line: bytes) -> bool:
        """False if the watch has to begin anew. Raises SourceError."""
        event = _decode(line, _Event)
        if event.type == "ERROR":
            status = _decode(bytes(event.object), _Status)
            if status.code == _GONE:
                return False
            raise SourceError(f"the API server ends the watch with {status.code}: {status.message[:200]}")
        changed = _decode(bytes(event.object), _Slice)
        self._version = changed.metadata.resource_version or self._version
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._slices[changed.metadata.name] = self._addresses_of(changed)
        return True

    def _all(self) -> frozenset[str]:
        return frozenset().union(*self._slices.values())

    def _addresses_of(self, found: _Slice) -> frozenset[str]:
        port = self._port_of(found)
        return frozenset(
            f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            for endpoint in found.endpoints or ()
            # Unknown readiness counts as ready, says the API's reference.
            if port and endpoint.conditions.ready is not False and not endpoint.conditions.terminating
            for address in endpoint.addresses
        )

    def _port_of(self, found: _Slice) -> int:
        if self.port.isdecimal():
            return int(self.port)
        return next((port.port or 0 for port in found.ports or () if port.name == self.port), 0)

    def _endpoint(self) -> Endpoint:
        api = self._api
        if not api:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise SourceError("this is no pod of a cluster: name the API server with --kubernetes-api")
            api = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        url = urlsplit(api)
        if url.scheme != "https":
            return Endpoint(host=url.hostname or "", port=url.port or 80)
        authority = self._account / "ca.crt"
        tls = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
        return Endpoint(host=url.hostname or "", port=url.port or 443, tls=tls)

    def _headers(self) -> Mapping[str, str]:
        # Tokens expire within the hour: the file has the one of now.
        token = self._account / "token"
        return {"authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise SourceError(f"the API server's answer is no {kind.__name__.strip('_').lower()} ({error})") from None


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"the API server refuses with status {status}: let the service account list and watch endpointslices"
    return f"the API server answers with status {status}"
