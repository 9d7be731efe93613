"""Outputs on their way to a detokenizer: the one with the fewest entries, none for a while, none for too long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from radixmesh.daemons.router.peers.detokenizer_pool import DetokenizerPool

WAIT_S = 3.0


class Link:
    """The part of a detokenizer's link that the pool uses."""

    def __init__(self, address: str) -> None:
        self.address, self.is_connected, self.has_vocabulary = address, True, True
        self.identity = SimpleNamespace(tokenizer_fingerprint="theirs")
        self.opened: list[Any] = []
        self.marked: list[Any] = []
        self.num_flushes = 0

    @property
    def num_entries(self) -> int:
        return len(self.opened)

    def start(self) -> None:
        pass

    def serves(self, identity: object) -> bool:
        return self.has_vocabulary

    def open(self, output: Any) -> None:
        self.opened.append(output)
        output.entry = SimpleNamespace(link=self)

    def mark(self, entry: Any) -> None:
        self.marked.append(entry)

    def close_entry(self, entry: Any) -> None:
        self.opened = [output for output in self.opened if output.entry is not entry]

    def flush_closes(self) -> None:
        self.num_flushes += 1


class Output:
    def __init__(self, *, is_open: bool = True) -> None:
        self.entry: Any = None
        self.index, self.is_open = 0, is_open
        resolved = SimpleNamespace(model_identity=SimpleNamespace(tokenizer_fingerprint="ours"))
        self.request = SimpleNamespace(request_id="r", resolved=resolved)


class World:
    def __init__(self, *addresses: str) -> None:
        self.now = 100.0
        self.links: dict[str, Link] = {}
        self.pool = DetokenizerPool(self._make, WAIT_S, clock=lambda: self.now)  # type: ignore[arg-type]
        for address in addresses:
            self.pool.add(address)

    def _make(self, address: str) -> Link:
        return self.links.setdefault(address, Link(address))

    def open(self, **changes: bool) -> Any:
        output = Output(**changes)
        self.pool.open(output)  # type: ignore[arg-type]
        return output

    def tick(self) -> list[tuple[Any, Any]]:
        return self.pool.tick(self.now)  # type: ignore[return-value]


def test_an_output_goes_where_the_fewest_are() -> None:
    world = World("a", "b")
    outputs = [world.open() for _ in range(4)]
    assert [link.num_entries for link in world.links.values()] == [2, 2]
    world.pool.close_output(outputs[0])
    world.links["b"].is_connected = False
    assert world.open().entry.link is world.links["a"], "the other one is not there"
    assert world.pool.num_waiting == 0 and not world.links["a"].marked
    # One that has ended already has nothing more to come: its text is asked for at once.
    ended = world.open(is_open=False)
    assert world.links["a"].marked == [ended.entry]


def test_an_output_waits_for_a_replica_but_not_for_ever() -> None:
    world = World("a")
    world.links["a"].is_connected = False
    early, late = world.open(), world.open()
    world.now += WAIT_S
    assert world.tick() == [] and world.pool.num_waiting == 2
    world.pool.close_output(early)
    world.now += 0.1
    ((output, error),) = world.tick()
    assert output is late and error.reason_name == "NO_REPLICA" and world.pool.num_waiting == 0
    waiting = world.open()
    world.links["a"].is_connected = True
    assert world.tick() == [] and waiting.entry.link is world.links["a"]
    # Another vocabulary is no detokenizer of this model.
    world.links["a"].has_vocabulary = False
    world.open()
    world.now += WAIT_S + 0.1
    ((_, error),) = world.tick()
    assert error.reason_name == "TOKENIZER_MISMATCH"
    assert (error.metadata["ours"], error.metadata["theirs"]) == ("theirs", "ours")


def test_a_lost_output_is_not_opened_again_at_once_where_it_was_lost() -> None:
    world = World("a")
    output = world.open()
    output.entry = None
    world.pool.reopen(output, world.links["a"])  # type: ignore[arg-type]
    assert output.entry is None and world.pool.num_waiting == 1
    world.tick()
    assert output.entry is None, "within the back-off"
    world.now += 0.21
    world.tick()
    assert output.entry is not None
    other = world.open()
    world.pool.add("b")
    other.entry = None
    world.pool.reopen(other, world.links["a"])  # type: ignore[arg-type]
    assert other.entry.link is world.links["b"]


def test_closes_that_no_frame_took_along_leave_with_the_tick() -> None:
    world = World("a", "b")
    world.tick()
    world.tick()
    assert [link.num_flushes for link in world.links.values()] == [2, 2]
