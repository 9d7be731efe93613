"""Shares and limits of tenants: weights in the queue, outputs that run at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# So that a weight cannot make another tenant's share vanish.
_MIN_WEIGHT, _MAX_WEIGHT = 0.01, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShares:
    """weights: shares of the queue, 1 where none is given. limits: outputs at schedulers, default_limit for all others.

    0 = no limit.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    default_limit: int = 0

    @classmethod
    def parse(cls, weights: Sequence[str], limits: Sequence[str]) -> TenantShares:
        """From texts TENANT=WEIGHT, and TENANT=N or N for all others. Raises ValueError that says what to write."""
        shares = {tenant: _weight(text) for tenant, text in map(_split, weights)}
        found = dict(map(_split, limits))
        if "" in shares:
            raise ValueError("--tenant-weights: write TENANT=WEIGHT")
        numbers = {tenant: _limit(text) for tenant, text in found.items()}
        return cls(weights=shares, default_limit=numbers.pop("", 0), limits=numbers)

    def weight_of(self, tenant: str) -> float:
        """Share of the queue relative to others'."""
        return self.weights.get(tenant, 1.0)

    def limit_of(self, tenant: str) -> int:
        """Outputs that may be at schedulers at a time; 0 = any number."""
        return self.limits.get(tenant, self.default_limit)


class RunningOutputs:
    """Outputs at schedulers, by tenant."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._num_of: dict[str, int] = {}

    @property
    def num_tenants(self) -> int:
        """Those that have outputs at schedulers."""
        return len(self._num_of)

    def num_of(self, tenant: str) -> int:
        """Outputs of a tenant that are at schedulers."""
        return self._num_of.get(tenant, 0)

    def submitted(self, tenant: str) -> None:
        """One more is at a scheduler."""
        self._num_of[tenant] = self.num_of(tenant) + 1

    def left(self, tenant: str) -> None:
        """One is not any more."""
        num = self._num_of.pop(tenant) - 1
        if num:
            self._num_of[tenant] = num

    def is_at_limit(self, tenant: str) -> bool:
        """True if another one has to wait for one of the tenant's own."""
        limit = self._shares.limit_of(tenant)
        return bool(limit) and self.num_of(tenant) >= limit


def _split(text: str) -> tuple[str, str]:
    """Tenant and value; "" where no tenant is named. A tenant's name may have "=" in it."""
    tenant, _, value = text.rpartition("=")
    return tenant, value


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not _MIN_WEIGHT <= weight <= _MAX_WEIGHT:
        raise ValueError(f"--tenant-weights: {text!r} is not in [{_MIN_WEIGHT}, {_MAX_WEIGHT}]: write TENANT=WEIGHT")
    return weight


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"--tenant-max-outputs: {text!r} is no number: write N, or TENANT=N")
    return int(text)
