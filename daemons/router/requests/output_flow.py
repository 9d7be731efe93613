"""Flow of outputs: events of schedulers and detokenizers in, moves of the lifecycle (see journal.py) out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import Counter

from radixmesh.daemons.router.peers.detokenizer_link import DetokenizerLink
from radixmesh.daemons.router.peers.detokenizer_pool import DetokenizerPool
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.peers.schedulers.scheduler_pool import SchedulerPool
from radixmesh.daemons.router.requests.deadlines import Deadlines
from radixmesh.daemons.router.requests.journal import Ending, Journal, Output, OutputState, Request
from radixmesh.daemons.router.requests.request_times import RequestTimes
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.scheduler.v1 import scheduler_pb2

log = get_logger(__name__)

# Seconds for which a finish by stop string waits for the scheduler's usage; the text is sent already.
_USAGE_WAIT_S = 0.5
# A member read through its class costs a call of Python: this one is asked for with every text.
_REPLAYING = OutputState.REPLAYING
# Replicas differ in size: these say that one is too small, not that the request is wrong.
_RETRIED = (ErrorReason.ERROR_REASON_OVERLOADED, ErrorReason.ERROR_REASON_UNKNOWN_BLOB)
_TOO_SMALL = (ErrorReason.ERROR_REASON_NEVER_FITS, ErrorReason.ERROR_REASON_PROMPT_TOO_LONG)


class OutputFlow:
    """Drives every output from its beginning to FINISHED, whatever dies. No I/O of its own.

    make_schedulers, make_detokenizers: make pools whose links tell their events to the flow they are given. clock:
    monotonic seconds.
    """

    def __init__(
        self,
        journal: Journal,
        metrics: Metrics,
        times: RequestTimes | None = None,
        *,
        make_schedulers: Callable[[OutputFlow], SchedulerPool],
        make_detokenizers: Callable[[OutputFlow], DetokenizerPool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._times = times or RequestTimes(metrics)
        self._metrics = metrics
        self._clock = clock
        self._stopping: dict[Output, None] = {}
        self._finished: dict[FinishReason, Counter] = {}
        self._deadlines = Deadlines()
        self.schedulers = make_schedulers(self)
        self.detokenizers = make_detokenizers(self)

    def begin(self, request: Request) -> None:
        """Starts or continues every output of a journalled request that its client has not seen finish."""
        self._deadlines.add(request)
        if request.resumption:
            self.schedulers.cancel_older(request, request.resumption << 16)
        for output in request.outputs:
            if output.state is not OutputState.FINISHED:
                self._begin_output(output)

    def release(self, request: Request) -> None:
        """Forgets a request: what still runs is ended. Nobody is told but schedulers and detokenizers. Idempotent."""
        self._deadlines.drop(request)
        for link in {output.scheduler for output in request.outputs if output.scheduler is not None}:
            # Bounded: the same request may live on at another router, by a higher resumption.
            link.cancel(request, below_attempt=(request.resumption + 1) << 16)
        for output in request.outputs:
            self._release(output)
        self._journal.drop(request)
        log.info(
            "request_over",
            request_id=request.request_id,
            prompt_tokens=request.num_prompt,
            output_tokens=sum(len(output.ids) for output in request.outputs),
            reasons=[_reason_of(output) for output in request.outputs],
            seconds=round(self._clock() - request.accepted, 3),
        )

    def cancel(self, request: Request, error: MeshError) -> None:
        """Ends what is unfinished with FINISH_REASON_ABORT; the client gets what there is."""
        for output in request.outputs:
            self.fail(output, error, FinishReason.ABORT)

    def fail(self, output: Output, error: MeshError, reason: FinishReason = FinishReason.ERROR) -> None:
        """Ends an output with an error; text that was held back is still delivered. Idempotent."""
        if not output.is_open:
            return
        if output.state is OutputState.STOPPING:
            self._finish(output)
            return
        log.info("output_failed", request_id=output.request.request_id, index=output.index, error=str(error))
        if output.scheduler is not None:
            output.scheduler.cancel(output.request, below_attempt=output.attempt + 1, index=output.index)
        self.schedulers.release(output)
        self._end(output, Ending(reason=reason, num_output=len(output.ids), error=error))

    def fail_text(self, output: Output, error: MeshError) -> None:
        """No text can be made of an output any more."""
        output.is_text_done = True
        if output.is_open:
            self.fail(output, error)
        elif output.state is OutputState.ENDED and output.ending is not None:
            output.ending = replace(output.ending, reason=FinishReason.ERROR, error=error)
            self._finish(output)

    def tick(self, now: float) -> None:
        """Call every 0.1 s or so."""
        for output in tuple(self._stopping):
            if now - output.state_since > _USAGE_WAIT_S:
                self._finish(output)
        for output, error in self._deadlines.passed(now):
            self.fail(output, error)
        for output, error in self.schedulers.tick(now):
            self.fail(output, error)
        for output, error in self.detokenizers.tick(now):
            self.fail_text(output, error)

    # From schedulers.

    def on_submitted(self, output: Output, link: SchedulerLink, since_s: float) -> None:
        self._times.submitted(output, link.address, since_s)
        self.schedulers.on_submitted(output)

    def on_tokens(self, outputs: list[Output], num_tokens: int) -> None:
        self._metrics.output_tokens.inc(num_tokens)
        charge, push = self._journal.charge, self.detokenizers.push
        for output in outputs:
            request = output.request
            num_ids = len(output.ids)
            if not output.num_charged:
                self._times.first_token_came(output)
            charge(request, 4 * (num_ids - output.num_charged))
            output.num_charged = num_ids
            if output.logprobs is not None:
                charge(request, output.logprobs.take_added())
            if not request.resolved.ids_only:
                push(output)
            else:
                output.num_seen = num_ids
                request.delivery.mark(output)

    def on_prompt_logprobs(self, output: Output) -> None:
        if output.request.prompt_logprobs is not None:
            self._journal.charge(output.request, output.request.prompt_logprobs.take_added())
        if not output.request.are_prompt_logprobs_due:
            output.request.delivery.mark(output)

    def on_vector(self, output: Output, values: bytes) -> None:
        self._journal.charge(output.request, len(values) - len(output.vector))
        output.vector = values
        output.request.delivery.mark(output)

    def on_finished(self, output: Output, link: SchedulerLink, ending: Ending) -> None:
        if output.state is OutputState.STOPPING:
            assert output.ending is not None
            output.ending = replace(
                output.ending,
                cached_tokens=ending.cached_tokens,
                accepted_predictions=ending.accepted_predictions,
                rejected_predictions=ending.rejected_predictions,
            )
            self._finish(output)
        elif self._may_run_elsewhere(output, link, ending):
            self._place_again(output)
        elif output.is_open:
            self._end(output, _as_told(ending))

    def on_rejected(self, output: Output, link: SchedulerLink, error: MeshError) -> None:
        if output.state is not OutputState.RUNNING:
            return
        if error.status == "UNAVAILABLE" or error.reason in _RETRIED:
            self.schedulers.place_rejected(output, link, error)
        elif error.reason in _TOO_SMALL and self.schedulers.fits_elsewhere(output, link):
            self.schedulers.place(output)
        else:
            self._end(
                output,
                Ending(reason=FinishReason.ERROR, num_output=len(output.ids), error=_superseded(error)),
            )

    def on_scheduler_lost(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.state is OutputState.STOPPING:
                self._finish(output)
            else:
                self._place_again(output)

    def on_reservation(self, link: SchedulerLink, result: scheduler_pb2.ReservationResult) -> None:
        self.schedulers.prefills.answered(link, result)

    def on_prompt_token(self, prompt: RemotePrompt) -> None:
        if self.schedulers.prefills.token_came(prompt):
            self._metrics.remote_first_tokens.inc()
            self.on_tokens([prompt.output], len(prompt.ids))

    def on_prefill_over(self, prompt: RemotePrompt, *, is_handed_over: bool) -> None:
        if not self.schedulers.prefills.over(prompt, is_handed_over=is_handed_over):
            return
        output = prompt.output
        self._metrics.remote_first_tokens.inc()
        self.on_tokens([output], len(prompt.ids))
        ending = output.known_ending
        if ending is not None and output.is_open and output.scheduler is not None:
            output.scheduler.cancel(output.request, below_attempt=output.attempt + 1, index=output.index)
            self.schedulers.release(output)
            self._end(output, replace(ending, cached_tokens=prompt.cached_tokens))

    def on_load(self, link: SchedulerLink) -> None:
        self.schedulers.on_load(link)

    def on_first_token(self, link: SchedulerLink, sequence: int) -> None:
        self.schedulers.on_first_token(link, sequence)

    def on_left(self, link: SchedulerLink, sequence: int, output: Output) -> None:
        self.schedulers.on_left(link, sequence, output)

    def on_scheduler_changed(self, link: SchedulerLink) -> None:
        self.schedulers.on_changed()

    # From detokenizers.

    def on_text(self, output: Output, text: str, num_tokens: int, is_final: bool) -> None:
        if text:
            size = len(text) if text.isascii() else len(text.encode())
            output.text.append(text)
            output.text_bytes += size
            self._journal.charge(output.request, size)
        if num_tokens > output.num_seen:
            output.num_seen = num_tokens
        output.request.delivery.mark(output)
        if output.state is _REPLAYING and not is_final and num_tokens >= len(output.ids):
            self.schedulers.place(output)

    def on_text_done(self, output: Output, stop: str, num_tokens: int) -> None:
        output.is_text_done = True
        if not stop:
            if output.state is OutputState.ENDED:
                self._finish(output)
            return  # An EOS id was seen; the scheduler's Finished is on its way, or known_ending finds it.
        del output.ids[num_tokens:]
        output.num_seen = num_tokens
        told = output.ending or Ending(reason=FinishReason.STOP, num_output=num_tokens)
        output.ending = replace(
            told, reason=FinishReason.STOP, num_output=num_tokens, stop_id=None, stop=stop, error=None
        )
        if output.state is OutputState.RUNNING and output.scheduler is not None:
            output.scheduler.stop(output, num_tokens)
            output.move_to(OutputState.STOPPING)
            self._stopping[output] = None
        else:
            self._finish(output)

    def on_entry_lost(self, output: Output, link: DetokenizerLink) -> None:
        if not output.is_text_done:
            self.detokenizers.reopen(output, link)

    def on_entry_failed(self, output: Output, error: MeshError) -> None:
        self.fail_text(output, error)

    def on_answered(self, seconds: float) -> None:
        self._times.detokenized(seconds)

    def on_detokenizer_ready(self) -> None:
        self.detokenizers.place_waiting()

    def _begin_output(self, output: Output) -> None:
        request = output.request
        ending = output.known_ending
        if not request.has_text:
            output.num_seen = len(output.ids)
        elif ending is None and output.ids and request.resolved.stop.stop:
            output.move_to(OutputState.REPLAYING)
        if request.has_text:
            self.detokenizers.open(output)
        if ending is not None:
            self._end(output, ending)
        elif output.state is not OutputState.REPLAYING:
            self.schedulers.place(output)

    def _may_run_elsewhere(self, output: Output, link: SchedulerLink, ending: Ending) -> bool:
        if ending.error is not None and ending.error.status == "UNAVAILABLE":
            return True
        return output.is_open and _is_too_small(output, ending) and self.schedulers.fits_elsewhere(output, link)

    def _place_again(self, output: Output) -> None:
        """The output was on a scheduler and is not any more."""
        if output.state is not OutputState.RUNNING:
            return
        self._metrics.requests_resumed.inc()
        ending = output.known_ending
        if ending is not None:
            self._end(output, ending)
            return
        error = self.schedulers.place_anew(output)
        if error is not None:
            self.fail(output, error)

    def _end(self, output: Output, ending: Ending) -> None:
        """No more tokens come. The text may still have to."""
        output.ending = ending
        output.move_to(OutputState.ENDED)
        if output.is_text_done or not output.request.has_text:
            self._finish(output)
        else:
            self.detokenizers.push(output)

    def _finish(self, output: Output) -> None:
        assert output.ending is not None
        if output.num_seen < output.ending.num_output:
            output.ending = replace(output.ending, num_output=output.num_seen)
        output.move_to(OutputState.FINISHED)
        self._release(output)
        self._finished_with(output.ending.reason).inc()
        output.request.delivery.mark(output)

    def _finished_with(self, reason: FinishReason) -> Counter:
        """The metric with the reason's label, which takes several locks to find."""
        found = self._finished.get(reason)
        if found is None:
            found = self._finished[reason] = self._metrics.requests_finished.labels(reason.label)
        return found

    def _release(self, output: Output) -> None:
        self._stopping.pop(output, None)
        self.schedulers.release(output)
        self.detokenizers.close_output(output)


def _reason_label(ending: Ending) -> str:
    """As schedulers name it."""
    return ending.reason.label


def _as_told(ending: Ending) -> Ending:
    return ending if ending.error is None else replace(ending, error=_superseded(ending.error))


def _superseded(error: MeshError) -> MeshError:
    """A lower attempt was submitted by us: then somebody else has taken the request over."""
    if error.reason != ErrorReason.ERROR_REASON_STALE_ATTEMPT:
        return error
    return MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "the request was resumed by a higher resumption elsewhere")


def _reason_of(output: Output) -> str:
    """Label of an output's ending; "left" if its client did not wait for that."""
    return "left" if output.ending is None else _reason_label(output.ending)


def _is_too_small(output: Output, ending: Ending) -> bool:
    """True if the scheduler ended the output because it has no room for more, where more was asked for."""
    if ending.error is not None:
        return ending.error.reason in _TOO_SMALL
    is_cut = ending.reason == FinishReason.LENGTH and ending.num_output < output.request.max_tokens
    return is_cut and not output.request.resolved.is_pooled
