import pytest

from mmrl.ops.time_left import RECENT, Work, seconds_left, step_seconds, times_due, usual


def of(seconds, attempt=1):
    return [(attempt, each) for each in seconds]


def test_constant_steps_take_as_long_as_they_took():
    assert seconds_left(Work(of([2.0] * 12), due=88, warm_up=2)) == 176.0
    assert seconds_left(Work(of([2.0] * 99), due=1, warm_up=2)) == 2.0


def test_nothing_is_known_before_the_first_step_even_if_an_evaluation_was_timed():
    assert seconds_left(Work([], due=100, warm_up=2), Work(of([5.0]), due=10)) is None


def test_evaluations_and_checkpoints_count_by_how_many_are_still_to_come():
    steps, evaluations = Work(of([1.0] * 10), due=90, warm_up=2), Work(of([30.0, 8.0]), due=times_due(10, 10, 100))
    checkpoints = Work(of([4.0]), due=times_due(40, 10, 100))
    assert seconds_left(steps, evaluations, checkpoints) == 90 * 1.0 + 9 * 8.0 + 3 * 4.0
    assert seconds_left(steps, Work([], due=9)) == 90.0  # none was timed yet


@pytest.mark.parametrize("every", [0, 1, 3, 10, 26, 1000])
@pytest.mark.parametrize("last", [1, 26, 30, 130])
def test_what_is_due_is_counted_as_a_run_does_it(every, last):
    for after in range(last + 1):
        due = [step for step in range(after + 1, last + 1) if step == last or (every and step % every == 0)]
        assert times_due(every, after, last) == len(due)


def test_first_steps_count_only_while_there_are_no_others():
    assert usual(of([60.0]), 2) == 60.0
    assert usual(of([60.0, 9.0]), 2) == 9.0  # nearer to those that come
    assert usual(of([60.0, 9.0, 2.0]), 2) == 2.0


def test_a_run_that_goes_on_counts_earlier_attempts_until_it_has_warm_steps_of_its_own():
    before = of([50.0, 9.0, 2.0, 2.0, 2.0])
    assert usual(before + of([40.0, 8.0], attempt=2), 2) == 2.0
    assert usual(before + of([40.0, 8.0, 1.0], attempt=2), 2) == 1.0  # on a faster machine
    assert usual(of([50.0]) + of([40.0, 8.0, 1.0], attempt=2) + of([30.0], attempt=3), 2) == 1.0


def test_a_step_that_hangs_moves_nothing_and_two_kinds_of_steps_count_by_their_share():
    assert usual(of([2.0] * 10 + [500.0] + [2.0] * 10)) == 2.0
    assert usual(of([0.0] + [1.0, 3.0] * 12)) == 2.0


def test_steps_that_become_longer_are_followed():
    assert usual(of([1.0] * 500 + [4.0] * RECENT)) == 4.0


LINE = {"step": 3, "attempt": 1, "time": 1060.0, "perf/step_s": 40.0, "perf/eval_s": 12.0, "perf/save_s": 3.0}


def test_a_step_took_the_time_since_the_line_before_without_evaluation_and_checkpoint():
    assert step_seconds(LINE, {"attempt": 1, "time": 1000.0}) == 45.0
    assert step_seconds(LINE, None) == step_seconds(LINE, {"attempt": 0, "time": 1000.0}) == 40.0


def test_a_clock_that_was_set_back_does_not_make_a_step_shorter_than_it_was():
    assert step_seconds(LINE, {"attempt": 1, "time": 5000.0}) == 40.0


def test_the_line_before_the_first_step_tells_of_no_step():
    assert step_seconds({"step": 0, "time": 9.0, "perf/eval_s": 2.0}, None) is None
