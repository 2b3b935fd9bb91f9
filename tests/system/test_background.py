import threading

import pytest

from mmrl.system.background import Background


def test_a_job_runs_beside_its_starter_and_the_next_one_waits_for_it():
    background, may_end, done = Background("jobs"), threading.Event(), []

    def first():
        may_end.wait(10)
        done.append(("first", threading.current_thread().name))

    background.start(first)
    assert done == []
    threading.Timer(0.05, may_end.set).start()
    background.start(lambda: done.append(("second", threading.current_thread().name)))
    assert done[0] == ("first", "jobs")
    background.wait()
    assert [name for name, _ in done] == ["first", "second"]
    background.wait()


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_an_error_is_raised_once_where_the_job_is_waited_for(error):
    def fail():
        raise error

    background, done = Background("jobs"), []
    background.start(fail)
    with pytest.raises(type(error)) as caught:
        background.start(lambda: done.append("is not begun"))
    assert caught.value is error
    background.wait()
    background.start(lambda: done.append("begun"))
    background.wait()
    assert done == ["begun"]
