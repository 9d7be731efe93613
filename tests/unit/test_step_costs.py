"""Credit of drafts: when there will be enough of it for a trial."""

import pytest

from radixmesh.daemons.worker.speculation.step_costs import StepCosts

PLAIN_NS = 1_000_000


@pytest.mark.parametrize("loss", [0.1, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("reserve", [0.0, 4.0])
@pytest.mark.parametrize("before", [0, 50, 400])
def test_credit_is_there_when_it_was_said_to_be(loss, reserve, before):
    costs = StepCosts(0.0125)
    costs.note(PLAIN_NS, 0, 0.0, is_rough=False, is_settled=True)

    def pass_steps(number: int) -> None:
        for _ in range(number):
            costs.earn(PLAIN_NS, 0, 0.0, 0.0)

    pass_steps(before)
    wait = costs.steps_until(loss, reserve)
    assert wait == 0 or not costs.allows(loss, reserve)
    pass_steps(wait)
    # Sums of so many parts are a little less or more.
    assert wait < 2 or not costs.allows(loss + 1e-6, reserve)
    pass_steps(2)
    assert costs.allows(loss - 1e-6, reserve)
