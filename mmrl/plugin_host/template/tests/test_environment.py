import asyncio

from mmrl.environments import Environment
from mmrl.testing import check_environment
from mmrl.types import Call, Message, Observation, Prompt, Turn
from new_plugin.environment import HigherLower


def test_it_keeps_the_rules_of_environments() -> None:
    check_environment(HigherLower, options={"highest": 10})


def answer(environment: Environment, number: int) -> Observation:
    turn = Turn("", (Call("guess", {"number": number}),), 0, "stop", 100)
    return asyncio.run(environment.run_calls(turn))


def test_the_number_is_found_by_halves_and_earns_1() -> None:
    environment = HigherLower(HigherLower.Config(highest=8))
    environment.reset(Prompt("p", (Message("user", "Play."),)), seed=3)
    low, high, guesses = 1, 8, 0
    while low <= high:
        middle, guesses = (low + high) // 2, guesses + 1
        found = answer(environment, middle)
        if found.done:
            break
        low, high = (middle + 1, high) if "higher" in str(found.content) else (low, middle - 1)
    assert found.done and found.reward == 1.0 and guesses <= 4
    assert environment.score() == {"guesses": guesses}
