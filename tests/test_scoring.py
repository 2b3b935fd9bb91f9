import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mmrl.config import RewardSpec
from mmrl.reward_failures import Failures, RewardError
from mmrl.scoring import Scorer
from mmrl.types import EncodedPrompt, Rollout, RolloutGroup

REWARDS = """
import os, signal, subprocess, sys, time
import numpy as np

calls = 0

def length(rollouts):
    print("noise"); sys.stderr.write("noise"); os.write(1, b"noise")
    return [len(r.text) for r in rollouts]

def numpy_values(rollouts):
    return np.array([r.index for r in rollouts], dtype=np.float32)

def booleans(rollouts):
    return [np.bool_(True)] * (len(rollouts) - 1) + [False]

def some(rollouts):
    return [None if r.index == 1 else 1.0 for r in rollouts]

def given(rollouts):
    return eval(rollouts[0].text)

def raises(rollouts):
    if any(r.index == 2 for r in rollouts):
        raise KeyError("colour")
    return [0.0] * len(rollouts)

def hangs(rollouts):
    if rollouts[0].prompt.id == "bad":
        subprocess.Popen(["sleep", "987"]); time.sleep(60)
    return [1.0] * len(rollouts)

def crashes(rollouts):
    subprocess.Popen(["sleep", "986"])
    os.kill(os.getpid(), signal.SIGSEGV)

def spoils(rollouts):
    rollouts[0].columns["colour"] = "changed"
    return [0.0] * len(rollouts)

def colour(rollouts):
    return [float(r.columns["colour"] == "red") for r in rollouts]

def pid(rollouts):
    return [os.getpid()] * len(rollouts)

def sees_secret(rollouts):
    return [float("MY_TOKEN" in os.environ)] * len(rollouts)

def in_main_thread(rollouts):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return [1.0] * len(rollouts)

def slow(rollouts):
    time.sleep(float(rollouts[0].text))
    return [1.0] * len(rollouts)
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return lambda name, **fields: RewardSpec(name=f"{path}:{name}", **fields)


@pytest.fixture(scope="module")
def given(spec):
    """A scorer whose reward answers what the completion says."""
    with Scorer([spec("given")], workers=1) as scorer:
        yield scorer


def group(num=3, prompt_id="p1", text="abc"):
    prompt = EncodedPrompt(prompt_id, (), "7", {"colour": "red"}, None, "", np.zeros(2, np.int32), ())
    return RolloutGroup(prompt, tuple(Rollout(prompt, (), i, text, "stop", 1) for i in range(num)))


def score(*specs, of=None):
    with Scorer(specs, workers=1) as scorer:
        return scorer.submit(of or group()).result(60)


def processes():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def ends(command):
    """Whether no process with that command line is left within five seconds: a kill takes effect in its own time."""
    deadline = time.monotonic() + 5
    while command in processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return command not in processes()


def is_alive(pid):
    """Whether the process runs; one that has ended but that nobody has waited for does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state != "" and not state.startswith("Z")


def test_rewards_are_summed_by_weight_and_kept_by_name(spec, capfd):
    a, b, c = spec("length", weight=0.5), spec("numpy_values", weight=2.0), spec("booleans", weight=-1.0)
    scored = score(a, b, c)
    assert scored.rewards.tolist() == [0.5, 2.5, 5.5]
    assert scored.rewards.dtype == np.float64
    assert scored.valid.tolist() == [True, True, True]
    assert scored.components[a.metric].tolist() == [3, 3, 3]
    assert scored.components[c.metric].tolist() == [1, 1, 0]
    assert capfd.readouterr() == ("", "")


def test_a_rollout_that_one_reward_cannot_score_is_invalid(spec):
    scored = score(spec("length"), unscored := spec("some"))
    assert scored.valid.tolist() == [True, False, True]
    assert scored.rewards.tolist() == [4, 0, 4]
    assert np.isnan(scored.components[unscored.metric]).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1.0, float('nan'), 1.0]", "answered nan"),
        ("[1.0, -float('inf'), 1.0]", "answered -inf"),
        ("[1.0, '0.5', 1.0]", "answered str '0.5'"),
        ("[1.0, [1.0], 1.0]", "answered list"),
        ("[1.0, 10**400, 1.0]", "answered 1000"),
    ],
)
def test_what_is_no_score_is_an_error_with_reward_sample_and_value(given, value, message):
    with pytest.raises(RewardError) as caught:
        given.submit(group(text=value)).result(60)
    text = str(caught.value)
    assert "rewards.py:given' answered" in text
    assert message in text
    assert "prompt 'p1', rollout 1" in text
    assert "finite number" in text
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("value", "got", "expected"),
    [
        ("[1.0]", "answered 1", "3 scores"),
        ("1.0", "answered float 1.0", "a list of 3 numbers"),
        ("None", "answered NoneType None", "a list of 3 numbers"),
        ("'abc'", "answered str 'abc'", "a list of 3 numbers"),
        ("{0: 1, 1: 1, 2: 1}", "answered dict", "a list of 3 numbers"),
    ],
)
def test_what_is_no_list_of_scores_is_an_error_with_expected_and_got(given, value, got, expected):
    with pytest.raises(RewardError) as caught:
        given.submit(group(text=value)).result(60)
    assert got in str(caught.value)
    assert expected in str(caught.value)
    assert "rollouts 0 to 2" in str(caught.value)


def test_a_reward_that_raises_is_named_with_its_rollout_and_line_and_keeps_its_traceback(spec):
    with pytest.raises(RewardError) as caught:
        score(spec("raises"))
    text = str(caught.value)
    assert "raised KeyError: 'colour'" in text
    assert "prompt 'p1', rollout 2" in text
    assert "rewards.py:25 in raises" in text
    assert "Traceback" not in text
    assert 'raise KeyError("colour")' in caught.value.details


def test_a_hung_worker_is_killed_with_its_children_and_the_next_group_is_scored(spec):
    with Scorer([spec("hangs", timeout_s=0.5)], workers=1) as scorer:
        bad, good = scorer.submit(group(prompt_id="bad")), scorer.submit(group(prompt_id="good"))
        with pytest.raises(RewardError, match=r"did not answer within 0.5 s.*\n.*prompt 'bad'"):
            bad.result(60)
        assert good.result(60).rewards.tolist() == [1, 1, 1]
    assert ends("sleep 987")


def test_a_crash_is_an_error_with_its_signal_and_leaves_no_children(spec):
    with pytest.raises(RewardError, match=r"ended its worker \(signal SIGSEGV\)"):
        score(spec("crashes"))
    assert ends("sleep 986")


def test_no_reward_sees_what_another_did_to_its_input(spec):
    scored = score(spec("spoils"), after := spec("colour"))
    assert scored.components[after.metric].tolist() == [1, 1, 1]


def test_workers_do_not_see_secrets_and_run_rewards_in_their_main_thread(spec, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    scored = score(secret := spec("sees_secret"), main := spec("in_main_thread"))
    assert scored.components[secret.metric].tolist() == [0, 0, 0]
    assert scored.components[main.metric].tolist() == [1, 1, 1]


def test_groups_are_scored_side_by_side_and_each_future_has_its_own(spec):
    with Scorer([spec("slow"), spec("length")], workers=2) as scorer:
        first, second = scorer.submit(group(text="1.000")), scorer.submit(group(num=2, text="0.0"))
        assert second.result(60).rewards.tolist() == [4, 4]
        assert not first.done()
        assert first.result(60).rewards.tolist() == [6, 6, 6]


def test_a_reward_that_cannot_be_made_is_the_registrys_error():
    with pytest.raises(RewardError, match="no_such_reward") as caught:
        score(RewardSpec(name="no_such_reward"))
    assert "possible" in str(caught.value) or "do:" in str(caught.value)


def test_closing_ends_workers_at_once_even_busy_ones_and_cancels_the_rest(spec):
    with Scorer([spec("pid")], workers=1) as scorer:
        pid = int(scorer.submit(group()).result(60).rewards[0])
        assert is_alive(pid)
        assert os.getsid(pid) == pid, "Ctrl-C in the terminal must not reach it"
    assert not is_alive(pid)
    start = time.monotonic()
    with Scorer([spec("slow")], workers=1) as scorer:
        busy = scorer.submit(group(text="30"))
        while not busy.running():
            time.sleep(0.01)
        waiting = scorer.submit(group())
    assert time.monotonic() - start < 5
    assert waiting.cancelled()
    with pytest.raises(RewardError):
        busy.result(0)


def test_without_rewards_there_are_no_workers():
    with Scorer([]) as scorer:
        assert scorer._threads == []


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
import test_scoring
from mmrl.config import RewardSpec
from mmrl.scoring import Scorer
pids, stuck = RewardSpec(name={pid!r}), RewardSpec(name={slow!r})
scorer = Scorer([pids, stuck], workers=1)
print(int(scorer.submit(test_scoring.group(text="0")).result(60).components[pids.metric][0]), flush=True)
scorer.submit(test_scoring.group(text="60"))
time.sleep(60)
"""


def test_a_busy_worker_dies_with_a_killed_parent(spec):
    code = PARENT.format(tests=os.path.dirname(__file__), pid=spec("pid").name, slow=spec("slow").name)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    assert is_alive(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)
    parent.stdout.close()
