"""The models behind a router's schedulers, and how much of a request each replica holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from radixmesh.daemons.router.served_identity import ServedIdentity, is_same_model


class Replica(Protocol):
    """One scheduler, as far as its hello tells; it may be away at the moment."""

    @property
    def is_connected(self) -> bool: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def identity(self) -> ServedIdentity | None: ...
    @property
    def max_request_len(self) -> int: ...


class ServedModel(NamedTuple):
    """A model that is or was served. base_model: "" for a base model. num_schedulers: how many serve it now.

    identity: with the longest context of its replicas. request_lens: per replica, the most tokens of prompt and output
    together that its context and its KV memory hold.
    """

    name: str
    identity: ServedIdentity
    base_model: str
    num_schedulers: int
    request_lens: tuple[int, ...]

    @property
    def max_request_len(self) -> int:
        """Prompt and output together on the largest replica."""
        return max(self.request_lens)

    def default_request_len(self, prompt_len: int) -> int:
        """Prompt and output together where a request sets no max_tokens.

        Replicas within an eighth of the largest count as equal, and the smallest of these decides: KV memories that
        differ by some pages must not make one replica the only one for such requests.
        """
        largest = self.max_request_len
        return min(size for size in self.request_lens if size == largest or size > max(prompt_len, largest * 7 // 8))


def served_models(replicas: Sequence[Replica]) -> list[ServedModel]:
    """Every model heard of, in the order of replicas, connected ones first; a name may stand for several models.

    That is so while replicas are replaced by those of another checkpoint: of one name, the model comes first that most
    connected replicas serve.
    """
    found: dict[str, list[ServedModel]] = {}
    for replica in sorted(replicas, key=lambda replica: not replica.is_connected):
        identity = replica.identity
        if identity is None:
            continue
        for name in replica.models:
            _add(found.setdefault(name, []), name, replica, identity)
    return [model for models in found.values() for model in sorted(models, key=lambda model: -model.num_schedulers)]


def pick_model(models: Iterable[ServedModel], name: str, like: ServedIdentity | None = None) -> ServedModel | None:
    """The first model of that name, "" = of any; of several the one that is the same as `like`, if there is one."""
    named = [model for model in models if name in ("", model.name)]
    if like is not None:
        named.sort(key=lambda model: not is_same_model(model.identity, like))
    return named[0] if named else None


def _add(models: list[ServedModel], name: str, replica: Replica, identity: ServedIdentity) -> None:
    """Counts a replica in with the replicas of the same model."""
    for index, known in enumerate(models):
        if is_same_model(known.identity, identity):
            longest = max(known.identity.max_total_len, identity.max_total_len)
            models[index] = known._replace(
                identity=replace(known.identity, max_total_len=longest),
                num_schedulers=known.num_schedulers + replica.is_connected,
                request_lens=(*known.request_lens, replica.max_request_len),
            )
            return
    named = replace(identity, name=name)
    base = "" if name == identity.name else identity.name
    models.append(ServedModel(name, named, base, int(replica.is_connected), (replica.max_request_len,)))
