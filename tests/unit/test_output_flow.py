"""Moves of an output's life, in whatever order its peers' events come: no token is lost, and each output ends once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.router_requests import change, new_request

from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.requests.journal import Ending, Journal, Output, OutputState, Request
from radixmesh.daemons.router.requests.output_flow import OutputFlow
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.runtime.telemetry.metrics import Metrics

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def error_of(name: str) -> MeshError:
    return MeshError(getattr(ErrorReason, f"ERROR_REASON_{name}"), "because")


class Peers:
    """Both pools, and a link of each: they note what they are asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {"fits_elsewhere": False, "place_anew": None, "tick": ()}
        self.address = "s:1"
        self.placement = self

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, *arguments, *options.values()))
            return self.answers.get(name)

        return note

    def take(self) -> list[str]:
        """Names of the calls since the last take."""
        names = [call[0] for call in self.calls]
        self.calls.clear()
        return names


class World:
    """A flow with one request whose outputs a scheduler runs."""

    def __init__(self, *, n: int = 1, **options: Any) -> None:
        self.now = 0.0
        self.journal, self.schedulers, self.detokenizers, self.link = Journal(1 << 20), Peers(), Peers(), Peers()
        self.client = Peers()
        self.flow = OutputFlow(
            self.journal,
            Metrics("router"),
            make_schedulers=lambda flow: self.schedulers,  # type: ignore[arg-type,return-value]
            make_detokenizers=lambda flow: self.detokenizers,  # type: ignore[arg-type,return-value]
            clock=lambda: self.now,
        )
        self.request: Request = new_request("r", self.client, n=n, **options)  # type: ignore[arg-type]
        self.request.clock = lambda: self.now
        self.journal.add(self.request)
        self.output: Output = self.request.outputs[0]

    def running(self, *ids: int) -> Output:
        """The output on a scheduler, with these ids, all of them looked at."""
        self.flow.begin(self.request)
        self.output.scheduler = self.link  # type: ignore[assignment]
        self.output.move_to(OutputState.RUNNING)
        self.output.ids.extend(ids)
        self.flow.on_tokens([self.output], len(ids))
        self.output.num_seen = len(ids)
        self.schedulers.take()
        self.detokenizers.take()
        return self.output

    def rejected(self, reason: str) -> list[str]:
        self.flow.on_rejected(self.output, self.link, error_of(reason))  # type: ignore[arg-type]
        return self.schedulers.take()

    def finished(self, ending: Ending) -> list[str]:
        self.flow.on_finished(self.output, self.link, ending)  # type: ignore[arg-type]
        return self.schedulers.take()


def test_a_fresh_output_is_opened_and_placed_and_one_of_ids_alone_only_placed() -> None:
    world = World()
    world.flow.begin(world.request)
    assert (world.schedulers.take(), world.detokenizers.take()) == (["place"], ["open"])
    world = World(ids_only=True)
    world.flow.begin(world.request)
    assert (world.schedulers.take(), world.detokenizers.take()) == (["place"], [])


def test_a_resumed_output_is_replayed_first_where_a_stop_string_may_be_in_it() -> None:
    world = World(resumption=2)
    change(world.request, stop={"stop": ("end",)})
    world.output.ids.extend([7, 8])
    world.flow.begin(world.request)
    assert world.schedulers.calls == [("cancel_older", world.request, 2 << 16)]
    assert world.output.state is OutputState.REPLAYING
    world.schedulers.take()
    world.flow.on_text(world.output, "", 1, False)
    assert world.schedulers.take() == [], "one id is still to be looked at"
    world.flow.on_text(world.output, "", 2, False)
    assert world.schedulers.take() == ["place"]


def test_a_resumed_output_that_says_its_end_is_sent_nowhere() -> None:
    world = World(resumption=1, max_tokens=2)
    world.output.ids.extend([7, 8])
    world.flow.begin(world.request)
    assert world.schedulers.take() == ["cancel_older"]
    assert world.output.state is OutputState.ENDED and world.output.ending == Ending(reason=LENGTH, num_output=2)


def test_outputs_that_the_client_has_seen_finish_are_left_alone() -> None:
    world = World(n=2)
    world.output.state = OutputState.FINISHED
    world.flow.begin(world.request)
    assert [call[1].index for call in world.schedulers.calls] == [1]


def test_an_end_waits_for_the_text() -> None:
    world = World()
    output = world.running(7, 8)
    output.num_seen = 1
    world.finished(Ending(reason=STOP, num_output=2))
    assert output.state is OutputState.ENDED and world.detokenizers.take() == ["push"]
    world.flow.on_text(output, "é", 2, True)
    assert (output.text_bytes, output.num_seen) == (2, 2)
    world.flow.on_text_done(output, "", 2)
    assert output.state is OutputState.FINISHED and output.ending == Ending(reason=STOP, num_output=2)
    assert world.detokenizers.take() == ["close_output"] and world.schedulers.take() == ["release"]
    assert world.client.take() == ["mark"] * 2, "its text, and that it has ended"


def test_tokens_that_no_text_was_made_of_do_not_count() -> None:
    world = World()
    output = world.running(7, 8, 9)
    output.num_seen = 2
    output.is_text_done = True
    world.finished(Ending(reason=LENGTH, num_output=3))
    assert output.ending == Ending(reason=LENGTH, num_output=2)


def test_a_stop_string_ends_the_output_with_the_schedulers_usage() -> None:
    world = World()
    output = world.running(7, 8, 9)
    world.flow.on_text_done(output, "end", 2)
    assert (list(output.ids), output.state) == ([7, 8], OutputState.STOPPING)
    assert world.link.calls == [("stop", output, 2)]
    world.finished(Ending(reason=LENGTH, num_output=3, cached_tokens=4))
    assert output.ending == Ending(reason=STOP, num_output=2, stop="end", cached_tokens=4)
    assert output.state is OutputState.FINISHED


def test_usage_is_waited_for_half_a_second() -> None:
    world = World()
    output = world.running(7, 8)
    world.now = 10.0
    world.flow.on_text_done(output, "end", 2)
    world.flow.tick(10.4)
    assert output.state is OutputState.STOPPING
    world.flow.tick(10.6)
    assert output.state is OutputState.FINISHED


@pytest.mark.parametrize("how", ["lost", "fail", "cancel"])
def test_an_output_that_is_stopping_ends_by_its_stop_whatever_happens(how: str) -> None:
    world = World()
    output = world.running(7, 8)
    world.flow.on_text_done(output, "end", 2)
    match how:
        case "lost":
            world.flow.on_scheduler_lost([output])
        case "fail":
            world.flow.fail(output, error_of("INTERNAL"))
        case "cancel":
            world.flow.cancel(world.request, error_of("ABORTED"))
    assert output.state is OutputState.FINISHED and output.ending == Ending(reason=STOP, num_output=2, stop="end")


def test_a_stop_string_after_the_end_takes_its_place() -> None:
    world = World()
    output = world.running(7, 8, 9)
    world.finished(Ending(reason=LENGTH, num_output=3, cached_tokens=5))
    world.flow.on_text_done(output, "end", 1)
    assert output.ending == Ending(reason=STOP, num_output=1, stop="end", cached_tokens=5)
    assert list(output.ids) == [7] and output.state is OutputState.FINISHED


@pytest.mark.parametrize(
    ("reason", "fits", "expected"),
    [
        ("OVERLOADED", False, ["place_rejected"]),
        ("UNKNOWN_BLOB", False, ["place_rejected"]),
        ("NOT_SERVING", False, ["place_rejected"]),
        ("NEVER_FITS", True, ["fits_elsewhere", "place"]),
        ("PROMPT_TOO_LONG", True, ["fits_elsewhere", "place"]),
        ("NEVER_FITS", False, ["fits_elsewhere"]),
        ("INVALID_ARGUMENT", True, []),
    ],
)
def test_a_rejection_is_final_only_if_no_replica_can_take_the_output(
    reason: str, fits: bool, expected: list[str]
) -> None:
    world = World()
    output = world.running()
    world.schedulers.answers["fits_elsewhere"] = fits
    assert world.rejected(reason) == expected
    is_final = expected in (["fits_elsewhere"], [])
    assert (output.state is OutputState.ENDED) == is_final
    if is_final:
        assert output.ending is not None and output.ending.error is not None
        assert output.ending.error.reason == error_of(reason).reason and output.ending.num_output == 0


def test_a_rejection_that_comes_late_changes_nothing() -> None:
    world = World()
    world.flow.begin(world.request)
    world.schedulers.take()
    assert world.rejected("INVALID_ARGUMENT") == [] and world.output.state is OutputState.WAITING


@pytest.mark.parametrize("way", ["rejected", "finished"])
def test_a_stale_attempt_is_told_as_a_request_that_runs_elsewhere(way: str) -> None:
    world = World()
    output = world.running(7)
    stale = error_of("STALE_ATTEMPT")
    if way == "rejected":
        world.rejected("STALE_ATTEMPT")
    else:
        world.finished(Ending(reason=FinishReason.ERROR, num_output=1, error=stale))
    assert output.ending is not None and output.ending.error is not None
    assert output.ending.error.reason == ErrorReason.ERROR_REASON_SUPERSEDED


def test_a_lost_scheduler_costs_no_token() -> None:
    world = World(n=2, max_tokens=3)
    output = world.running(7, 8)
    complete, waiting = world.request.outputs[1], OutputState.WAITING
    complete.move_to(OutputState.RUNNING)
    complete.ids.extend([1, 2, 3])
    world.flow.on_scheduler_lost([output, complete])
    assert [call for call in world.schedulers.calls if call[0] == "place_anew"] == [("place_anew", output)]
    assert complete.ending == Ending(reason=LENGTH, num_output=3), "all of it is known"
    output.move_to(waiting)
    world.schedulers.take()
    world.flow.on_scheduler_lost([output])
    assert world.schedulers.take() == [], "it is on no scheduler"


def test_an_output_that_may_be_placed_no_more_fails() -> None:
    world = World()
    output = world.running(7)
    world.schedulers.answers["place_anew"] = error_of("GROUP_LOST")
    world.flow.on_scheduler_lost([output])
    assert output.ending is not None and output.ending.error is world.schedulers.answers["place_anew"]
    assert ("cancel", world.request, output.attempt + 1, 0) in world.link.calls


@pytest.mark.parametrize(
    ("ending", "fits", "is_moved"),
    [
        (Ending(reason=LENGTH, num_output=1), True, True),
        (Ending(reason=LENGTH, num_output=1), False, False),
        (Ending(reason=LENGTH, num_output=100), True, False),
        (Ending(reason=STOP, num_output=1), True, False),
        (Ending(reason=FinishReason.ERROR, num_output=1, error=error_of("NEVER_FITS")), True, True),
        (Ending(reason=FinishReason.ERROR, num_output=1, error=error_of("NOT_SERVING")), False, True),
        (Ending(reason=FinishReason.ERROR, num_output=1, error=error_of("STEP_FAILED")), True, False),
    ],
)
def test_an_end_for_want_of_room_goes_on_where_there_is_more(ending: Ending, fits: bool, is_moved: bool) -> None:
    world = World()
    output = world.running(7)
    world.schedulers.answers["fits_elsewhere"] = fits
    assert ("place_anew" in world.finished(ending)) == is_moved
    assert (output.state is OutputState.ENDED) != is_moved


def test_a_vectors_length_is_no_want_of_room() -> None:
    world = World(ids_only=True)
    change(world.request, task=Task.EMBED)
    world.running()
    world.schedulers.answers["fits_elsewhere"] = True
    assert "place_anew" not in world.finished(Ending(reason=LENGTH, num_output=0))
    assert world.output.state is OutputState.FINISHED


def test_ids_alone_are_delivered_as_they_come() -> None:
    world = World(ids_only=True)
    before = world.journal.num_bytes
    output = world.running(7, 8)
    output.ids.append(9)
    world.flow.on_tokens([output], 1)
    assert output.num_seen == 3 and world.journal.num_bytes == before + 12
    assert world.client.calls == [("mark", output)] * 2
    assert world.detokenizers.take() == []


def test_a_failure_ends_an_output_once_and_keeps_its_text() -> None:
    world = World()
    output = world.running(7, 8)
    world.flow.fail(output, error_of("INTERNAL"))
    assert world.link.calls == [("cancel", world.request, output.attempt + 1, 0)]
    assert output.state is OutputState.ENDED and world.detokenizers.take() == ["push"]
    world.flow.fail(output, error_of("ABORTED"))
    assert output.ending is not None and output.ending.error is not None
    assert output.ending.error.reason == ErrorReason.ERROR_REASON_INTERNAL


def test_without_a_detokenizer_an_output_fails_even_if_it_had_ended_well() -> None:
    world = World()
    output = world.running(7)
    world.finished(Ending(reason=STOP, num_output=1))
    world.flow.fail_text(output, error_of("NO_REPLICA"))
    assert output.state is OutputState.FINISHED and output.ending is not None
    assert (output.ending.reason, output.ending.error is not None) == (FinishReason.ERROR, True)


def test_an_entry_is_reopened_as_long_as_text_may_come() -> None:
    world = World()
    output = world.running(7)
    link = SimpleNamespace()
    world.flow.on_entry_lost(output, link)  # type: ignore[arg-type]
    assert world.detokenizers.take() == ["reopen"]
    output.is_text_done = True
    world.flow.on_entry_lost(output, link)  # type: ignore[arg-type]
    assert world.detokenizers.take() == []


def test_a_released_request_is_ended_at_its_schedulers_and_forgotten() -> None:
    world = World(n=2, resumption=3)
    world.running(7)
    world.request.outputs[1].scheduler = world.link  # type: ignore[assignment]
    world.flow.release(world.request)
    assert world.link.calls == [("cancel", world.request, 4 << 16)], "once a scheduler, and no later resumption"
    assert len(world.journal) == 0 == world.journal.num_bytes
    assert world.detokenizers.take() == ["close_output"] * 2


@pytest.mark.parametrize("is_last", [False, True])
def test_a_first_token_from_elsewhere_is_delivered_and_may_end_the_output(is_last: bool) -> None:
    world = World(ids_only=True, max_tokens=1 if is_last else 5)
    output = world.running()
    prompt = RemotePrompt(transfer_id="t", output=output, attempt=0, cached_tokens=3)
    prompt.ids.append(9)
    world.schedulers.prefills = SimpleNamespace(over=lambda prompt, *, is_handed_over: prompt.give())
    world.flow.on_prefill_over(prompt, is_handed_over=not is_last)
    assert list(output.ids) == [9] and output.num_seen == 1
    assert (output.state is OutputState.FINISHED) == is_last
    assert [call[0] for call in world.link.calls] == (["cancel"] if is_last else [])
    assert not is_last or (output.ending is not None and output.ending.cached_tokens == 3)


def test_a_first_token_from_elsewhere_is_delivered_ahead_of_its_prefills_end() -> None:
    world = World(ids_only=True, max_tokens=5)
    output = world.running()
    prompt = RemotePrompt(transfer_id="t", output=output, attempt=0)
    prompt.ids.append(9)
    world.schedulers.prefills = SimpleNamespace(token_came=lambda prompt: prompt.give())
    world.flow.on_prompt_token(prompt)
    assert list(output.ids) == [9] and output.num_seen == 1 and output.state is OutputState.RUNNING
    world.flow.on_prompt_token(prompt)
    assert list(output.ids) == [9], "it is the first one's place alone"
