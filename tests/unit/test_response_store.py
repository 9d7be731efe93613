"""The store of responses: bounded in bytes, least recently used first, names of each tenant's own."""

from __future__ import annotations

import pytest

from radixmesh.daemons.router.http.translated.response_store import ResponseStore, StoredResponse
from radixmesh.daemons.runtime.errors import MeshError


def entry(size: int) -> StoredResponse:
    return StoredResponse(b"c" * (size // 2), b"b" * (size - size // 2))


def has(store: ResponseStore, name: str, tenant: str = "") -> bool:
    try:
        store.get(tenant, name)
    except MeshError as error:
        assert error.reason_name == "UNKNOWN_REQUEST" and error.metadata["field"] == "response_id"
        return False
    return True


def test_the_least_recently_used_leave_first() -> None:
    store = ResponseStore(16 * 1024)
    # An entry costs 512 bytes beside its own: ten of 1,536 bytes have room, an eleventh has not.
    for number in range(8):
        store.put("", str(number), entry(1024))
    assert has(store, "0")
    for number in range(8, 11):
        store.put("", str(number), entry(1024))
    assert [number for number in range(11) if not has(store, str(number))] == [1]
    for _ in range(50):
        store.put("", "again", entry(1024))
    assert sum(has(store, str(number)) for number in range(11)) == 9


def test_what_is_longer_than_an_eighth_is_not_kept() -> None:
    store = ResponseStore(16 * 1024)
    store.put("", "kept", entry(1536))
    store.put("", "long", entry(1537))
    assert has(store, "kept") and not has(store, "long")
    off = ResponseStore(0)
    off.put("", "any", entry(0))
    assert not has(off, "any")


def test_tenants_do_not_meet() -> None:
    store = ResponseStore(16 * 1024)
    store.put("a", "x", entry(100))
    assert has(store, "x", "a") and not has(store, "x", "b")
    assert not store.remove("b", "x") and store.remove("a", "x") and not has(store, "x", "a")
    with pytest.raises(MeshError, match="previous_response_id"):
        store.get("a", "x", "previous_response_id")
