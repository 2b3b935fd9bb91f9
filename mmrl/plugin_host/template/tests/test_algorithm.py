import numpy as np
import pytest

from mmrl.testing import check_algorithm, replay
from new_plugin.algorithm import MeanBaseline


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_it_keeps_the_rules_of_algorithms(aggregation: str) -> None:
    check_algorithm(MeanBaseline, options={"aggregation": aggregation})


def test_advantages_loss_and_gradient_are_those_of_a_calculation_by_hand() -> None:
    batch = {
        "group_ids": [0, 0, 0],
        "rewards": [1.0, 0.0, 0.5],
        "response_mask": [[1, 1], [1, 1], [1, 0]],
        "log_probs": [[-1.0, -2.0], [-1.0, -3.0], [-1.0, 0.0]],
        "rollout_log_probs": [[-1.0, -2.0], [-1.0, -3.0], [-1.0, 0.0]],
    }
    result = replay(MeanBaseline, batch)
    np.testing.assert_allclose(result.advantages, [0.5, -0.5, 0.0])
    np.testing.assert_allclose(result.loss, (0.5 * 3 - 0.5 * 4) / 5)
    np.testing.assert_allclose(result.grad_log_probs, [[-0.1, -0.1], [0.1, 0.1], [0.0, 0.0]])
