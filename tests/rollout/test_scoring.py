import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import CancelledError, wait
from dataclasses import replace

import numpy as np
import pytest

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import ConfigError, OldNameWarning, PluginError
from mmrl.rollout.batch import batch_of
from mmrl.rollout.episodes.scoring import score_episodes
from mmrl.rollout.rewards.failures import Failures, RewardError
from mmrl.rollout.rewards.scorer import Scorer
from mmrl.types import EncodedPrompt, Message, Prompt, Rollout, RolloutGroup, Segment

pytestmark = pytest.mark.fresh_workers

REWARDS = """
import os, signal, subprocess, sys, time
import numpy as np; from mmrl.types import Spans

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

def leaves(rollouts):
    if rollouts[0].text == "end":
        import threading
        threading.Timer(0.3, os._exit, (0,)).start()
    return [subprocess.Popen(["sleep", rollouts[0].prompt.id]).pid] * len(rollouts)

def spoils(rollouts):
    rollouts[0].columns["colour"] = "changed"
    return [0.0] * len(rollouts)

def colour(rollouts):
    return [float(r.columns["colour"] == "red") for r in rollouts]

def old(rollouts):
    return [float(r.prompt.answer) for r in rollouts]

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

async def later(rollouts, factor: float = 2.0):
    import asyncio
    await asyncio.sleep(0.01)
    return [factor * r.index for r in rollouts]

def spans(rollouts):
    return [Spans(r.index, ((0, 2, -0.5), (1, np.int64(3), np.float32(2)), (0, 2, 1))) for r in rollouts[:-1]] + [7]

def several(rollouts):
    return [Spans({"score": 1, "style": 0.5}, ((0, 1, 4),)), Spans({"score": 0, "style": None}, ()), None]

kept = []

def leaks(rollouts):
    kept.append(os.urandom(2**25))
    return [os.getpid()] * len(rollouts)
"""

CLASSES = """
import asyncio, os, random, signal, time
import numpy as np
from mmrl.interfaces import PluginConfig, Reward

class Noting(Reward):
    class Config(PluginConfig):
        calls: str

    def note(self, rollouts):
        with open(self.config.calls, "a") as file:
            file.write(" ".join(f"{r.prompt.id}/{r.index}" for r in rollouts) + "\\n")

def act(text):
    if text == "hang": time.sleep(60)
    if text == "exit": os._exit(7)
    if text in ("SIGKILL", "SIGSEGV"): os.kill(os.getpid(), getattr(signal, text))
    if text == "raise": raise ValueError("no such colour")
    if text == "nan": return float("nan")
    return None if text == "none" else float(text)

class One(Noting):
    def score_one(self, rollout):
        self.note([rollout])
        rollout.columns["seen"] = rollout.columns.get("seen", 0) + 1
        return act(rollout.text) if rollout.columns["seen"] == 1 else -1.0

class Side(Noting):
    running = most = 0

    async def score_one(self, rollout):
        self.note([rollout])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(60 if rollout.text == "wait" else 0.2)
        self.running -= 1
        return self.most if rollout.text == "wait" else act(rollout.text) or self.most

class Many(Noting):
    groups_per_call = 3

    def score(self, rollouts):
        self.note(rollouts)
        ids = {r.prompt.id for r in rollouts}
        time.sleep(0.3 * len(ids))
        return [100 * int(r.prompt.id) + r.index for r in rollouts]

class Own(Reward):
    workers = 1

    def score(self, rollouts):
        return [os.getpid()] * len(rollouts)

class Draws(Reward):
    def score_one(self, rollout):
        return random.random() + 10 * np.random.randint(100)
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


@pytest.fixture
def noting(package, tmp_path):
    """A reward of ``CLASSES`` that notes its calls, and what it has noted: a line of rollouts for each."""
    names = ("One", "Side", "Many", "Own", "Draws")
    package(CLASSES, "\n".join(f"{name.lower()} = {{module}}:{name}" for name in names))
    path = tmp_path / "calls"
    path.touch()
    return lambda name, **fields: RewardSpec(name=name, calls=str(path), **fields), lambda: path.read_text().split(
        "\n"
    )[:-1]


def group(num=3, prompt_id="p1", text="abc", texts=None, source=""):
    messages = (Message("user", "what is 3+4?"),)
    row = Prompt(prompt_id, messages, answer="7", columns={"colour": "red"}, source=source)
    prompt = EncodedPrompt(prompt=row, text="", token_ids=np.zeros(2, np.int32), images=())
    texts = texts or [text] * num
    return RolloutGroup(prompt, tuple(Rollout(prompt, (), i, each, "stop", 1) for i, each in enumerate(texts)))


def score(*specs, of=None):
    with Scorer(specs, workers=1) as scorer:
        return scorer.submit(of or group()).result(60)


def processes():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def ends(command):
    """True if no process with that command line is left within half a minute: a kill takes effect in its own time."""
    deadline = time.monotonic() + 30
    while command in processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return command not in processes()


def is_alive(pid):
    """True if the process runs; one that has ended but that nobody has waited for does not."""
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


def test_messages_larger_than_a_pipe_reach_a_worker_and_come_back(spec):
    lengths = [300_000, 3, 0]
    assert score(spec("length"), of=group(texts=["a" * n for n in lengths])).rewards.tolist() == lengths
    scored = score(spec("numpy_values"), of=group(num=20_000, text="a"))
    assert scored.rewards.tolist() == list(range(20_000)) and scored.valid.all()


@pytest.mark.parametrize(
    ("spans", "got"),
    [
        ("((0, 999, 1.0),)", "the span from 0 to 999"),
        ("((-1, 2, 1.0),)", "the span from -1 to 2"),
        ("((2, 2, 1.0),)", "the span from 2 to 2"),
        ("((0.0, 2, 1.0),)", "the span from 0.0 to 2"),
        ("((0, 2),)", "a span (0, 2)"),
        ("5", "spans 5"),
    ],
)
def test_spans_that_are_no_part_of_the_text_are_an_error_with_reward_sample_and_span(given, spans, got):
    with pytest.raises(RewardError, match="prompt 'p1', rollout 1") as caught:
        given.submit(group(text=f"[1.0, Spans(0.5, {spans}), 1.0]")).result(60)
    assert f"answered {got}" in str(caught.value) and "spans" in caught.value.possible


def test_values_of_parts_are_weighed_and_lie_at_the_parts_last_tokens(spec):
    """A part's last token is here the one of its last character, and each rollout has four."""
    four = Segment(np.arange(4, dtype=np.int32), True, np.zeros(4, np.float32))
    of = group()
    of = replace(of, rollouts=tuple(replace(each, segments=(four,)) for each in of.rollouts))
    specs = [spec("spans", weight=0.5), spec("several", weight=-1.0), spec("length")]
    with Scorer(specs, workers=1, last_tokens=lambda rollout, ends: [end - 1 for end in ends]) as scorer:
        found = scorer.submit(of).result(60)
    assert [values_T.tolist() for values_T in found.token_rewards] == [[-4, 0.25, 1, 0], [0, 0.25, 1, 0], [0, 0, 0, 0]]
    assert found.components[specs[0].metric].tolist() == [0, 1, 7] and found.valid.tolist() == [True, True, False]
    assert found.component(f"{specs[1].metric}/style")[0] == 0.5
    assert not score(*specs, of=of).token_rewards  # nobody asks for them
    # A rollout that cannot be used has none, and the batch's are those of all groups.
    batch = batch_of([found, found], {})
    assert [each.tolist() for each in batch.token_rewards][2:4] == [[0, 0, 0, 0], [-4, 0.25, 1, 0]]
    assert batch_of([found, replace(found, token_rewards=())], {}).token_rewards is None


def test_values_of_parts_of_episodes_are_those_of_the_members_that_rewards_score(spec):
    two = Segment(np.arange(2, dtype=np.int32), True, np.zeros(2, np.float32))
    of = group(text="abcd")
    members = [replace(each, segments=(two,), failure="broke" * (each.index == 0)) for each in of.rollouts]
    specs = [spec("spans")]
    with Scorer(specs, workers=1, last_tokens=lambda rollout, ends: [1] * len(ends)) as scorer:
        of = replace(of, rollouts=tuple(members))
        found = score_episodes(scorer, specs, {}, of, Failures(bounded=False)).result(60)
    assert [values_T.tolist() for values_T in found.token_rewards] == [[0, 0], [0, 2.5], [0, 0]]


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
        ("[1.0, Spans(float('nan'), ()), 1.0]", "answered nan"),
        ("[1.0, Spans(0.0, ((0, 1, float('inf')),)), 1.0]", "answered inf as the value of characters 0 to 1"),
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


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("rollouts.answer", "write it as def name(rollouts): return [... for rollout in rollouts]"),
        ("rollouts['answer']", "write it as def name(rollouts): return [... for rollout in rollouts]"),
        ("None.answer", "correct the reward"),
        ("[][3]", "correct the reward"),
    ],
)
def test_a_files_function_that_takes_the_list_for_one_rollout_is_told_its_form(given, value, remedy):
    with pytest.raises(RewardError) as caught:
        given.submit(group(text=value)).result(60)
    assert caught.value.remedy == remedy
    assert ("is given a list of rollouts" in caught.value.what) == (remedy != "correct the reward")


def test_a_reward_that_raises_is_named_with_its_rollout_and_line_and_keeps_its_traceback(spec):
    with pytest.raises(RewardError) as caught:
        score(spec("raises"))
    text = str(caught.value)
    assert "raised KeyError: 'colour'" in text
    assert "prompt 'p1', rollout 2, which asks 'what is 3+4?'" in text
    assert "rewards.py:25 in raises" in text
    assert "Traceback" not in text
    assert 'raise KeyError("colour")' in caught.value.details


def test_a_hung_call_costs_its_rollouts_and_its_worker_with_all_children_and_no_other_group(spec):
    failures = Failures(bounded=False)
    with Scorer([hangs := spec("hangs", timeout_s=0.5)], workers=1) as scorer:
        bad, good = (scorer.submit(group(prompt_id=name), failures) for name in ("bad", "good"))
        assert bad.result(60).valid.tolist() == [False] * 3
        assert np.isnan(bad.result().components["hangs"]).all() and not bad.result().rewards.any()
        assert good.result(60).rewards.tolist() == [1, 1, 1]
    assert [(f.reward, f.rollout.index) for f in failures.since(0)] == [(hangs.metric, i) for i in range(3)]
    assert "did not answer within 0.5 s" in failures.since(0)[0].cause
    assert ends("sleep 987")


def test_a_crash_costs_its_rollouts_whatever_on_error_says_and_leaves_no_children(spec):
    failures = Failures(bounded=False)
    with Scorer([spec("crashes", on_error="fail")], workers=1) as scorer:
        assert not scorer.submit(group(), failures).result(60).valid.any()
    assert [f.cause for f in failures.since(0)] == ["ended its worker (signal SIGSEGV)"] * 3
    assert ends("sleep 986")


def test_no_reward_sees_what_another_did_to_its_input(spec):
    scored = score(spec("spoils"), after := spec("colour"))
    assert scored.components[after.metric].tolist() == [1, 1, 1]


def test_the_use_of_an_old_name_is_told_here_with_its_line(spec):
    with pytest.warns(OldNameWarning, match="rollout.prompt.answer is now") as told, Scorer([spec("old")], 1) as scorer:
        assert scorer.submit(group(), Failures()).result(60).rewards.tolist() == [7.0] * 3
    (warning,) = told
    assert warning.filename.endswith("rewards.py") and "r.prompt.answer" in REWARDS.split("\n")[warning.lineno - 1]


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
    with pytest.raises(PluginError, match="no_such_reward") as caught:
        score(RewardSpec(name="no_such_reward"))
    assert "possible" in str(caught.value) or "do:" in str(caught.value)


def test_a_reward_that_fails_to_start_is_an_error_of_every_group_and_is_not_tried_again(package, tmp_path):
    package(
        f"from mmrl.interfaces import Reward\nclass Length(Reward):\n"
        f"    def __init__(self, config):\n        open({str(tmp_path / 'starts')!r}, 'a').write('x')\n        1 / 0\n"
        "    def score(self, rollouts): ...\n"
    )
    with Scorer([RewardSpec(name="length")], workers=1) as scorer:
        for scoring in [scorer.submit(group()) for _ in range(3)]:
            with pytest.raises(RewardError, match=r"'length' of thirdparty 1.2 cannot be created: ZeroDivisionError"):
                scoring.result(60)
    assert len((tmp_path / "starts").read_text()) <= 2


def test_preparing_is_done_once_and_its_time_is_not_the_deadlines(package, tmp_path):
    package(
        f"import time\nfrom mmrl.interfaces import Reward\nclass Length(Reward):\n"
        f"    def prepare(self):\n        time.sleep(1.5); open({str(tmp_path / 'loads')!r}, 'a').write('x')\n"
        f"    def score_one(self, rollout):\n        return len(open({str(tmp_path / 'loads')!r}).read())\n"
    )
    with Scorer([RewardSpec(name="length", timeout_s=1)], workers=1) as scorer:
        assert [scorer.submit(group()).result(60).rewards.tolist() for _ in range(2)] == [[1.0] * 3] * 2


def test_closing_ends_workers_at_once_even_busy_ones_and_cancels_the_rest(spec):
    with Scorer([spec("pid")], workers=1) as scorer:
        pid = int(scorer.submit(group()).result(60).rewards[0])
        assert is_alive(pid)
        assert os.getsid(pid) == pid, "Ctrl-C in the terminal must not reach it"
    assert not is_alive(pid)
    start = time.monotonic()
    with Scorer([spec("slow")], workers=1) as scorer:
        busy = scorer.submit(group(text="30"))
        ((_, running),) = busy.parts
        while not running.running():
            time.sleep(0.01)
        waiting = scorer.submit(group())
    assert time.monotonic() - start < 25
    with pytest.raises(CancelledError):
        waiting.result(0)
    with pytest.raises(RewardError, match="was stopped"):
        busy.result(0)


def test_what_a_reward_started_ends_with_its_worker_however_that_ends(spec):
    with Scorer([spec("leaves")], workers=1) as scorer:
        assert scorer.submit(group(prompt_id="981.5")).result(60).valid.all()
        assert "sleep 981.5" in processes()
    assert ends("sleep 981.5")
    with Scorer([spec("leaves")], workers=1) as scorer:
        scorer.submit(group(prompt_id="982.5", text="end")).result(60)
        ((_, pool),) = scorer._pools
        while not pool._workers[0].has_ended:  # between two calls
            time.sleep(0.01)
        assert "sleep 982.5" in processes()
        scorer.submit(group(prompt_id="983.5", text="end")).result(60)
        assert ends("sleep 982.5")
        while not pool._workers[0].has_ended:
            time.sleep(0.01)
    assert ends("sleep 983.5")


def test_a_closed_scorer_takes_nothing_and_lets_nobody_wait(spec):
    with Scorer([spec("slow")], workers=1) as scorer:
        ((_, busy),) = scorer.submit(group(text="30")).parts
        while not busy.running():
            time.sleep(0.01)
        ((_, cancelled),) = scorer.submit(group()).parts
    with pytest.raises(RuntimeError, match="closed"):
        scorer.submit(group())
    assert wait([busy, cancelled], 5).not_done == set()


def test_without_rewards_there_are_no_workers():
    with Scorer([]) as scorer:
        assert scorer._pools == []


def test_what_hangs_or_dies_costs_its_own_rollout_and_every_rollout_is_scored_once(noting):
    reward, calls = noting
    texts = ["0.5", "hang", "1.5", "exit", "SIGKILL", "2.5", "SIGSEGV", "none"]
    failures = Failures(bounded=False)
    with Scorer([reward("one", timeout_s=0.7)], workers=1) as scorer:
        first, second = scorer.submit(group(texts=texts), failures), scorer.submit(group(text="3", prompt_id="p2"))
        scored = first.result(60)
        assert second.result(60).rewards.tolist() == [3, 3, 3]
    assert scored.rewards.tolist() == [0.5, 0, 1.5, 0, 0, 2.5, 0, 0]
    assert scored.valid.tolist() == [True, False, True, False, False, True, False, False]
    assert Counter(calls()) == Counter([f"p1/{i}" for i in range(8)] + [f"p2/{i}" for i in range(3)])
    causes = {failure.rollout.index: failure.cause for failure in failures.since(0)}
    assert causes == {
        1: "did not answer within 0.7 s; its worker was killed",
        3: "ended its worker (exit code 7)",
        4: "ended its worker (signal SIGKILL)",
        6: "ended its worker (signal SIGSEGV)",
    }


def test_what_raises_stops_the_run_or_is_skipped_and_counted_but_no_score_is_an_error_always(noting):
    reward, calls = noting
    texts = ["1", "raise", "2"]
    with pytest.raises(RewardError, match="raised ValueError: no such colour") as caught:
        score(reward("one"), of=group(texts=texts))
    assert "prompt 'p1', rollout 1, which asks" in str(caught.value) and "Traceback" in caught.value.details
    assert calls() == ["p1/0", "p1/1"]
    failures = Failures(bounded=False)
    with Scorer([reward("one", on_error="skip")], workers=1) as scorer:
        scored = scorer.submit(group(texts=texts), failures).result(60)
        assert scored.valid.tolist() == [True, False, True] and scored.rewards.tolist() == [1, 0, 2]
        (failure,) = failures.since(0)
        assert failure.rollout.index == 1 and "raised ValueError: no such colour at " in failure.cause
        assert "Traceback" in failure.details
        with pytest.raises(RewardError, match=r"answered nan[^$]*rollout 2"):
            scorer.submit(group(texts=["1", "2", "nan"]), failures).result(60)


def test_async_rollouts_are_scored_side_by_side_each_with_its_own_deadline(noting):
    reward, calls = noting
    failures = Failures(bounded=False)
    with Scorer([reward("side", timeout_s=1.0, on_error="skip")], workers=1) as scorer:
        texts = ["0", "wait", "0", "raise", "0"]
        scored = scorer.submit(group(texts=texts), failures).result(60)
        assert scored.components["side"][[0, 2, 4]].tolist() == [5, 5, 5]  # at once
        assert scored.valid.tolist() == [True, False, True, False, True]
        assert len(calls()) == 5
        causes = {failure.rollout.index: failure.cause for failure in failures.since(0)}
        assert causes[1] == "did not answer within 1 s" and "raised ValueError" in causes[3]
        # One that holds the others up is a call that hangs.
        assert not scorer.submit(group(texts=["0", "hang"]), failures).result(60).valid[1]


def test_a_function_may_be_async(spec):
    assert score(spec("later")).rewards.tolist() == [0, 2, 4]
    assert score(spec("later", factor=3.0)).rewards.tolist() == [0, 3, 6]


@pytest.mark.full
def test_waiting_groups_share_a_call_keep_their_order_and_add_up_their_deadlines(noting):
    reward, calls = noting
    with Scorer([reward("many", timeout_s=0.6)], workers=1) as scorer:
        scorings = [scorer.submit(group(num=2, prompt_id=str(i))) for i in range(7)]
        for i, scoring in enumerate(scorings):
            assert scoring.result(60).rewards.tolist() == [100 * i, 100 * i + 1]
    sizes = [len(line.split()) for line in calls()]
    assert sum(sizes) == 14 and max(sizes) == 6 and len(sizes) < 7


@pytest.mark.usefixtures("noting")
def test_a_reward_with_workers_has_processes_of_its_own(spec):
    with Scorer([own := RewardSpec(name="own"), shared := spec("pid")], workers=1) as scorer:
        scored = [scorer.submit(group()).result(60) for _ in range(3)]
    own_pids, shared_pids = ({each.components[s.metric][0] for each in scored} for s in (own, shared))
    assert len(own_pids) == len(shared_pids) == 1 and own_pids != shared_pids
    with Scorer([RewardSpec(name="own", workers=2)]) as scorer:
        assert len({pid for _ in range(40) for pid in [scorer.submit(group()).result(60).rewards[0]]}) <= 2
        ((_, pool),) = scorer._pools
        assert len(pool._threads) == 2


@pytest.mark.full
def test_workers_that_grow_are_replaced(spec):
    with Scorer([spec("leaks")], workers=1, max_growth_bytes=2**26) as scorer:  # 32 MB a call
        pids = [scorer.submit(group(1)).result(60).rewards[0] for _ in range(7)]
    runs = Counter(pids)
    assert len(runs) >= 2 and max(runs.values()) <= 4
    with Scorer([spec("leaks")], workers=1) as scorer:
        assert len({scorer.submit(group(1)).result(60).rewards[0] for _ in range(7)}) == 1


@pytest.mark.usefixtures("noting")
def test_random_numbers_are_a_matter_of_the_rollout_wherever_it_is_scored():
    def draw(ids):
        with Scorer([RewardSpec(name="draws")], workers=1) as scorer:
            return {name: scorer.submit(group(prompt_id=name)).result(60).rewards.tolist() for name in ids}

    assert (drawn := draw("abc")) == draw("cab")
    assert len({value for values in drawn.values() for value in values}) == 9


def test_more_than_five_percent_of_a_step_stop_it_at_once_and_the_rest_is_not_tried(noting):
    reward, calls = noting
    failures = Failures()
    failures.expect(100)
    with Scorer([reward("one", on_error="skip")], workers=1) as scorer:
        five = scorer.submit(group(texts=["raise"] * 5 + ["1"]), failures)
        assert five.result(60).valid.sum() == 1
        tried, stuck = len(calls()), scorer.submit(group(prompt_id="p2", texts=["raise", "2", "3"]), failures)
        waiting = scorer.submit(group(prompt_id="p3", texts=["4"] * 5), failures)
        for scoring in (stuck, waiting):
            with pytest.raises(RewardError) as caught:
                scoring.result(60)
        assert len(calls()) <= tried + 3
        message = str(caught.value)
        assert "failed on 6 of the step's 100 rollouts: reward 'one' on 6" in message
        assert "raised ValueError: no such colour" in message and "prompt 'p2', rollout 0" in message
        with pytest.raises(RewardError):
            scorer.submit(group(texts=["5"]), failures)
        assert scorer.submit(group(texts=["5"]), Failures()).result(60).rewards.tolist() == [5]  # another step
    assert failures.fractions(["one", "two"]) == {"one": 0.06, "two": 0.0}


def test_a_step_with_too_many_failures_does_not_wait_for_what_still_hangs(noting):
    reward, _ = noting
    failures = Failures()
    failures.expect(20)
    with Scorer([reward("one", timeout_s=50.0, on_error="skip")], workers=2) as scorer:
        start = time.monotonic()
        hung = scorer.submit(group(texts=["hang"]), failures)
        scorer.submit(group(texts=["raise", "exit"]), failures)
        with pytest.raises(RewardError, match="on 2; the last one, 'one', ended its worker"):
            hung.result(40)
        assert time.monotonic() - start < 30


def test_rewards_score_the_rows_of_their_sources(spec):
    shapes = spec("length", label="right", sources=["shapes"])
    charts = spec("booleans", label="right", sources=["charts", "plots"])
    everywhere, plots = spec("numpy_values", label="place", weight=2.0), spec("some", sources=["plots"])
    with Scorer([shapes, charts, everywhere, plots], workers=1) as scorer:
        by_source = {
            name: scorer.submit(group(source=name)).result(60) for name in ("shapes", "charts", "plots", "other")
        }
    assert list(by_source["shapes"].components) == ["right", "place", "some"]
    assert by_source["shapes"].rewards.tolist() == [3, 5, 7] and by_source["shapes"].valid.all()
    assert by_source["charts"].rewards.tolist() == [1, 3, 4]
    assert np.isnan(by_source["charts"].components["some"]).all() and by_source["charts"].valid.all()
    assert by_source["plots"].valid.tolist() == [True, False, True]
    assert by_source["plots"].rewards.tolist() == [2, 0, 5]
    assert np.isnan(by_source["other"].components["right"]).all()
    assert by_source["other"].rewards.tolist() == [0, 2, 4]


def test_a_row_that_no_reward_scores_is_an_error_with_all_sources(spec):
    with (
        Scorer([spec("length", sources=["shapes"]), spec("some", sources=["charts", "plots"])], workers=1) as scorer,
        pytest.raises(ConfigError) as caught,
    ):
        scorer.submit(group(source="chart"))
    for part in ("source 'chart'", "length: shapes", "some: charts, plots", "prompt 'p1'"):
        assert part in str(caught.value)


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
import test_scoring
from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import ConfigError, PluginError
from mmrl.rollout.rewards.scorer import Scorer
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
    deadline = time.monotonic() + 30
    while is_alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(worker)
    parent.stdout.close()
