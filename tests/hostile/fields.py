"""The contracts' requests, read from their descriptors: rpcs, sized fields, and messages with one field at a size."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default

PROTOS = Path(__file__).parents[2] / "protos"
_SIZED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_NUMBERS = {
    FieldDescriptor.TYPE_UINT64: b"\x01",
    FieldDescriptor.TYPE_UINT32: b"\x01",
    FieldDescriptor.TYPE_INT32: b"\x01",
}


class Rpc(NamedTuple):
    """method: "/package.Service/Verb"."""

    method: str
    request: Descriptor
    is_stream: bool


class Place(NamedTuple):
    """A sized field within an rpc's request. path: the fields that lead to it, itself last."""

    rpc: Rpc
    path: tuple[FieldDescriptor, ...]

    @property
    def field(self) -> FieldDescriptor:
        return self.path[-1]

    def __str__(self) -> str:
        return f"{self.rpc.method.rpartition('/')[2]}.{'.'.join(field.name for field in self.path)}"

    def raw(self, most: int) -> bytes:
        """A request with that many elements, or bytes, in the field and nothing else."""
        field = self.field
        if field.is_repeated and field.type in _NUMBERS:
            data = tagged(field, _NUMBERS[field.type] * most)
        elif field.is_repeated:
            data = tagged(field, b"") * most
        else:
            data = tagged(field, b"x" * most)
        for outer in reversed(self.path[:-1]):
            data = tagged(outer, data)
        return data


def rpcs() -> list[Rpc]:
    """Of every service of ours, in the order of the files."""
    found = []
    for path in sorted(PROTOS.glob("radixmesh/*/v1/*.proto")):
        name = path.relative_to(PROTOS).as_posix()
        import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        for service in Default().FindFileByName(name).services_by_name.values():
            for method in service.methods:
                found.append(Rpc(f"/{service.full_name}/{method.name}", method.input_type, method.client_streaming))
    return found


def places(rpc: Rpc) -> Iterator[Place]:
    """Every repeated, string or bytes field of the request, each by one path."""
    seen: set[str] = set()
    spans: list[tuple[tuple[FieldDescriptor, ...], Descriptor]] = [((), rpc.request)]
    while spans:
        path, descriptor = spans.pop(0)
        if descriptor.full_name in seen:
            continue
        seen.add(descriptor.full_name)
        for field in descriptor.fields:
            if field.is_repeated or field.type in _SIZED:
                yield Place(rpc, (*path, field))
            if field.message_type is not None:
                spans.append(((*path, field), field.message_type))


def tagged(field: FieldDescriptor, data: bytes) -> bytes:
    """A length-delimited field as it is on the wire."""
    return _varint(field.number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
