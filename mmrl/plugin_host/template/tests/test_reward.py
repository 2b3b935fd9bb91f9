from mmrl.testing import check_reward, make_rollouts
from new_plugin.reward import RightAndShort


def test_it_keeps_the_rules_of_rewards() -> None:
    check_reward(RightAndShort)


def test_the_right_answer_earns_1_less_the_tokens() -> None:
    reward = RightAndShort(RightAndShort.Config(per_token=0.25))
    right, wrong, other = make_rollouts(["7", "17", "a 7."], answer="7")  # one token for each letter, and an end
    assert reward.score([right, wrong, other]) == [0.5, -0.75, -0.25]


def test_without_a_reference_there_is_no_score() -> None:
    assert RightAndShort(RightAndShort.Config()).score(make_rollouts(["7"], answer=None)) == [None]
