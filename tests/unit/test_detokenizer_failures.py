"""A refused entry leaves its error behind, and nothing of the ids that were sent."""

from __future__ import annotations

import sys

from support.small_tokenizers import byte_level, vocabulary_of

from radixmesh.daemons.detokenizer.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.detokenizer.messages import EntryFailure, OpenEntry, TokenBatch
from radixmesh.daemons.detokenizer.text_decoder import family_of

VOCABULARY = vocabulary_of(byte_level())


def test_a_failure_that_waits_to_be_read_holds_no_ids() -> None:
    """Frames of the error's traceback would: 32 opens of a million ids each were 1.5 GiB."""
    table = DecoderTable(family_of(VOCABULARY), VOCABULARY.vocab_size, Limits(), EntryBudget(8))
    ids = [VOCABULARY.vocab_size] * 1000
    num_references = sys.getrefcount(ids)
    failure = table.open(OpenEntry(handle=1, output_ids=ids))
    assert isinstance(failure, EntryFailure) and failure.error.reason_name == "TOKEN_OUT_OF_VOCABULARY"
    assert sys.getrefcount(ids) == num_references
    assert table.open(OpenEntry(handle=2)) is None
    batch = TokenBatch(
        handles=[2], first_indexes=[0], counts=[1000], finals=b"\x00", ids=ids, min_id=0, max_id=VOCABULARY.vocab_size
    )
    _, failures = table.push(batch)
    assert len(failures) == 1 and sys.getrefcount(ids) == num_references + 1, "the batch's own"
