"""The bound of every repeated, string and bytes field of every request of every rpc, and the code that enforces it.

A field that is added to a contract needs a row here, or test_bounds.py fails. `where` is "module:name" of what refuses
the smallest illegal value; WIRE is the scan of a message's bytes before it is parsed, which bounds every repeated and
string field of every message by default, WHOLE the limit of a message.
"""

from __future__ import annotations

from typing import NamedTuple

D = "radixmesh.daemons."
WIRE = f"{D}runtime.rpc.wire_bounds:check_counts"
WHOLE = f"{D}runtime.rpc.server:MAX_MESSAGE_BYTES"
PEER_NAME = (1024, f"{D}runtime.rpc.hello:check_peer_names")
REQUEST_ID = (256, f"{D}runtime.request_ids:check_request_id")
NAME = (256, f"{D}router.requests.intake.resolver:check_names")
# Parsed and refused: the verb or option is not offered.
NOT_OFFERED_WORKER = (64 << 20, f"{D}worker.service:WorkerService")
TEXT = (4 << 20, f"{D}runtime.tokenize.text_codec:Limits")
JSON = (4 << 20, f"{D}runtime.tokenize.chat:check_chat_size")
ADDRESS = (64 << 10, WIRE)
# Ids of the vocabulary, as many as the context holds; what is one message at most is compared as an array.
CONTEXT = (64 << 20, f"{D}router.requests.intake.resolver:check_prompt")
# Arrays whose lengths and values the plan check compares with the worker's slots and pages before anything runs.
PLAN = (64 << 20, f"{D}worker.plans.plan_check:check_plan")
ADMIT = (64 << 20, f"{D}worker.plans.admit_check:check_admit")
SUBMIT = (64 << 20, f"{D}scheduler.queue.validation:check_submission")
STOPS = (64, f"{D}runtime.sampling:check_stops")
# Read as arrays of one message at most, and dropped: no runner speculates yet.
DRAFTS = (64 << 20, f"{D}runtime.steps.step_codec:plan_from_proto")
# Pages and host pages that are compared with the worker's.
MOVES = (64 << 20, f"{D}worker.plans.tiers.host_tier:check_moves")
PLAN_COUNT = (64 << 20, f"{D}worker.plans.plan_check:check_plan")


class Bound(NamedTuple):
    """most: elements of a repeated field, bytes of another. where: what refuses more."""

    most: int
    where: str


def _rows(message: str, **fields: tuple[int, str]) -> dict[str, Bound]:
    return {f"radixmesh.{message}.{name}": Bound(*bound) for name, bound in fields.items()}


BOUNDS: dict[str, Bound] = {
    **_rows("common.v1.Hello", instance_id=PEER_NAME, daemon=PEER_NAME, build=PEER_NAME),
    **_rows(
        "common.v1.ModelIdentity",
        name=PEER_NAME,
        model_fingerprint=PEER_NAME,
        tokenizer_fingerprint=PEER_NAME,
        grammar_format=PEER_NAME,
        # A client's is dropped, a peer's is kept by none but the router, for a scheduler that it dialled.
        eos_ids=(64 << 20, f"{D}router.requests.intake.resume:rebuild"),
    ),
    **_rows(
        "common.v1.SamplingParams",
        logit_bias_ids=(4 * 1024, f"{D}runtime.sampling:MAX_LOGIT_BIASES"),
        logit_bias_values=(4 * 1024, f"{D}runtime.sampling:MAX_LOGIT_BIASES"),
    ),
    **_rows("common.v1.StopParams", stop=STOPS, stop_ids=(4 * 256, f"{D}runtime.sampling:MAX_STOP_IDS")),
    **_rows(
        "common.v1.Grammar",
        json_schema=(1 << 20, WIRE),
        regex=(1 << 20, WIRE),
        ebnf=(1 << 20, WIRE),
        structural_tag=(1 << 20, WIRE),
    ),
    **_rows(
        "common.v1.Thought",
        begin=(64, f"{D}runtime.guided.source:MAX_TAG_BYTES"),
        end=(64, f"{D}runtime.guided.source:MAX_TAG_BYTES"),
    ),
    **_rows("common.v1.Blob", hash=SUBMIT, data=SUBMIT),
    **_rows("common.v1.EmbeddingSpan", blob_hash=SUBMIT),
    # Clients.
    **_rows(
        "router.v1.GenerateRequest",
        request_id=REQUEST_ID,
        model=NAME,
        text=TEXT,
        prompt_ids=CONTEXT,
        cache_salt=NAME,
        session=NAME,
        tenant=NAME,
    ),
    **_rows("router.v1.Resume", outputs=(128, f"{D}router.requests.intake.resolver:MAX_N")),
    **_rows(
        "router.v1.Resolved",
        request_id=REQUEST_ID,
        model=NAME,
        prompt_ids=CONTEXT,
        seeds=(128, f"{D}router.requests.intake.resolver:MAX_N"),
        cache_salt=NAME,
        session=NAME,
        tenant=NAME,
        trace_context=(55, f"{D}runtime.telemetry.tracing:is_traceparent"),
    ),
    **_rows("router.v1.OutputProgress", output_ids=(64 << 20, f"{D}router.requests.intake.resume:rebuild")),
    **_rows("router.v1.AbortRequest", request_id=REQUEST_ID),
    **_rows("router.v1.TokenizeRequest", model=NAME, items=(4096, f"{D}runtime.tokenize.text_codec:Limits")),
    **_rows("tokenizer.v1.ChatInput", messages=(4096, f"{D}runtime.tokenize.text_codec:Limits"), tools_json=JSON),
    **_rows("tokenizer.v1.ChatInput", template_args_json=JSON),
    # A template's rendering of them is bounded by its budget and as a text.
    **_rows("tokenizer.v1.ChatMessage", role=(64 << 10, WIRE), content=TEXT, extra_json=JSON),
    **_rows("tokenizer.v1.EncodeItem", text=TEXT),
    # Operators.
    **_rows("router.v1.AddSchedulerRequest", address=ADDRESS),
    **_rows("router.v1.RemoveSchedulerRequest", address=ADDRESS),
    **_rows("router.v1.DrainSchedulerRequest", address=ADDRESS),
    **_rows("router.v1.MoveOutputsRequest", request_id=REQUEST_ID, from_address=ADDRESS, to_address=ADDRESS),
    # Routers to tokenizers.
    **_rows(
        "tokenizer.v1.EncodeRequest", items=(4096, f"{D}runtime.tokenize.text_codec:Limits"), tenant=(64 << 10, WIRE)
    ),
    **_rows("tokenizer.v1.EncodeEachRequest", trace_context=(16 << 10, f"{D}runtime.encode_calls:MAX_CALL_BYTES")),
    **_rows("tokenizer.v1.CompileGrammarRequest", tenant=(64 << 10, WIRE)),
    **_rows(
        "tokenizer.v1.DecodeRequest",
        ids=(4096, f"{D}runtime.tokenize.text_codec:MAX_DECODED_IDS"),
        tenant=(64 << 10, WIRE),
    ),
    # Routers to detokenizers.
    **_rows("detokenizer.v1.DetokenizeRequest", opens=(1 << 14, WIRE), close_handles=(4 << 20, WIRE)),
    **_rows(
        "detokenizer.v1.Open",
        request_id=PEER_NAME,
        prompt_tail_ids=(64 << 20, f"{D}runtime.detokenize.decoder_table:DecoderTable"),
        output_ids=(4 << 20, f"{D}runtime.detokenize.decoder_table:Limits"),
        eos_ids=(64 << 20, WHOLE),
        trace_context=PEER_NAME,
    ),
    **_rows(
        "detokenizer.v1.TokenRows",
        handles=(4 << 16, f"{D}runtime.detokenize.frames:MAX_ROWS"),
        first_output_indexes=(4 << 16, f"{D}runtime.detokenize.frames:MAX_ROWS"),
        counts=(4 << 16, f"{D}runtime.detokenize.frames:MAX_ROWS"),
        ids=(4 << 21, f"{D}runtime.detokenize.frames:MAX_IDS"),
        finals=(1 << 16, f"{D}runtime.detokenize.frames:MAX_ROWS"),
    ),
    # Routers to schedulers.
    **_rows(
        "scheduler.v1.ServeRequest",
        submits=(1 << 14, WIRE),
        stops=(1 << 14, WIRE),
        aborts=(1 << 14, WIRE),
        reservations=(1 << 14, WIRE),
        kv_targets=(1 << 14, WIRE),
    ),
    **_rows(
        "scheduler.v1.Submit",
        request_id=(1024, f"{D}scheduler.messages:submission_from_proto"),
        model=(1024, f"{D}scheduler.messages:submission_from_proto"),
        cache_salt=(1024, f"{D}scheduler.messages:submission_from_proto"),
        tenant=(1024, f"{D}scheduler.messages:submission_from_proto"),
        trace_context=(1024, f"{D}scheduler.messages:submission_from_proto"),
        prompt_ids=SUBMIT,
        resumed_output_ids=SUBMIT,
        grammar_hash=SUBMIT,
        blobs=SUBMIT,
        transfer_id=SUBMIT,
        embeddings=SUBMIT,
    ),
    **_rows(
        "scheduler.v1.TransferTarget",
        transfer_id=SUBMIT,
        regions=SUBMIT,
        addresses=SUBMIT,
        tokens_digest=(32, f"{D}scheduler.transfers.kv_target:KvTarget"),
    ),
    **_rows("scheduler.v1.Abort", request_id=PEER_NAME, tenant=PEER_NAME),
    **_rows(
        "scheduler.v1.Reservation",
        transfer_id=PEER_NAME,
        prompt_ids=SUBMIT,
        model=(64 << 10, WIRE),
        cache_salt=(64 << 10, WIRE),
        kv_heads=(4 * 3 * 1024, f"{D}runtime.kv_share:unpack_shares"),
    ),
    # Schedulers to workers.
    **_rows(
        "worker.v1.ExecuteRequest",
        complete=(64 << 20, f"{D}worker.stream.session:ExecuteSession"),
        more_plans=(8, f"{D}worker.stream.session:ExecuteSession"),
    ),
    **_rows("worker.v1.StepPlan", ranks=(64 << 20, f"{D}runtime.steps.step_codec:plan_from_proto")),
    **_rows("worker.v1.PlanHeader", barrier_ops=PLAN_COUNT),
    **_rows("worker.v1.CommitStaged", stage_id=PLAN, weights_digest=PLAN),
    **_rows("worker.v1.MoveExperts", stage_id=PLAN, sources=PLAN, targets=PLAN),
    **_rows("worker.v1.ExpertPlacement", experts=(64 << 20, f"{D}worker.experts.expert_moves:ExpertMoves")),
    **_rows("worker.v1.UnloadAdapter", adapter=PLAN),
    **_rows("worker.v1.ReleaseMemory", tags=PLAN_COUNT),
    **_rows("worker.v1.ForwardShape", idle_ranks=PLAN),
    **_rows("worker.v1.RankPlan", release_slots=PLAN, release_generations=PLAN, admits=PLAN_COUNT),
    **_rows(
        "worker.v1.Admit",
        request_id=PEER_NAME,
        prompt_ids=ADMIT,
        output_ids=ADMIT,
        cached_pages=PLAN,
        cached_page_generations=PLAN,
        suppressed_ids=ADMIT,
        cache_namespace=PEER_NAME,
        grammar_hash=PEER_NAME,
        adapter=PEER_NAME,
        embeddings=ADMIT,
        trace_context=PEER_NAME,
    ),
    **_rows("worker.v1.Grants", slots=PLAN, counts=PLAN, pages=PLAN),
    **_rows("worker.v1.PageCopies", source_pages=PLAN, target_pages=PLAN, num_tokens=PLAN),
    **_rows(
        "worker.v1.PageMoves", op_ids=MOVES, counts=MOVES, device_pages=MOVES, host_pages=MOVES, previous_pages=MOVES
    ),
    **_rows("worker.v1.Chunks", slots=PLAN, lengths=PLAN),
    **_rows("worker.v1.DecodeSet", slots=PLAN),
    **_rows("worker.v1.Drafts", slots=DRAFTS, generations=DRAFTS, starts=DRAFTS, counts=DRAFTS, ids=DRAFTS),
    **_rows(
        "worker.v1.FormGroupRequest",
        instance_id=(64 << 10, WIRE),
        rendezvous=PEER_NAME,
        member_instance_ids=(1 << 14, WIRE),
    ),
    **_rows("worker.v1.LeaveGroupRequest", instance_id=(64 << 10, WIRE)),
    **_rows("worker.v1.TransferPeer", instance_id=(64 << 10, WIRE)),
    **_rows(
        "worker.v1.KvFormat", weights_digest=(64 << 10, WIRE), kv_dtype=(64 << 10, WIRE), kv_layout=(64 << 10, WIRE)
    ),
    **_rows("worker.v1.SnapshotCacheRequest", instance_id=(64 << 10, WIRE)),
    **_rows(
        "worker.v1.PutBlobRequest",
        hash=(64 << 10, WIRE),
        data=(32 << 20, f"{D}worker.plans.slots.blob_store:BlobStore"),
    ),
    **_rows("worker.v1.NixlRegion", agent_metadata=NOT_OFFERED_WORKER),
    **_rows("worker.v1.StageRequest", stage_id=(64 << 10, WIRE)),
    **_rows("worker.v1.StageRequest", weights_path=(64 << 10, WIRE), expert_placement=NOT_OFFERED_WORKER),
    **_rows("worker.v1.StagedAdapter", name=(64 << 10, WIRE), path=(64 << 10, WIRE)),
    **_rows(
        "worker.v1.PrepareTransferRequest",
        transfer_id=(64 << 10, WIRE),
        instance_id=(64 << 10, WIRE),
    ),
    **_rows(
        "worker.v1.StartTransferRequest",
        transfer_id=(64 << 10, WIRE),
        source_pages=(64 << 20, f"{D}worker.kv_transfer.page_io:gather"),
        source_generations=(64 << 20, f"{D}worker.kv_transfer.page_io:gather"),
        segments=(1 << 14, WIRE),
        instance_id=(64 << 10, WIRE),
        address=(64 << 10, WIRE),
    ),
    **_rows("worker.v1.RenewTransfersRequest", instance_id=(64 << 10, WIRE), transfer_ids=(1 << 14, WIRE)),
    **_rows("worker.v1.SharedMemory", host=(64 << 10, WIRE)),
    **_rows("worker.v1.DeviceMemory", handle=(64, f"{D}worker.kv_transfer.device_memory:check_device_memory")),
    **_rows("worker.v1.GatherStart", host=PEER_NAME),
    **_rows("worker.v1.HostProcess", host=PEER_NAME),
    **_rows("worker.v1.TransferRegion", transfer_id=(64 << 10, WIRE), instance_id=(64 << 10, WIRE)),
    **_rows(
        "worker.v1.WriteTransferRequest",
        writer=(64 << 10, WIRE),
        data=(4 << 20, f"{D}worker.kv_transfer.transfer_service:receive"),
    ),
    **_rows(
        "worker.v1.FetchPagesRequest",
        instance_id=(64 << 10, WIRE),
        ids=(64 << 20, f"{D}worker.plans.tiers.store_tier:StoreTier"),
        host_pages=(64 << 20, f"{D}worker.plans.tiers.store_tier:StoreTier"),
        cache_namespace=(64 << 10, WIRE),
    ),
    **_rows(
        "worker.v1.CommitTransferRequest",
        transfer_id=(64 << 10, WIRE),
        other_transfer_ids=(1 << 14, WIRE),
        instance_id=(64 << 10, WIRE),
        pages=(64 << 20, f"{D}worker.kv_transfer.page_scatter:scatter"),
        generations=(64 << 20, f"{D}worker.kv_transfer.commits:TransferCommits"),
        ids=(64 << 20, f"{D}worker.kv_transfer.commits:TransferCommits"),
        cache_namespace=(64 << 10, WIRE),
    ),
    **_rows("worker.v1.WatchTransferRequest", transfer_id=(64 << 10, WIRE)),
    **_rows("worker.v1.AbortTransferRequest", transfer_id=(64 << 10, WIRE)),
}
