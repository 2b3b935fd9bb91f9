import hashlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.engine_api import EAGER, SamplingRequest
from mmrl.rollout.episodes import player as players
from mmrl.rollout.episodes.failures import EpisodeError
from mmrl.rollout.episodes.observations import ReceivedObservation
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.system.clock import Clock
from mmrl.types import ENVIRONMENT, Message, Prompt, RawImage
from tests import scripted_sampler as steps
from tests.rollout.episodes.fakes import LetterEncoder, ScriptedSampler, media, without_clock


@pytest.fixture(scope="module")
def pool(game):
    with EnvironmentPool(game()) as found:
        yield found


@pytest.fixture(scope="module")
def pictured(game):
    """An environment that begins with texts and an image."""
    first = "['see ', np.full((2, 2), 9, np.uint8), ' not <image>']"
    with EnvironmentPool(game(first=first)) as found:
        yield found


class Play:
    """One round of episodes, and what it told."""

    def __init__(
        self, pool, folder, *, turns, prompts=("p0",), group=1, max_new_tokens=200, temperature=1.0, images=(), **limits
    ):
        """``turns``: what is written in turn k of each episode, or a function of a request."""
        script = turns if callable(turns) else lambda request: turns[len(request.segments) // 2]
        self.sampler, self.events, self.clock = ScriptedSampler(script), [], Clock()
        spec = EnvironmentSpec(name="game", **limits)
        encoder = LetterEncoder(store := media(folder))
        player = EpisodePlayer(spec, max_new_tokens, ("length",), pool, encoder, store)
        self.tally = player.tally()
        raws = tuple(RawImage(data, "x") for data in images)
        rows = [Prompt(name, (Message("user", "<image>" * len(raws) + "go"),), raws) for name in prompts]
        requests = [
            SamplingRequest(encoder.encode(row), group, temperature, max_new_tokens, 1000 * i)
            for i, row in enumerate(rows)
        ]

        def event(kind, **fields):
            self.events.append((kind, fields))

        self.order = []
        self.groups = {}
        for index, found in player.play(self.sampler, requests, range(len(rows)), self.tally, self.clock, event):
            self.order.append(index)
            self.groups[index] = found

    @property
    def rollout(self):
        (found,) = self.groups[0].rollouts
        return found


def test_an_episode_is_its_turns_and_what_was_inserted_between_them(pool, tmp_path):
    play = Play(pool, tmp_path, turns=["pay 2", "use x", "end"], max_turns=5, latency_steps=3)
    found = play.rollout
    assert (found.finish_reason, found.text, found.turns, found.truncated) == (
        "environment", "end", ("pay 2", "use x", "end"), False,
    )  # fmt: skip
    assert "".join(map(chr, found.token_ids)) == "pay 2\0paid>use x\0USE X>end\0"
    assert found.mask.tolist() == [True] * 6 + [False] * 5 + [True] * 6 + [False] * 6 + [True] * 4
    assert [(s.by_policy, s.role, s.finish_reason) for s in found.segments] == [
        (True, "assistant", "stop"), (False, "tool", None), (True, "assistant", "stop"), (False, "tool", None),
        (True, "assistant", "stop"),
    ]  # fmt: skip
    assert found.components == {ENVIRONMENT: 3.0, "length": 13.0}
    assert [(p.content, p.reward, p.done) for p in found.episode] == [
        (("paid",), 2.0, False), (("USE X",), 0.0, False), (("bye",), 1.0, True),
    ]  # fmt: skip
    assert [len(p.turn.calls) for p in found.episode] == [0, 1, 0]
    assert [p.turn.tokens_left for p in found.episode] == [194, 188, 184]
    # 6 tokens, then 3 steps of latency, of which nothing else makes use: the count jumps.
    assert [(p.began, p.finished) for p in found.episode] == [(0, 6), (9, 15), (18, 22)]
    assert [request.answered_after for request in play.sampler.requests] == [3, 3, 3]
    assert len({request.seed for request in play.sampler.requests}) == 3
    assert play.tally.made == 5 and play.tally.possible == 0  # reset, 3 turns, score
    assert play.sampler.dropped == 0 and not play.events


@pytest.mark.parametrize(
    ("limits", "turns", "reason", "written"),
    [
        # The last turn is answered, and its answer is not read.
        ({"max_turns": 2}, ["ab", "cd", "no"], "turns", "ab\0AB>cd\0"),
        # A turn that is cut is answered; its end is inserted with the answer.
        ({"max_turn_tokens": 2, "max_new_tokens": 4}, ["abcd", "end"], "length", "ab\0AB>en"),
        # The policy's last token is the end of its turn, so that the turn is answered.
        ({"max_new_tokens": 3}, ["ab", "no"], "length", "ab\0"),
        # It is cut at the policy's last token: nobody is asked.
        ({"max_new_tokens": 5}, ["ab", "cd"], "length", "ab\0AB>cd"),
        ({"max_observation_tokens": 5}, ["pay 0", "abcdef", "no"], "budget", "pay 0\0paid>abcdef\0"),
        # Nothing is left for the policy after the second answer (3 + 3 + 3 of 9 tokens), then one token is.
        ({"max_tokens": 9}, ["ab", "ab"], "budget", "ab\0AB>ab\0"),
        ({"max_tokens": 10}, ["ab", "ab", "e"], "budget", "ab\0AB>ab\0"),
        # The turn itself takes all that is left.
        ({"max_tokens": 8}, ["ab", "cd"], "budget", "ab\0AB>cd"),
        ({"max_images": 1}, ["show np.full((2, 2), 1, np.uint8)"] * 3, "budget", None),
        ({"max_images": 0}, ["show np.full((2, 2), 1, np.uint8)"] * 2, "budget", None),
    ],
)
def test_each_limit_ends_an_episode_and_admits_nothing_beyond_it(pool, tmp_path, limits, turns, reason, written):
    found = Play(pool, tmp_path, turns=turns, **limits).rollout
    assert found.finish_reason == reason
    assert found.truncated
    if written is None:
        admitted = limits["max_images"]
        assert len(found.all_images) == admitted
        assert found.token_ids.tolist().count(1) == 4 * admitted
        assert len(found.episode) == admitted + 1
        assert found.episode[-1].content is not None  # is in the records all the same
    else:
        assert "".join(map(chr, found.token_ids)) == written
    assert found.segments[-1].by_policy


def test_a_cut_turn_tells_the_environment_so(pool, tmp_path):
    found = Play(pool, tmp_path, turns=["abcd", "end"], max_turn_tokens=3, max_turns=2).rollout
    assert [p.turn.finish_reason for p in found.episode] == ["length", "length"]
    assert [s.finish_reason for s in found.segments if s.by_policy] == ["length", "length"]
    assert "".join(map(chr, found.token_ids)) == "abc\0ABC>end"
    assert [p.turn.tokens_left for p in found.episode] == [200 - 3, 200 - 6]
    assert found.components[ENVIRONMENT] == 1.0


def test_an_environment_is_told_of_the_nearest_limit_of_tokens(pool, tmp_path):
    """A turn of 3 leaves 17 of 20 tokens after the prompt; the answer takes 3 and the next turn 4, which leave 10."""
    found = Play(pool, tmp_path, turns=["ab", "end"], max_tokens=20).rollout
    assert [p.turn.tokens_left for p in found.episode] == [20 - 3, 20 - 3 - 3 - 4]
    short = Play(pool, tmp_path, turns=["ab", "cd"], max_tokens=8).rollout
    assert [p.turn.tokens_left for p in short.episode] == [8 - 3, 0]
    assert Play(pool, tmp_path, turns=["ab", "cd"], max_new_tokens=5).rollout.episode[-1].turn.tokens_left == 0


def test_the_first_observation_ends_the_prompt_for_the_whole_group(pictured, tmp_path):
    white = Play(pictured, tmp_path, turns=["end"], group=3, images=[png(255)])
    (group,) = white.groups.values()
    prompt = group.prompt
    assert all(rollout.prompt is prompt for rollout in group.rollouts)
    assert prompt.prompt.messages[-1].content == "<image>go\nsee <image> not <\u200bimage>"
    assert prompt.prompt.images == () and len(prompt.images) == 2
    assert prompt.token_ids.tolist().count(1) == 8
    assert all(request.prompt is prompt for request in white.sampler.requests)
    short = Play(pictured, tmp_path, turns=["ab", "ab", "no"], max_tokens=4 + 1 + 4 + 13 + 9, images=[png(255)])
    assert short.rollout.finish_reason == "budget"
    with pytest.raises(
        EpisodeError, match=r"answered reset with \d+ where environment.max_observation_tokens allows 8"
    ):
        Play(pictured, tmp_path, turns=["end"], max_observation_tokens=8)


def png(value):
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (2, 2), value).save(file, "PNG")
    return file.getvalue()


def test_members_that_begin_otherwise_have_failed(game, tmp_path):
    with EnvironmentPool(game(first="other each time")) as pool, pytest.raises(EpisodeError, match="began otherwise"):
        Play(pool, tmp_path, turns=["end"], group=3)
    with EnvironmentPool(game(first="random")) as pool:
        play = Play(pool, tmp_path, turns=["end"], group=3, prompts=("p0", "p1"))
        texts = {group.prompt.prompt.messages[-1].content for group in play.groups.values()}
        assert len(texts) == 2  # the seeds of the groups differ


def test_an_episode_whose_environment_fails_is_kept_and_is_invalid(pool, tmp_path):
    def script(request):
        return ["hello", "raise_it" if request.seed in bad else "end"][len(request.segments) // 2]

    bad = set()
    plain = Play(pool, tmp_path, turns=script, group=40)
    bad.add(plain.sampler.requests[40 + 7].seed)
    play = Play(pool, tmp_path, turns=script, group=40)
    (group,) = play.groups.values()
    (failed,) = [rollout for rollout in group.rollouts if rollout.failure]
    assert failed.finish_reason == "failed" and not failed.truncated
    assert "KeyError" in failed.failure
    assert failed.components == {ENVIRONMENT: None, "length": None}
    assert "".join(map(chr, failed.token_ids)) == "hello\0HELLO>raise_it\0"
    assert [p.content for p in failed.episode] == [("HELLO",), None]
    ((kind, fields),) = play.events
    assert kind == "environment_failed"
    assert (fields["prompt"], fields["member"], fields["turn"]) == ("p0", failed.index, 1)
    assert play.tally.failed == 1 and play.tally.made == 40 * 4 - 1  # it is not scored
    with pytest.raises(EpisodeError, match=r"failed in \d+ of the step's \d+ calls"):
        Play(pool, tmp_path, turns=["raise_it"], group=4)


def test_a_failure_of_close_is_an_event_and_costs_no_episode(pool, tmp_path):
    spoiled = Play(pool, tmp_path, turns=["spoil", "end"], group=3)
    (group,) = spoiled.groups.values()
    assert not any(rollout.failure for rollout in group.rollouts) and spoiled.tally.failed == 0
    session = pool.open(Prompt("after", (Message("user", "play"),)), 1)
    session.opened.result(60)  # after the calls of close
    session.close()
    later = Play(pool, tmp_path, turns=["end"])
    events = [fields for kind, fields in (*spoiled.events, *later.events) if kind == "environment_failed"]
    assert sum(int(each["message"].split(" failed in ")[1].split()[0]) for each in events) == 3
    assert "calls of close, in which no episode is lost; the last time, it raised ValueError" in events[0]["message"]


class TimedPool:
    """Ends each episode with its first turn, after so many seconds; without a process."""

    seconds = 0.0

    def __init__(self, takes_s):
        self.takes_s, self.opened = takes_s, Future()
        self.opened.set_result(ReceivedObservation())

    def open(self, prompt, seed):
        return self

    def step(self, turn):
        answered = Future()
        if self.takes_s:
            threading.Timer(self.takes_s, answered.set_result, [ReceivedObservation(done=True)]).start()
        else:
            answered.set_result(ReceivedObservation(done=True))
        return answered

    def close(self):
        pass

    def take_close_failures(self):
        return []


def begins_of_two_rounds(folder, takes_s):
    """The engine steps at which the only turn of each round begins, as episodes record them."""
    sampler = steps.ScriptedSampler(lambda request: [7, 8])
    encoder = LetterEncoder(store := media(folder))
    spec = EnvironmentSpec(name="game", latency_steps=8)
    player = EpisodePlayer(spec, 20, (), TimedPool(takes_s), encoder, store)
    begins = []
    for name in ("p0", "p1"):
        request = SamplingRequest(encoder.encode(Prompt(name, (Message("user", "go"),))), 1, 1.0, 20, 0)
        ((_, group),) = player.play(sampler, [request], [0], player.tally(), Clock(), lambda *news, **fields: None)
        begins += [played.began for rollout in group.rollouts for played in rollout.episode]
    return begins


def test_a_later_round_begins_at_the_same_step_whether_the_last_answer_was_waited_for_or_not(tmp_path):
    """The turn takes steps 0 and 1, and its answer is due 8 steps after the second."""
    assert begins_of_two_rounds(tmp_path, 0.0) == begins_of_two_rounds(tmp_path, 0.1) == [0, 1 + 8]


class Timeline:
    """Calls that take seconds of a clock that only waiting moves: 5 for a reset, 2 for a turn, 3 for the score."""

    seconds = 0.0

    def __init__(self):
        self.now, self.due = 0.0, {}

    def open(self, prompt, seed):
        self.opened = self.call(5.0, ReceivedObservation())
        return self

    def step(self, turn):
        return self.call(2.0, ReceivedObservation(done=turn.index == 1))

    def score(self):
        return self.call(3.0, {"length": 1.0})

    def close(self):
        pass

    def take_close_failures(self):
        return []

    def call(self, takes_s, answer):
        future = Future()
        self.due[future] = self.now + takes_s, answer
        return future

    def wait(self, futures, timeout=None, return_when="ALL_COMPLETED"):
        ends = [self.due[future][0] for future in futures if future in self.due]
        end = min(ends) if return_when == "FIRST_COMPLETED" else max(ends)
        self.now = end if timeout is None else min(end, self.now + timeout)
        for future in [future for future, (due, _) in self.due.items() if due <= self.now]:
            future.set_result(self.due.pop(future)[1])


def test_the_time_that_the_sampler_waits_is_that_of_answers_to_turns_alone(tmp_path, monkeypatch):
    timeline, clock = Timeline(), Clock()
    monkeypatch.setattr(players, "wait", timeline.wait)
    monkeypatch.setattr(players, "time", SimpleNamespace(perf_counter=lambda: timeline.now))
    encoder = LetterEncoder(store := media(tmp_path))
    player = EpisodePlayer(EnvironmentSpec(name="game"), 20, ("length",), timeline, encoder, store)
    request = SamplingRequest(encoder.encode(Prompt("p0", (Message("user", "go"),))), 1, 1.0, 20, 0)
    sampler = ScriptedSampler(lambda request: "ab")
    ((_, group),) = player.play(sampler, [request], [0], player.tally(), clock, lambda *news, **fields: None)
    assert len(group.rollouts[0].episode) == 2 and timeline.now == pytest.approx(5 + 2 + 2 + 3)
    assert clock.metrics(1)["perf/environment_wait_s"] == pytest.approx(2 + 2)


def many(request):
    """Turns of various lengths, by the seed of the request alone."""
    digest = hashlib.sha256(str(request.seed).encode()).digest()
    return "end" if digest[0] < 60 else "abcdefghijklmnop"[: 1 + digest[1] % 12]


@pytest.mark.parametrize("scheduling", ["reproducible", "eager"])
def test_nothing_depends_on_the_time_that_environments_take(game, tmp_path, scheduling):
    options = {"turns": many, "prompts": tuple(f"p{i}" for i in range(6)), "group": 4, "max_turns": 6}
    found = []
    for naps, workers in ((False, 1), (True, 3), (True, 2)):
        with EnvironmentPool(game(naps=naps, workers=workers)) as pool:
            found.append(Play(pool, tmp_path, latency_steps=4, scheduling=scheduling, **options))
    first, *others = found
    assert sum(len(r.episode) for group in first.groups.values() for r in group.rollouts) > 60
    for play in others:
        assert play.groups.keys() == first.groups.keys()
        if scheduling == "reproducible":
            assert play.sampler.admitted == first.sampler.admitted
            for index, group in play.groups.items():
                assert without_clock(group) == without_clock(first.groups[index])
        else:
            assert {request.answered_after for request in play.sampler.requests} == {EAGER}
            for index, group in play.groups.items():
                tokens = [rollout.token_ids.tolist() for rollout in group.rollouts]
                assert tokens == [rollout.token_ids.tolist() for rollout in first.groups[index].rollouts]


def test_members_differ_in_their_seeds_and_share_that_of_the_environment(pool, tmp_path):
    play = Play(pool, tmp_path, turns=["dice", "end"], group=4)
    (group,) = play.groups.values()
    assert len({rollout.episode[0].content for rollout in group.rollouts}) == 1
    assert len({request.seed for request in play.sampler.requests}) == 8
    assert np.isclose(group.rollouts[0].sampler_logprobs[0], -1.003, atol=1e-3)


def test_what_goes_wrong_elsewhere_drops_requests_and_closes_episodes(pool, tmp_path):
    def script(request):
        if request.segments:
            raise ZeroDivisionError
        return "hello"

    before = [lane.num_sessions for lane in pool._lanes]
    with pytest.raises(ZeroDivisionError):
        Play(pool, tmp_path, turns=script, group=2)
    assert [lane.num_sessions for lane in pool._lanes] == before


def test_calls_that_a_failed_round_has_not_begun_do_not_hold_up_the_next_one(pool, tmp_path):
    """The only worker is busy with the second episode's call when the first one's next turn fails."""
    turns = {"p0": "hello", "p1": "sleep 0.5", "p2": f"write {tmp_path}/stale"}

    def script(request):
        if request.segments:
            raise ZeroDivisionError
        return turns[request.prompt.id]

    with pytest.raises(ZeroDivisionError):
        Play(pool, tmp_path, turns=script, prompts=tuple(turns), latency_steps=200)
    session = pool.open(Prompt("next", (Message("user", "go"),)), 0)
    session.opened.result(timeout=20)
    assert not (tmp_path / "stale").exists()
    session.close()
