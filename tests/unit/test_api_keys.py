"""API keys: what a file of them says, and what a key opens."""

from __future__ import annotations

import os
import re
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from radixmesh.daemons.router.config import RouterSettings
from radixmesh.daemons.router.requests.intake.tenancy import bind_priority
from radixmesh.daemons.router.requests.journal import Journal
from radixmesh.daemons.router.router import Router
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.caller import ANYBODY, Caller, set_caller
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.security.api_keys import ApiKeys, bearer_key
from radixmesh.daemons.runtime.security.key_guard import KeyGuard
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
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
    ("content", "said"),
    [
        (b"", "no API key"),
        (b"# only a comment\n", "no API key"),
        (b"short\n", "line 1"),
        (ALICE.encode() + b" b o b\n", "line 1"),
        (f"{ALICE}\n{ALICE} again\n".encode(), "repeats"),
        ("ключ-из-шестнадцати-знаков".encode(), "ASCII"),
        (ALICE.encode("utf-16"), "UTF-8"),
        (ALICE.encode() + b" \x1b[2J\n", "printable"),
        (ALICE.encode() + b" \xff\n", "line 1"),
        (b"x" * (2 << 20), "more than"),
    ],
)
def test_a_file_without_a_key_that_counts_is_refused_and_not_quoted(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(MeshError, match=said) as refused:
        ApiKeys(tmp_path / "keys")
    assert ALICE not in str(refused.value) and "short" not in str(refused.value)
    with pytest.raises(MeshError, match="cannot be read"):
        ApiKeys(tmp_path / "nowhere")


def test_what_can_be_read_counts_and_the_rest_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One bad line neither shuts out the good ones nor passes in silence; a byte order mark is no part of a key."""
    path = tmp_path / "keys"
    path.write_bytes(
        b"\xef\xbb\xbf" + f"{ALICE} alice\nshort\nключ-ключ-ключ-ключ\n{BOB} bob\n{ADMIN}\n{ADMIN} x\n".encode()
    )
    keys = ApiKeys(path)
    assert keys.find(ALICE) == Caller("alice") and keys.find(BOB) == Caller("bob")
    assert keys.find("ключ-ключ-ключ-ключ") is None
    assert keys.find(ADMIN) is None, "which of two lines is meant is not for us to guess"
    reported = [record.radixmesh_fields["error"] for record in caplog.records]  # type: ignore[attr-defined]
    assert [re.search(r"line (\d)", text)[1] for text in reported] == ["2", "3", "6"]  # type: ignore[index]
    assert "short" not in str(reported)


def test_a_key_with_a_star_says_itself_whose_requests_are(tmp_path: Path) -> None:
    assert ApiKeys(key_file(tmp_path, f"{ALICE} *\n")).find(ALICE) == Caller(may_name_tenant=True)


def test_a_changed_file_counts_at_once_whatever_is_left_of_it(tmp_path: Path) -> None:
    now = 100.0
    path = key_file(tmp_path, f"{ALICE}\n")
    keys = ApiKeys(path, clock=lambda: now)

    def replace(text: str, mtime_s: int) -> None:
        nonlocal now
        key_file(tmp_path, text, "new").replace(path)
        os.utime(path, (mtime_s, mtime_s))
        now += 1.5

    key_file(tmp_path, f"{BOB} bob\n", "new").replace(path)
    assert keys.find(BOB) is None, "the file is looked at once a second"
    replace(f"{BOB} bob\n", 1000)
    assert keys.find(BOB) == Caller("bob") and keys.find(ALICE) is None
    replace("broken\n", 2000)
    assert keys.find(BOB) is None, "a key that was taken away opens nothing, even where the rest is broken"
    replace(f"{BOB} bob\n", 3000)
    assert keys.find(BOB) == Caller("bob")
    replace("", 4000)
    assert keys.find(BOB) is None
    replace(f"{BOB} bob\n", 5000)
    assert keys.find(BOB) == Caller("bob")
    path.unlink()
    now += 1.5
    assert keys.find(BOB) is None
    replace(f"{ALICE}\n", 6000)
    assert keys.find(BOB) is None and keys.find(ALICE) == Caller("")


def test_a_file_that_others_can_write_holds_no_key(tmp_path: Path) -> None:
    now = 100.0
    path = key_file(tmp_path, f"{ALICE}\n")
    keys = ApiKeys(path, clock=lambda: now)
    path.chmod(0o646)
    now += 1.5
    assert keys.find(ALICE) is None
    with pytest.raises(MeshError, match="everybody may write"):
        ApiKeys(path)
    path.chmod(0o660)
    now += 1.5
    assert keys.find(ALICE) == Caller(""), "a group is somebody's choice"
    tmp_path.chmod(0o777)
    with pytest.raises(MeshError, match="folder"):
        ApiKeys(path)
    tmp_path.chmod(0o1777)  # As /tmp, or the folder of a Kubernetes secret.
    assert ApiKeys(path).find(ALICE) == Caller("")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MeshError, match="regular"):
        ApiKeys(tmp_path / "pipe")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_holds_no_key(tmp_path: Path) -> None:
    path = key_file(tmp_path, f"{ALICE}\n")
    os.chown(path, 65534, 65534)
    with pytest.raises(MeshError, match="belongs to user 65534"):
        ApiKeys(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(MeshError, match="belongs to user 65534"):
        ApiKeys(link)


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


def opened(message: GenerateRequest, caller: Caller, **settings: bool) -> GenerateRequest:
    """The request as the router takes it from this caller."""
    progress = Progress()
    progress.loaded()
    parts = {
        "journal": Journal(1 << 20),
        "flow": SimpleNamespace(schedulers=SimpleNamespace(turns=SimpleNamespace(require_any_room=lambda: None))),
        "maker": None,
        "peer_watchers": [],
        "members": None,
        "discovery": None,
        "progress": progress,
        "metrics": Metrics(),
    }
    router = Router(RouterSettings(**settings), **parts)  # type: ignore[arg-type]

    def open_as() -> GenerateRequest:
        set_caller(caller)
        return router.open(message).message

    return copy_context().run(open_as)


def test_the_key_says_whose_a_request_is() -> None:
    alice, nobody, gateway = Caller("alice"), Caller(""), Caller(may_name_tenant=True)
    assert opened(GenerateRequest(text="x", tenant="mallory"), alice).tenant == "alice"
    assert opened(GenerateRequest(text="x", tenant="alice"), nobody).tenant == "", "a key without a tenant claims none"
    assert opened(GenerateRequest(text="x", tenant="bob"), gateway).tenant == "bob"
    assert opened(GenerateRequest(text="x", tenant="bob"), Caller()).tenant == "bob", "no key was asked for"
    resume = Resume(resolved=Resolved(request_id="r", tenant="mallory"), resumption=1)
    assert opened(GenerateRequest(resume=resume), alice).resume.resolved.tenant == "alice"


def test_tenants_share_no_cached_prefix_unless_the_operator_wants_it() -> None:
    def salt_of(caller: Caller, salt: str, tenant: str = "", **settings: bool) -> str:
        return opened(GenerateRequest(text="x", cache_salt=salt, tenant=tenant), caller, **settings).cache_salt

    alice, bob, nobody, gateway = Caller("alice"), Caller("bob"), Caller(""), Caller(may_name_tenant=True)
    salts = [salt_of(caller, salt) for caller in (alice, bob, nobody) for salt in ("", "s", "s" * 256)]
    assert len(set(salts)) == len(salts) and "" not in salts
    assert all(len(salt.encode()) <= 256 for salt in salts), "what was within the bound still is"
    assert salt_of(alice, "s") == salt_of(alice, "s") == salt_of(gateway, "s", tenant="alice")
    # A name space is reached by its own tenant alone, whatever is sent.
    theirs = salt_of(alice, "s")
    assert not salt_of(bob, theirs).startswith(theirs) and not salt_of(nobody, theirs).startswith(theirs)
    # A resumed request brings the salt that its first router made.
    for sender, is_same in ((alice, True), (bob, False)):
        resume = Resume(resolved=Resolved(request_id="r", cache_salt=theirs), resumption=1)
        assert (opened(GenerateRequest(resume=resume), sender).resume.resolved.cache_salt == theirs) is is_same
    assert salt_of(Caller(), "s") == salt_of(bob, "s", share_cache_across_tenants=True) == "s"
    assert salt_of(alice, "s" * 257) == "s" * 257, "refused by the check of the request, with its own length"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{ALICE} alice", Caller("alice")),
        (f"{ALICE} alice priority=-5..10", Caller("alice", min_priority=-5, max_priority=10)),
        (f"{ALICE} alice priority=7", Caller("alice", max_priority=7)),
        (f"{ALICE} priority=-9..-1", Caller("", min_priority=-9, max_priority=-1)),
        (f"{ALICE} * priority=0..1000", Caller(may_name_tenant=True, max_priority=1000)),
    ],
)
def test_a_priority_is_a_right_of_the_key(tmp_path: Path, line: str, expected: Caller) -> None:
    assert ApiKeys(key_file(tmp_path, line + "\n")).find(ALICE) == expected


@pytest.mark.parametrize("word", ["1001", "5..1", "-1001..0", "x", "", "1..", "99999", "1...2", "+3", "\u0663"])
def test_a_range_of_priorities_that_is_none_makes_no_key(tmp_path: Path, word: str) -> None:
    with pytest.raises(MeshError, match="write priority="):
        ApiKeys(key_file(tmp_path, f"{ALICE} alice priority={word}\n"))


def test_a_request_has_the_priority_that_its_key_allows() -> None:
    def bound(caller: Caller, priority: int) -> int:
        message = GenerateRequest(text="x", priority=priority)
        bind_priority(message, caller)
        return message.priority

    nobody, some, low = (
        Caller("t"),
        Caller("t", min_priority=-5, max_priority=10),
        Caller("t", min_priority=-9, max_priority=-1),
    )
    assert [bound(some, p) for p in (-5, 0, 10)] == [-5, 0, 10]
    assert bound(nobody, 0) == 0 and bound(low, 0) == -1 and bound(ANYBODY, 99) == 99
    for caller, priority in ((nobody, 1), (nobody, -1), (some, 11), (some, -6), (low, 1)):
        with pytest.raises(MeshError, match="priorities from") as refused:
            bound(caller, priority)
        assert refused.value.reason_name == "PERMISSION_DENIED" and refused.value.metadata["field"] == "priority"
    resumed = GenerateRequest(resume=Resume(resolved=Resolved(priority=2**31 - 1)))
    bind_priority(resumed, nobody)
    assert resumed.resume.resolved.priority == 0
