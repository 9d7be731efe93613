"""Events of a scheduler's stream, for whoever drives the outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.requests.journal import Ending, Output
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink


class SchedulerEvents(Protocol):
    """Receiver of a scheduler's events."""

    def on_submitted(self, output: Output, link: SchedulerLink, since_s: float) -> None:
        """The output, which waited since that moment, goes to the scheduler of link."""

    def on_tokens(self, outputs: list[Output], num_tokens: int) -> None:
        """These outputs have new ids in the journal, num_tokens together."""

    def on_prompt_logprobs(self, output: Output) -> None:
        """More prompt logprobs are in the journal."""

    def on_vector(self, output: Output, values: bytes) -> None:
        """The f32 array that an embed or score task asked for; its Finished follows."""

    def on_finished(self, output: Output, link: SchedulerLink, ending: Ending) -> None:
        """The scheduler is done with output; all its ids are in the journal."""

    def on_rejected(self, output: Output, link: SchedulerLink, error: MeshError) -> None:
        """The scheduler will not run output."""

    def on_scheduler_lost(self, outputs: list[Output]) -> None:
        """Outputs that were on a link which broke."""

    def on_reservation(self, link: SchedulerLink, result: scheduler_pb2.ReservationResult) -> None:
        """The scheduler has a place for KV, or none."""

    def on_prompt_token(self, prompt: RemotePrompt) -> None:
        """A prompt that is computed for an output elsewhere has brought a token."""

    def on_prefill_over(self, prompt: RemotePrompt, *, is_handed_over: bool) -> None:
        """A prompt that was computed for an output elsewhere: its KV is on its way, or will not come."""

    def on_load(self, link: SchedulerLink) -> None:
        """The scheduler has told its load."""

    def on_first_token(self, link: SchedulerLink, sequence: int) -> None:
        """The first tokens of that submit have come."""

    def on_left(self, link: SchedulerLink, sequence: int, output: Output) -> None:
        """The output of that submit is not at the scheduler any more."""

    def on_scheduler_changed(self, link: SchedulerLink) -> None:
        """A link was connected, or its group's state changed."""
