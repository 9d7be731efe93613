"""Steps that say nothing new give what they would give if everything were looked up again."""

from dataclasses import replace

import numpy as np
import pytest
from support.plans import Steps, admit, chunk, grant, simulated_executor

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.plans.rows.repeated_rows import RepeatedRows
from radixmesh.daemons.worker.runner import DecodeRows
from radixmesh.daemons.worker.simulated.runner import SimulatedRunner

PROMPT = [20, 31, 5, 77]


class _Watched(SimulatedRunner):
    """Keeps the rows of each launch."""

    def launch(self, rows: DecodeRows, segments, ready_ns):
        self.launched = [*getattr(self, "launched", []), rows]
        return super().launch(rows, segments, ready_ns)


def _begun(*, num_pages: int = 40, max_total_len: int = 64) -> Steps:
    """Slots 0 and 1 have sampled their first token, their pages are granted."""
    executor = simulated_executor(runner_class=_Watched, max_total_len=64)
    steps = Steps(executor)
    for slot in range(2):
        steps.run(
            admits=(admit(slot, [*PROMPT, slot + 9], max_total_len=max_total_len),),
            grants=(grant(slot, range(slot * 100, slot * 100 + num_pages)),),
            chunks=(chunk(slot, len(PROMPT) + 1),),
        )
    return steps


def _repeats(steps: Steps) -> list[bool]:
    return [rows.is_repeat for rows in steps.executor.runner.launched]


def _results(steps: Steps, plans: list[dict]) -> list[tuple[list[int], list[int]]]:
    found = [steps.run(**parts) for parts in plans]
    return [(result.counts.tolist(), result.ids.tolist()) for result in found]


CHANGES = {
    "a grant": [{"grants": (grant(0, [90]),)}],
    "an admit": [{"admits": (admit(2, PROMPT),), "grants": (grant(2, range(200, 220)),)}],
    "a prompt beside": [
        {"admits": (admit(2, PROMPT),), "grants": (grant(2, range(200, 220)),), "chunks": (chunk(2, 4),)},
        {"decodes": [0, 1, 2]},
    ],
    "another set": [{"decodes": [1]}, {}, {"decodes": [1, 0]}],
    "no forward": [{"has_forward": False, "decodes": [1]}, {}],
}


@pytest.mark.parametrize("name", CHANGES)
def test_steps_that_repeat_give_what_others_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [{"decodes": [0, 1]}, {}, {}, *CHANGES[name], {}, {}]
    steps = _begun()
    got = _results(steps, plans)
    repeats = _repeats(steps)[-2:]
    monkeypatch.setattr(RepeatedRows, "next", lambda self, plan: None)
    plain = _begun()
    assert got == _results(plain, plans)
    assert repeats == [True, True] and not any(_repeats(plain))
    for array in ("tokens", "known_len", "computed_len", "total_len"):
        assert (getattr(steps.executor.table, array) == getattr(plain.executor.table, array)).all()
    assert (steps.executor.records.ids == plain.executor.records.ids).all()
    assert (steps.executor.records.filled == plain.executor.records.filled).all()


@pytest.mark.parametrize("bounds", [{"num_pages": 9}, {"max_total_len": 10}])
def test_rows_end_where_pages_or_their_output_end(bounds: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [{"decodes": [0, 1]}, *[{}] * 8]
    steps = _begun(**bounds)
    got = _results(steps, plans)
    assert any(_repeats(steps)) and got[-1] == ([0, 0], [])
    monkeypatch.setattr(RepeatedRows, "next", lambda self, plan: None)
    assert got == _results(_begun(**bounds), plans)


def test_a_plan_of_another_step_or_epoch_is_refused_though_it_says_nothing() -> None:
    steps = _begun()
    steps.run(decodes=[0, 1])
    steps.run()
    plan = steps.plan()
    steps.executor.launch(plan)
    for wrong in (plan, replace(plan, step_id=plan.step_id + 5)):
        with pytest.raises(MeshError, match="STEP_GAP"):
            steps.executor.launch(wrong)
    steps.executor.begin_epoch(2)
    with pytest.raises(MeshError, match="EPOCH_FENCED"):
        steps.executor.launch(steps.plan())
    again = Steps(steps.executor, epoch=2)
    result = again.run()
    assert not len(result.counts), "slots of the epoch before are free"
    np.testing.assert_array_equal(steps.executor.table.is_occupied, False)
