"""API keys: what a file of them says, and what a key opens."""

from __future__ import annotations

import os
from contextvars import copy_context
from pathlib import Path

import pytest

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.journal import Journal
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.api_keys import ApiKeys, bearer_key
from radixmesh.daemons.runtime.caller import Caller, set_caller
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.key_guard import KeyGuard
from radixmesh.daemons.runtime.metrics import Metrics
from radixmesh.daemons.runtime.progress import Progress
from radixmesh.router.v1.router_pb2 import GenerateRequest, Resolved, Resume

ALICE, BOB, ADMIN = "alice-key-0123456789", "bob-key-0123456789ab", "admin-key-0123456789"


def key_file(folder: Path, text: str, name: str = "keys") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_names_keys_and_their_tenants(tmp_path: Path) -> None:
    keys = ApiKeys(key_file(tmp_path, f"# ours\n\n  {ALICE}  alice \n{BOB}\n"))
    assert keys.find(ALICE) == Caller("alice") and keys.find(BOB) == Caller("")
    for wrong in ("", ALICE[:-1], ALICE + "x", "# ours", "alice", "\udcff" * 20):
        assert keys.find(wrong) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no API key"),
        ("# only a comment\n", "no API key"),
        ("short\n", "line 1"),
        (f"{ALICE}\n{BOB} b o b\n", "line 2"),
        (f"{ALICE}\n{ALICE} again\n", "repeats"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_quoting_it(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(MeshError, match=said) as refused:
        ApiKeys(key_file(tmp_path, text))
    assert ALICE not in str(refused.value) and "short" not in str(refused.value)
    with pytest.raises(MeshError, match="cannot be read"):
        ApiKeys(tmp_path / "nowhere")


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    now = 100.0
    path = key_file(tmp_path, f"{ALICE}\n")
    keys = ApiKeys(path, clock=lambda: now)

    def replace(text: str, mtime_s: int) -> None:
        key_file(tmp_path, text, "new").replace(path)
        os.utime(path, (mtime_s, mtime_s))

    replace(f"{BOB} bob\n", 1000)
    assert keys.find(BOB) is None, "the file is looked at once a second"
    now += 1.5
    assert keys.find(BOB) == Caller("bob") and keys.find(ALICE) is None
    replace("broken\n", 2000)
    now += 1.5
    assert keys.find(BOB) == Caller("bob")
    path.unlink()
    now += 1.5
    assert keys.find(BOB) == Caller("bob")
    replace(f"{ALICE}\n", 3000)
    now += 1.5
    assert keys.find(BOB) is None and keys.find(ALICE) == Caller("")


def test_a_bearer_header_is_taken_apart() -> None:
    assert bearer_key("Bearer abc") == bearer_key("bearer  abc ") == "abc"
    for wrong in (None, "", "abc", "Basic abc", "Bearer", "Bearer "):
        with pytest.raises(MeshError, match="Bearer <key>") as refused:
            bearer_key(wrong)
        assert refused.value.status == "UNAUTHENTICATED"


def test_what_a_key_opens(tmp_path: Path) -> None:
    keys, admin = ApiKeys(key_file(tmp_path, ALICE + " alice")), ApiKeys(key_file(tmp_path, ADMIN, "admin"))

    def outcome(guard: KeyGuard, key: str | None, *, is_admin: bool) -> str:
        try:
            return guard.check(None if key is None else f"Bearer {key}", "verb", is_admin=is_admin).tenant or "nobody"
        except MeshError as error:
            return error.reason_name

    opened, both, users, admins = (
        KeyGuard(None, None),
        KeyGuard(keys, admin),
        KeyGuard(keys, None),
        KeyGuard(None, admin),
    )
    assert opened.is_open and not (both.is_open or users.is_open or admins.is_open)
    table = {
        (None, False): ("nobody", "UNAUTHENTICATED", "UNAUTHENTICATED", "nobody"),
        (BOB, False): ("nobody", "UNAUTHENTICATED", "UNAUTHENTICATED", "nobody"),
        (ALICE, False): ("nobody", "alice", "alice", "nobody"),
        (ADMIN, False): ("nobody", "nobody", "UNAUTHENTICATED", "nobody"),
        (None, True): ("nobody", "UNAUTHENTICATED", "UNAUTHENTICATED", "UNAUTHENTICATED"),
        (ALICE, True): ("nobody", "PERMISSION_DENIED", "PERMISSION_DENIED", "UNAUTHENTICATED"),
        (ADMIN, True): ("nobody", "nobody", "UNAUTHENTICATED", "nobody"),
    }
    for (key, is_admin), expected in table.items():
        got = tuple(outcome(guard, key, is_admin=is_admin) for guard in (opened, both, users, admins))
        assert got == expected, (key, is_admin)


def test_a_tenant_beside_a_key_overrides_what_requests_say() -> None:
    progress = Progress()
    progress.loaded()
    parts = {
        "journal": Journal(1 << 20),
        "flow": None,
        "maker": None,
        "peerings": [],
        "progress": progress,
        "metrics": Metrics(),
    }
    router = Router(RouterSettings(), **parts)  # type: ignore[arg-type]

    def opened(message: GenerateRequest, caller: Caller) -> GenerateRequest:
        def open_as() -> GenerateRequest:
            set_caller(caller)
            return router.open(message).message

        return copy_context().run(open_as)

    assert opened(GenerateRequest(text="x", tenant="mallory"), Caller("alice")).tenant == "alice"
    assert opened(GenerateRequest(text="x", tenant="bob"), Caller()).tenant == "bob"
    resume = Resume(resolved=Resolved(request_id="r", tenant="mallory"), resumption=1)
    assert opened(GenerateRequest(resume=resume), Caller("alice")).resume.resolved.tenant == "alice"
