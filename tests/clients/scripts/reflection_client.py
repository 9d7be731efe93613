"""A gRPC client from reflection alone: finds the service and its messages, streams answers, one by a schema."""

import json
import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

ADDRESS, MODEL = sys.argv[1:]
SERVICE = "radixmesh.router.v1.RouterService"
with grpc.insecure_channel(ADDRESS, options=[("grpc.enable_http_proxy", 0)]) as channel:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    service = DescriptorPool(database).FindServiceByName(SERVICE)

    def call(name: str, **fields: object):
        method = service.methods_by_name[name]
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        answer = GetMessageClass(method.output_type)
        stub = kind(
            f"/{SERVICE}/{name}",
            request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return stub(GetMessageClass(method.input_type)(**fields), timeout=60)

    assert [entry.model.name for entry in call("GetModelInfo").models] == [MODEL]
    text, num_ids, finished = "", 0, []
    for message in call("Generate", text="The Tyger", sampling={"temperature": 0.0}, stop={"max_tokens": 16}):
        text += "".join(delta.text for delta in message.deltas)
        # Ids are packed: four bytes each.
        num_ids += sum(len(delta.ids) // 4 for delta in message.deltas)
        finished += message.finished
    (end,) = finished
    assert text and num_ids == end.num_output == end.usage.output_tokens, (text, num_ids, end)
    print("checked text streams")
    schema = {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}, "required": ["side"]}
    grammar = {"json_schema": json.dumps({**schema, "additionalProperties": False})}
    shaped = call("Generate", text="Where?", grammar=grammar, stop={"max_tokens": 400})
    answer = json.loads("".join(delta.text for message in shaped for delta in message.deltas))
    assert answer["side"] in ("left", "right"), answer
    print("checked structured")
    try:
        list(call("Generate", text="x", model="nobody"))
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.NOT_FOUND
    else:
        raise AssertionError("an unknown model was served")
    print("checked errors")
