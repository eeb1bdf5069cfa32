"""What a budget buys."""

import math

import pytest

from jaggrl.backward.cost import Prediction
from jaggrl.errors import UserError
from jaggrl.forecast import affordable

EACH = Prediction(4, 0, 0, 4, 1, 0, 12, 12, 5)
"""17 units a sample, rollout and update."""


@pytest.mark.parametrize(
    ("budget", "rollouts"), [(None, 40), (340, 10), (339, 9), (34, 1), (1e9, 40), (math.inf, 40)]
)
def test_a_budget_is_never_exceeded_by_prediction(budget: float | None, rollouts: int) -> None:
    assert affordable(40, budget, 2, lambda rollout: EACH.total) == rollouts


def test_a_budget_below_one_rollout_is_refused() -> None:
    with pytest.raises(UserError, match="less than one rollout's 34"):
        affordable(40, 33, 2, lambda rollout: EACH.total)


def test_every_rollout_costs_what_its_own_windows_cost() -> None:
    assert affordable(40, 2 * (17 + 17 + 5) + 1, 2, lambda rollout: 17 if rollout < 2 else 5) == 3
