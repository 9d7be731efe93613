"""Checks an admit by itself: ids, lengths, options. Slots and pages are the plan check's."""

from __future__ import annotations

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Admit, Task
from radixmesh.daemons.worker.limits import MAX_SUPPRESSED_IDS, Limits


def check_admit(admit: Admit, limits: Limits) -> None:
    """Raises EMPTY_PROMPT, TOKEN_OUT_OF_VOCABULARY, PROMPT_TOO_LONG, INVALID_ARGUMENT or UNSUPPORTED."""
    if len(admit.prompt_ids) == 0:
        raise MeshError(ErrorReason.ERROR_REASON_EMPTY_PROMPT, f"request {admit.request_id!r} has no prompt tokens")
    _check_offered(admit, limits)
    _check_vocabulary(admit, limits.vocab_size)
    _check_lengths(admit, limits)
    _check_cached_len(admit, limits.page_size)


def _check_offered(admit: Admit, limits: Limits) -> None:
    if admit.task not in limits.tasks:
        raise _unsupported(f"the task {admit.task.name}", admit.task.name.lower())
    if admit.grammar_hash and not limits.takes_grammars:
        raise _unsupported("guided decoding", "grammar")
    if admit.adapter:
        raise _unsupported("adapters", "adapter")


def _check_vocabulary(admit: Admit, vocab_size: int) -> None:
    if len(admit.suppressed_ids) > MAX_SUPPRESSED_IDS:
        message = f"{len(admit.suppressed_ids)} ids are suppressed before min_tokens: {MAX_SUPPRESSED_IDS} at most"
        raise _invalid("suppressed_ids", message, MAX_SUPPRESSED_IDS)
    bias_ids = np.array([token for token, _ in admit.sampling.logit_bias], np.int32)
    for name, ids in (
        ("prompt_ids", admit.prompt_ids),
        ("output_ids", admit.output_ids),
        ("suppressed_ids", admit.suppressed_ids),
        ("logit_bias_ids", bias_ids),
    ):
        _check_ids(name, ids, vocab_size)
    if (admit.sampling.num_top_logprobs or 0) > vocab_size:
        raise _invalid("num_top_logprobs", f"{admit.sampling.num_top_logprobs} of {vocab_size} ids", vocab_size)


def _check_ids(name: str, ids: IntArray, vocab_size: int) -> None:
    if len(ids) == 0:
        return
    is_outside = (ids < 0) | (ids >= vocab_size)
    if is_outside.any():
        position = int(np.argmax(is_outside))
        raise MeshError(
            ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
            f"{name}[{position}] is {ids[position]}: ids are in [0, {vocab_size})",
            {"position": str(position), "id": str(ids[position]), "vocab_size": str(vocab_size)},
        )


def _check_lengths(admit: Admit, limits: Limits) -> None:
    total_len = len(admit.prompt_ids) + len(admit.output_ids)
    if admit.max_total_len > limits.max_total_len:
        message = f"max_total_len is {admit.max_total_len}: the model ends at {limits.max_total_len}"
        raise _invalid("max_total_len", message, limits.max_total_len)
    # A task that generates needs room for one token at least.
    most = admit.max_total_len - (1 if admit.task is Task.GENERATE else 0)
    if total_len > most:
        raise MeshError(
            ErrorReason.ERROR_REASON_PROMPT_TOO_LONG,
            f"request {admit.request_id!r} has {total_len} tokens and room for {admit.max_total_len}",
            {"prompt_tokens": str(total_len), "max_total_len": str(admit.max_total_len)},
        )


def _check_cached_len(admit: Admit, page_size: int) -> None:
    most = len(admit.prompt_ids) + len(admit.output_ids) - 1
    if admit.task is Task.EMBED:
        most = 0  # The hidden states of all positions are pooled, and the cache holds none.
    if admit.sampling.prompt_logprobs:
        first = max(admit.logprobs_start, 1)
        # The logprob of a position comes from computing the one before it.
        most = min(most, first - 1) if first < len(admit.prompt_ids) else most
    if admit.cached_len > most:
        raise _invalid("cached_len", f"cached_len is {admit.cached_len}: {most} at most, the rest is computed", most)
    if len(admit.cached_pages) != admit.cached_len // page_size:
        num_pages = len(admit.cached_pages)
        message = f"{num_pages} cached pages for {admit.cached_len} tokens: name the full pages of {page_size} tokens"
        raise _invalid("cached_pages", message, admit.cached_len // page_size)


def _unsupported(what: str, feature: str) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, f"{what}: not offered by this worker", {"feature": feature})


def _invalid(field: str, message: str, most: int) -> MeshError:
    return MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field, "max": str(most)})
