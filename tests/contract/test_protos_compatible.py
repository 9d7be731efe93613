"""The contracts stay compatible with those last agreed on: protos/baseline.binpb. `make check-protos` compares more."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import Default

PROTOS = Path(__file__).parents[2] / "protos"
Fields = dict[tuple[str, int], tuple[object, ...]]


def _baseline() -> descriptor_pb2.FileDescriptorSet:
    # An image of buf is a FileDescriptorSet with more fields.
    return descriptor_pb2.FileDescriptorSet.FromString((PROTOS / "baseline.binpb").read_bytes())


def _now() -> descriptor_pb2.FileDescriptorSet:
    files = descriptor_pb2.FileDescriptorSet()
    for path in sorted(PROTOS.glob("radixmesh/*/v1/*.proto")):
        name = path.relative_to(PROTOS).as_posix()
        import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
        Default().FindFileByName(name).CopyToProto(files.file.add())
    return files


def _messages(prefix: str, messages: object) -> Iterator[tuple[str, descriptor_pb2.DescriptorProto]]:
    for message in messages:  # type: ignore[attr-defined]
        name = f"{prefix}.{message.name}"
        yield name, message
        yield from _messages(name, message.nested_type)


def _parts(files: descriptor_pb2.FileDescriptorSet) -> Fields:
    """Fields, enum values and rpcs by (name of what holds them, number)."""
    parts: Fields = {}
    for file in files.file:
        if not file.package.startswith("radixmesh."):
            continue
        for name, message in _messages(file.package, file.message_type):
            for field in message.field:
                label = descriptor_pb2.FieldDescriptorProto.Label.Name(field.label)
                parts[name, field.number] = (field.name, field.type, field.type_name, label, field.proto3_optional)
            for reserved in message.reserved_range:
                for number in range(reserved.start, reserved.end):
                    parts[name, number] = ("reserved",)
        for enum in file.enum_type:
            for value in enum.value:
                parts[f"{file.package}.{enum.name}", value.number] = (value.name,)
        for service in file.service:
            for method in service.method:
                key = f"{file.package}.{service.name}.{method.name}"
                parts[key, 0] = (
                    method.input_type,
                    method.output_type,
                    method.client_streaming,
                    method.server_streaming,
                )
    return parts


def test_nothing_that_was_agreed_on_is_gone_or_means_something_else() -> None:
    before, now = _parts(_baseline()), _parts(_now())
    assert len(before) > 500
    changed = {key: (part, now.get(key)) for key, part in before.items() if now.get(key) != part}
    assert not changed, f"incompatible with protos/baseline.binpb: {changed}"


@pytest.mark.parametrize("change", ["type", "number", "name", "label"])
def test_a_field_that_changes_is_seen(change: str) -> None:
    files = _now()
    (file,) = [file for file in files.file if file.name.endswith("worker.proto")]
    (plan,) = [message for message in file.message_type if message.name == "PlanHeader"]
    field = plan.field[0]
    if change == "number":
        field.number = 99
    elif change == "name":
        field.name = "other"
    elif change == "type":
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    else:
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    before = _parts(_baseline())
    assert any(_parts(files).get(key) != part for key, part in before.items())
