"""Hellos of workers, at the bounds of every number."""

from __future__ import annotations

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.messages import group_from_proto
from radixmesh.worker.v1 import worker_pb2

SIZES = ("page_size", "num_pages", "num_slots", "max_tokens_per_step", "max_plans_in_flight")
MODEL_SIZES = ("vocab_size", "max_total_len")


def hello() -> worker_pb2.WorkerHello:
    """The smallest worker that there can be."""
    message = worker_pb2.WorkerHello()
    for field in SIZES:
        setattr(message.capabilities, field, 1)
    for field in MODEL_SIZES:
        setattr(message.hello.model, field, 1)
    return message


def test_the_smallest_worker_is_taken() -> None:
    group = group_from_proto(hello())
    assert (group.page_size, group.num_pages, group.num_slots, group.max_tokens_per_step) == (1, 1, 1, 1)
    assert (group.max_plans_in_flight, group.vocab_size, group.max_total_len) == (1, 1, 1)


@pytest.mark.parametrize("field", [*SIZES, *MODEL_SIZES])
def test_a_size_of_nothing_is_refused_by_its_name(field: str) -> None:
    message = hello()
    setattr(message.capabilities if field in SIZES else message.hello.model, field, 0)
    with pytest.raises(MeshError) as caught:
        group_from_proto(message)
    assert caught.value.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT
    assert caught.value.metadata["field"] == field
