"""Options of a replay."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

from radixmesh.daemons.scheduler.planning.settings import PlannerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """workload, seed, num_requests: of make_workload. running: most requests in slots. tree_tokens: in the cache before
    the workload starts. policy, cache: of the planner. cache_tokens: KV pages x page size; None = the tree, the whole
    working set and what `running` requests need beyond it. depth: plans ahead; None = by the lookahead rule. gap_us:
    from a result's leaving the device to the arrival of the plan that it allows. speed: arrivals and thinking pauses
    are so many times shorter. is_closed: a turn is sent as soon as its parent finished and fewer than `running` are
    under way, whatever its delay. chunk_tokens, step_tokens: most prefill tokens of a request, most tokens, a step.
    planner: further settings of the planner by name."""

    workload: str
    seed: int | None = None
    num_requests: int | None = None
    running: int = 256
    tree_tokens: int = 0
    policy: str = "fcfs"
    cache: str = "radix"
    cache_tokens: int | None = None
    page_size: int = 1
    depth: int | None = None
    gap_us: float = 2000.0
    speed: float = 1.0
    is_closed: bool = False
    chunk_tokens: int = 512
    step_tokens: int = 2048
    planner: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("running", "page_size", "chunk_tokens", "step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{_flag(name)} must be >= 1, not {getattr(self, name)}")
        for name in ("tree_tokens", "gap_us"):
            if getattr(self, name) < 0:
                raise ValueError(f"{_flag(name)} must be >= 0, not {getattr(self, name)}")
        for name in ("num_requests", "cache_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{_flag(name)} must be >= 1, not {value}")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"--pipeline-depth must be auto or a number >= 0, not {self.depth}")
        if self.speed <= 0:
            raise ValueError(f"--speed must be > 0, not {self.speed}")

    def planner_settings(self) -> PlannerSettings:
        """Raises ValueError for settings that the planner does not have."""
        settings = PlannerSettings(
            chunk_tokens=self.chunk_tokens,
            max_tokens_per_step=max(self.step_tokens, self.running),
            max_running=self.running,
            max_queue=1 << 30,
            cache=self.cache,
            queue_policy=self.policy,
        )
        names = {field.name for field in fields(PlannerSettings)}
        for name, text in self.planner:
            if name not in names:
                raise ValueError(f"--planner {name}: the planner has {', '.join(sorted(names))}")
            value = _parse(text, getattr(settings, name))
            settings = replace(settings, **{name: value})  # type: ignore[arg-type]
        return settings

    def as_json(self) -> dict[str, object]:
        values: dict[str, object] = asdict(self)
        return {**values, "depth": "auto" if self.depth is None else self.depth, "planner": dict(self.planner)}


def _parse(text: str, like: object) -> object:
    if isinstance(like, bool):
        return text.lower() in ("1", "true", "yes", "on")
    if isinstance(like, int) or like is None:  # Every optional value is a number.
        return int(text)
    if isinstance(like, float):
        return float(text)
    return text


def _flag(name: str) -> str:
    return {"num_requests": "--requests"}.get(name, f"--{name.replace('_', '-')}")
