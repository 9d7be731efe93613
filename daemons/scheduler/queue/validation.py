"""Validation of submissions. One that passes can never make a worker refuse a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.frames import MAX_ENTRY_BYTES, too_large
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.daemons.scheduler.group.group_info import GroupInfo
from radixmesh.daemons.scheduler.results.stop_conditions import end_ids_of
from radixmesh.daemons.scheduler.sequence import Sequence, Submission

# Tokens that a plan can admit at once with what it says of each: an id, a cached page and its generation.
_MOST_TOKENS = MAX_ENTRY_BYTES // 12


def check_submission(submission: Submission, group: GroupInfo) -> None:
    """Raises the typed error that says why a submission can never run on this group."""
    if submission.unsupported:
        raise _unsupported(submission.unsupported)
    if submission.send_kv_to is not None and not group.has_transfers:
        raise _unsupported("KV transfer")
    if submission.model not in ("", group.model_name):
        message = f"this scheduler serves {group.model_name!r}, not {submission.model!r}"
        raise MeshError(ErrorReason.ERROR_REASON_UNKNOWN_MODEL, message, {"model": submission.model})
    if submission.grammar is not None and not group.grammar_format:
        raise _unsupported("grammar")
    if submission.task not in group.tasks:
        raise _unsupported(f"task {submission.task.name.lower()}")
    if not len(submission.prompt_ids):
        raise MeshError(ErrorReason.ERROR_REASON_EMPTY_PROMPT, "the prompt has no tokens: send at least one")
    _check_ids(submission.prompt_ids, 0, group.vocab_size)
    _check_ids(submission.resumed_output_ids, len(submission.prompt_ids), group.vocab_size)
    _check_sampling(submission, group)
    _check_size(submission, group)


def make_sequence(submission: Submission, group: GroupInfo, arrival: int) -> Sequence:
    """A request from a checked submission: every bound that depends on the group filled in."""
    sampling = submission.sampling
    if sampling.seed is None:  # Greedy: nothing is sampled, but the contract wants a seed.
        submission = replace(submission, sampling=replace(sampling, seed=0))
    sequence = Sequence(
        submission=submission,
        arrival=arrival,
        owner=submission.owner,
        handle=submission.handle,
        adapter="",
        max_total_len=min(_wanted_total_len(submission, group), _most_total_len(group)),
        end_ids=end_ids_of(
            group.eos_ids,
            (token for token in submission.stop.stop_ids if 0 <= token < group.vocab_size),
            ignore_eos=submission.stop.ignore_eos,
        ),
        logprobs_start=submission.logprobs_start,
    )
    sequence.output.extend(submission.resumed_output_ids.tolist())
    return sequence


def check_same_prompt(live: Sequence, submission: Submission) -> None:
    """Raises DUPLICATE_REQUEST if the live request of that name is another one."""
    if not np.array_equal(live.submission.prompt_ids, submission.prompt_ids):
        message = f"{submission.key.request_id} is live with another prompt: choose another request id"
        raise MeshError(ErrorReason.ERROR_REASON_DUPLICATE_REQUEST, message, {"request_id": submission.key.request_id})


def is_continued_alike(live: Sequence, submission: Submission) -> bool:
    """True if the live request's tokens, as they are kept here, are the submission's. Kept are ids, no logprobs."""
    mine, wanted = live.submission, submission.sampling
    if wanted.wants_logprobs or mine.sampling.wants_logprobs:
        return False
    if _hash_of(mine) != _hash_of(submission):
        return False
    return (mine.sampling, mine.stop, mine.cache_salt, mine.task) == (
        replace(wanted, seed=wanted.seed or 0),
        submission.stop,
        submission.cache_salt,
        submission.task,
    )


def outgrown(total_pages: int) -> MeshError:
    """The error of a request that fills all memory and needs more."""
    message = f"the output outgrew this replica's KV memory of {total_pages} pages: retry on another"
    metadata = {"needed_pages": str(total_pages + 1), "total_pages": str(total_pages)}
    return MeshError(ErrorReason.ERROR_REASON_NEVER_FITS, message, metadata)


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold the KV of so many tokens."""
    return -(-num_tokens // page_size)


def _wanted_total_len(submission: Submission, group: GroupInfo) -> int:
    if submission.task is not Task.GENERATE:
        return min(len(submission.prompt_ids) + 1, group.max_total_len)
    if submission.stop.max_tokens is None:
        return group.max_total_len
    return min(len(submission.prompt_ids) + submission.stop.max_tokens, group.max_total_len)


def _most_total_len(group: GroupInfo) -> int:
    # The last token is sampled, never computed: it needs no KV.
    return min(group.num_pages * group.page_size + 1, _MOST_TOKENS)


def _check_size(submission: Submission, group: GroupInfo) -> None:
    num_prompt = len(submission.prompt_ids)
    if num_prompt >= group.max_total_len:
        raise MeshError(
            ErrorReason.ERROR_REASON_PROMPT_TOO_LONG,
            f"the prompt has {num_prompt} tokens: prompt and output together hold {group.max_total_len}",
            {"prompt_tokens": str(num_prompt), "max_total_len": str(group.max_total_len)},
        )
    # Without max_tokens the output ends where memory does; with it the caller asked for more than there is.
    least = num_prompt + max(1, len(submission.resumed_output_ids))
    wanted = least if submission.stop.max_tokens is None else _wanted_total_len(submission, group)
    if wanted > _MOST_TOKENS:
        raise too_large(f"a request of {wanted} tokens", 12 * wanted)
    if wanted > _most_total_len(group):
        needed = pages_for(wanted - 1, group.page_size)
        raise MeshError(
            ErrorReason.ERROR_REASON_NEVER_FITS,
            f"the request needs {needed} KV pages, this replica has {group.num_pages}: ask for fewer tokens",
            {"needed_pages": str(needed), "total_pages": str(group.num_pages)},
        )


def _check_sampling(submission: Submission, group: GroupInfo) -> None:
    sampling = submission.sampling
    if sampling.seed is None and not sampling.is_greedy and submission.task is Task.GENERATE:
        raise MeshError(
            ErrorReason.ERROR_REASON_MISSING_FIELD, "set sampling.seed: routers journal it", {"field": "sampling.seed"}
        )
    for token, _ in sampling.logit_bias:
        if not 0 <= token < group.vocab_size:
            raise _outside(token, -1, group.vocab_size)


def _check_ids(ids: IntArray, offset: int, vocab_size: int) -> None:
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        raise _outside(int(ids[outside[0]]), offset + int(outside[0]), vocab_size)


def _outside(token: int, position: int, vocab_size: int) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_TOKEN_OUT_OF_VOCABULARY,
        f"token id {token} is outside the vocabulary: ids are in [0, {vocab_size})",
        {"position": str(position), "id": str(token), "vocab_size": str(vocab_size)},
    )


def _hash_of(submission: Submission) -> str:
    return "" if submission.grammar is None else submission.grammar.hash


def _unsupported(feature: str) -> MeshError:
    message = f"{feature} is not offered by this scheduler: leave it out, or use a replica that offers it"
    return MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": feature})
