"""Models and requests as messages, and as the router's own types."""

from __future__ import annotations

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.guided.source import grammar_to_proto
from radixmesh.daemons.runtime.sampling import sampling_to_proto, stop_to_proto
from radixmesh.router.v1 import router_pb2


def identity_from_proto(message: common_pb2.ModelIdentity) -> ServedIdentity:
    """Converts, and checks nothing: a hello is checked by its link, a resume by what it is compared with."""
    return ServedIdentity(
        name=message.name,
        model_fingerprint=message.model_fingerprint,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        grammar_format=message.grammar_format,
        sampler_version=message.sampler_version,
        vocab_size=message.vocab_size,
        max_total_len=message.max_total_len,
        eos_ids=message.eos_ids,
        default_sampling={field.name: value for field, value in message.default_sampling.ListFields()},
    )


def identity_to_proto(identity: ServedIdentity) -> common_pb2.ModelIdentity:
    defaults = identity.default_sampling
    return common_pb2.ModelIdentity(
        name=identity.name,
        model_fingerprint=identity.model_fingerprint,
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        grammar_format=identity.grammar_format,
        sampler_version=identity.sampler_version,
        vocab_size=identity.vocab_size,
        max_total_len=identity.max_total_len,
        eos_ids=identity.eos_ids,
        default_sampling=common_pb2.SamplingDefaults(**defaults) if defaults else None,  # type: ignore[arg-type]
    )


def resolved_to_proto(resolved: ResolvedRequest) -> router_pb2.Resolved:
    """The message that a client keeps, and brings back unchanged when its stream breaks."""
    return router_pb2.Resolved(
        request_id=resolved.request_id,
        model=resolved.model,
        model_identity=identity_to_proto(resolved.model_identity),
        prompt_ids=resolved.prompt_ids,
        seeds=resolved.seeds,
        sampling=sampling_to_proto(resolved.sampling),
        stop=stop_to_proto(resolved.stop),
        grammar=None if resolved.grammar is None else grammar_to_proto(resolved.grammar),
        ids_only=resolved.ids_only,
        cache_salt=resolved.cache_salt,
        priority=resolved.priority,
        tenant=resolved.tenant,
        session=resolved.session,
        trace_context=resolved.trace_context,
        task=int(resolved.task),  # type: ignore[arg-type]
    )
