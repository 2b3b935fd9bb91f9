"""Episodes that go on from others of their group: on the admissions of a real sampler, with a real environment."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.config.plugin_specs import EnvironmentSpec
from mmrl.data.order import request_seed
from mmrl.engine_api import SamplingRequest
from mmrl.errors import PluginError
from mmrl.interfaces import Branches, Needs
from mmrl.ops.branching import generator, places
from mmrl.rollout.batch import branches_of
from mmrl.rollout.episodes.branching import Branching
from mmrl.rollout.episodes.player import EpisodePlayer
from mmrl.rollout.episodes.pool import EnvironmentPool
from mmrl.system.clock import Clock
from mmrl.types import ENVIRONMENT, Branch, Message, Prompt
from tests.rollout.episodes.fakes import END, LetterEncoder, media, without_clock
from tests.scripted_sampler import ScriptedSampler

PICTURE = "show np.full((2, 2), {}, np.uint8)"


@pytest.fixture(scope="module")
def pool(game):
    with EnvironmentPool(game()) as found:
        yield found


class Chooser:
    """An algorithm that says where episodes branch."""

    def __init__(self, branches, choose):
        self.branches, self.choose, self.asked = branches, choose, []

    def needs(self):
        return Needs(branches=self.branches)

    def branch(self, group, number):
        self.asked.append(([(each.index, len(each.episode), dict(each.components)) for each in group], number))
        return self.choose(group, number)


class Tree:
    """One round of groups, a part of whose episodes go on from others.

    Args:
        write: The text of each turn, by member and turn, or a function of a request.
        choose: As ``Algorithm.branch``.
    """

    def __init__(
        self, pool, folder, write, choose, *, branches, prompts=("p0",), group=4, components=("length",),
        max_new_tokens=200, greedy=(), **limits,
    ):  # fmt: skip
        if not callable(write):
            texts = {request_seed(0, *place[:1], "p0", *place[1:]): text for place, text in write.items()}
            write = lambda request: texts[request.seed]  # noqa: E731
        self.sampler = ScriptedSampler(
            lambda request: [*map(ord, write(request)), END], lambda ids: "".join(chr(i) for i in ids if i != END)
        )
        spec = EnvironmentSpec(name="game", **limits)
        encoder = LetterEncoder(store := media(folder))
        player = EpisodePlayer(spec, max_new_tokens, components, pool, encoder, store)
        rows = [Prompt(name, (Message("user", "go"),)) for name in prompts]
        requests = [
            SamplingRequest(encoder.encode(row), group, 1.0, max_new_tokens, 1000 * i) for i, row in enumerate(rows)
        ]
        requests += [SamplingRequest(encoder.encode(Prompt(name, rows[0].messages)), 1, 0.0, 20, 1) for name in greedy]
        self.tally, self.events, self.algorithm = player.tally(), [], Chooser(branches, choose)
        seeds = [request.seed for request in requests]
        event = lambda kind, **fields: self.events.append((kind, fields))  # noqa: E731
        branching = Branching.of(self.algorithm, len(rows))
        played = player.play(self.sampler, requests, seeds, self.tally, Clock(), event, branching)
        self.groups = dict(sorted(played))

    @property
    def rollouts(self):
        return self.groups[0].rollouts


def text_of(rollout):
    return "".join(map(chr, rollout.token_ids))


WRITTEN = {
    (0, 0): "pay 2", (0, 1): PICTURE.format(7), (0, 2): "end",
    (1, 0): "abc", (1, 1): "end",
    (2, 2): "pay 1", (2, 3): "end",
    (3, 3): "pay 5", (3, 4): "end",
}  # fmt: skip


def two_rounds(group, number):
    """The first branch leaves episode 0 before its turn 2, the second leaves that branch before its turn 3."""
    return [Branch(0, 2)] * number if len(group) == 2 else [Branch(2, 3)] * number


def test_an_episode_has_all_that_came_before_its_branch_and_turns_of_its_own_after_it(pool, tmp_path):
    tree = Tree(pool, tmp_path, WRITTEN, two_rounds, branches=Branches(2, 1), max_turns=6, latency_steps=3)
    first, second, third, fourth = tree.rollouts
    assert [each.index for each in tree.rollouts] == [0, 1, 2, 3]
    assert [each.branch for each in tree.rollouts] == [None, None, Branch(0, 2), Branch(2, 3)]
    begun = text_of(first).removesuffix("end\0")
    assert text_of(third) == begun + "pay 1\0paid>end\0"
    assert text_of(fourth) == begun + "pay 1\0paid>pay 5\0paid>end\0"
    assert (third.num_shared, fourth.num_shared) == (len(begun), len(begun + "pay 1\0paid>"))
    assert [each.turns for each in (second, third, fourth)] == [
        ("abc", "end"), ("pay 2", PICTURE.format(7), "pay 1", "end"),
        ("pay 2", PICTURE.format(7), "pay 1", "pay 5", "end"),
    ]  # fmt: skip
    # All that is shared is what the parent has: segments with log-probs, versions and images, turns with answers.
    assert third.segments[:4] == first.segments[:4] and fourth.segments[:6] == third.segments[:6]
    assert third.episode[:2] == first.episode[:2] and fourth.episode[:3] == third.episode[:3]
    assert third.all_images == first.all_images == fourth.all_images and len(first.all_images) == 1
    assert [each.turn.index for each in fourth.episode] == [0, 1, 2, 3, 4]
    # The components are those of whole episodes, from an environment that has seen all of their turns.
    assert [each.components[ENVIRONMENT] for each in tree.rollouts] == [3.0, 1.0, 4.0, 9.0]
    assert [each.components["length"] for each in tree.rollouts] == [len("".join(each.turns)) for each in tree.rollouts]
    assert tree.algorithm.asked == [
        ([(0, 3, first.components), (1, 2, second.components)], 1),
        ([(0, 3, first.components), (1, 2, second.components), (2, 4, third.components)], 1),
    ]
    rows = branches_of([tree.rollouts, tree.rollouts])
    assert rows.parents.tolist() == [-1, -1, 0, 2, -1, -1, 4, 6]
    assert rows.shared_tokens.tolist() == [0, 0, third.num_shared, fourth.num_shared] * 2


def test_only_what_is_new_is_sampled_and_asked(pool, tmp_path):
    tree = Tree(pool, tmp_path, WRITTEN, two_rounds, branches=Branches(2, 1), max_turns=6, latency_steps=3)
    requests = tree.sampler.requests
    assert sorted(request.seed for request in requests) == sorted(request_seed(0, m, "p0", k) for m, k in WRITTEN)
    continued = next(request for request in requests if request.seed == request_seed(0, 2, "p0", 2))
    assert continued.segments == tree.rollouts[0].segments[:4]
    assert continued.images == tree.rollouts[0].all_images
    # resets, turns and scores of two whole episodes; of the branches two turns each, and the score
    assert tree.tally.made == (1 + 3 + 1) + (1 + 2 + 1) + (2 + 1) * 2
    assert (tree.tally.failed, tree.tally.possible, tree.events) == (0, 0, [])


def test_the_limits_of_an_episode_count_what_it_shares(pool, tmp_path):
    written = {(0, 0): "ab", (0, 1): "cd", (0, 2): "ef", (1, 1): "gh", (1, 2): "no", (1, 3): "no"}
    here = lambda group, number: [Branch(0, 1)]  # noqa: E731
    make = lambda **limits: Tree(pool, tmp_path, written, here, branches=Branches(1, 1), group=2, **limits).rollouts  # noqa: E731
    first, second = make(max_turns=3)
    assert (first.finish_reason, second.finish_reason) == ("turns", "turns")
    assert text_of(second) == "ab\0AB>gh\0GH>no\0" and len(second.episode) == 3
    assert [played.turn.tokens_left for played in second.episode] == [197, 194, 191]
    first, second = make(max_turns=9, max_new_tokens=8)
    assert text_of(second) == "ab\0AB>gh\0GH>no" and second.finish_reason == "length"
    first, second = make(max_turns=9, max_tokens=13)
    assert text_of(second) == "ab\0AB>gh\0GH>n" and second.finish_reason == "budget"
    images = {(0, 0): PICTURE.format(1), (0, 1): "end", (1, 1): PICTURE.format(2)}
    first, second = Tree(pool, tmp_path, images, here, branches=Branches(1, 1), group=2, max_images=1).rollouts
    assert second.finish_reason == "budget" and second.all_images == first.all_images


def test_a_branch_before_the_first_turn_shares_the_prompt_alone(game, tmp_path):
    written = {(0, 0): "end", (1, 0): "pay 2", (1, 1): "end"}
    here = lambda group, number: [Branch(0, 0)]  # noqa: E731
    with EnvironmentPool(game(first="['see', np.full((2, 2), 9, np.uint8)]")) as pool:
        first, second = Tree(pool, tmp_path, written, here, branches=Branches(), group=2).rollouts
    assert second.num_shared == 0 and second.branch == Branch(0, 0) and text_of(second) == "pay 2\0paid>end\0"
    assert second.prompt is first.prompt and len(second.all_images) == 1
    assert second.components == {ENVIRONMENT: 3.0, "length": 8.0}


def test_a_branch_begins_anew_also_at_a_member_that_never_began(game, tmp_path):
    """One of the first two resets fails: the one that finds no mark."""
    once = "(lambda mark: 1 / 0 if not mark.exists() and not mark.touch() else 'go')"
    first = f"['see', {once}(Path(self.config.marks) / 'm')]"
    failing = lambda group: next(each.index for each in group if each.failure)  # noqa: E731
    here = lambda group, number: [Branch(failing(group), 0)] * number  # noqa: E731
    write = lambda request: "end"  # noqa: E731
    (tmp_path / "marks").mkdir()
    with EnvironmentPool(game(first=first, marks=str(tmp_path / "marks"))) as pool:
        tree = Tree(pool, tmp_path, write, here, branches=Branches(1, 2), group=40)
    failed, *_ = [each for each in tree.rollouts if each.failure]
    assert [each.branch for each in tree.rollouts[38:]] == [Branch(failed.index, 0)] * 2
    assert [each.finish_reason for each in tree.rollouts[38:]] == ["environment"] * 2 and tree.tally.failed == 1
    assert all(each.num_shared == 0 for each in tree.rollouts)


def many(request):
    """Turns of various lengths, by the seed of the request alone."""
    digest = hashlib.sha256(str(request.seed).encode()).digest()
    if not request.segments:
        return "abc"
    return "raise_it" if digest[0] < 4 else "end" if digest[0] < 60 else "abcdefghijklmnop"[: 1 + digest[1] % 12]


def anywhere(group, number):
    """Turns that are drawn from those of all episodes so far."""
    found = places(group)
    return [found[place] for place in generator(group).integers(0, len(found), number)]


def test_nothing_depends_on_the_time_that_environments_take(game, tmp_path):
    options = {"branches": Branches(2, 2), "prompts": tuple(f"p{i}" for i in range(5)), "group": 6, "max_turns": 6}
    found = []
    for naps, workers in ((False, 1), (True, 3)):
        with EnvironmentPool(game(naps=naps, workers=workers)) as pool:
            found.append(Tree(pool, tmp_path, many, anywhere, latency_steps=4, greedy=("p0",), **options))
    one, other = found
    assert one.sampler.began == other.sampler.began
    assert list(map(without_clock, one.groups.values())) == list(map(without_clock, other.groups.values()))
    places = [rollout.branch for index in range(5) for rollout in one.groups[index].rollouts[2:]]
    assert len(places) == 20 and len({branch.turn for branch in places}) > 2 and any(b.member > 1 for b in places)
    assert any(rollout.failure for group in one.groups.values() for rollout in group.rollouts)
    assert [len(one.groups[index].rollouts) for index in range(6)] == [6] * 5 + [1]  # the greedy one never branches
    assert one.tally.possible == other.tally.possible == 0


@pytest.mark.parametrize(
    ("own", "components"),
    [
        ({(8, 1): "end"}, ("length",)),
        # Its turn takes the last token, so that nobody is asked of it; its environment is looked at all the same.
        ({(8, 1): "x" * 200}, ("length",)),
        ({(8, 1): "x" * 200}, ()),
    ],
)
def test_a_branch_whose_environment_answers_otherwise_is_invalid_and_no_other_is(pool, tmp_path, own, components):
    written = {(m, 0): "show str(time.time())" if m == 0 else "abc" for m in range(8)} | {
        (m, 1): "end" for m in range(8)
    }
    written |= own | {(9, 1): "end"}
    chosen = lambda group, number: [Branch(0, 1), Branch(1, 1)]  # noqa: E731
    tree = Tree(pool, tmp_path, written, chosen, branches=Branches(1, 2), group=10, components=components)
    failed = [rollout for rollout in tree.rollouts if rollout.failure]
    assert [rollout.index for rollout in failed] == [8]
    assert failed[0].failure == "answered turn 0 differently when its episode was played again"
    assert failed[0].components[ENVIRONMENT] is None and failed[0].finish_reason == "failed"
    ((kind, fields),) = tree.events
    assert kind == "environment_failed" and (fields["member"], fields["prompt"]) == (8, "p0")
    assert (tree.tally.failed, tree.tally.possible) == (1, 0)


def test_branches_of_a_group_that_never_began_have_failed_too(game, tmp_path):
    write = lambda request: "end" if request.segments else "abc"  # noqa: E731
    last = lambda group, number: [Branch(0, 1)] * number  # noqa: E731
    with EnvironmentPool(game(first="'x' if self.prompt.id != 'p3' else 1 / 0")) as pool:
        prompts = tuple(f"p{i}" for i in range(16))
        tree = Tree(pool, tmp_path, write, last, branches=Branches(2, 1), prompts=prompts, group=4)
    assert all(rollout.failure and not rollout.token_ids.size for rollout in tree.groups[3].rollouts)
    assert "failed at every reset" in tree.groups[3].rollouts[3].failure
    assert not any(rollout.failure for index in range(16) if index != 3 for rollout in tree.groups[index].rollouts)
    assert len(tree.algorithm.asked) == 15 * 2 and (tree.tally.failed, tree.tally.possible) == (2, 0)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([], "2 episodes need one Branch each, not []"),
        ([Branch(0, 0)], "2 episodes need one Branch each"),
        ([(0, 1), (0, 0)], "need one Branch each"),
        ([Branch(0, 0), Branch(2, 0)], "there are members 0 to 1 so far, and not 2"),
        ([Branch(0, 0), Branch(-1, 0)], "and not -1"),
        ([Branch(0, 3), Branch(0, 0)], "member 0 has turns 0 to 2, and none is 3"),
        ([Branch(1, 1), Branch(0, 0)], "member 1 has no turns"),
        ([Branch(0, -1), Branch(0, 0)], "and none is -1"),
    ],
)
def test_places_that_are_not_there_are_the_algorithms_fault(answer, told):
    group = [SimpleNamespace(episode=[None] * 3), SimpleNamespace(episode=[])]
    algorithm = Chooser(Branches(1, 2), lambda group, number: answer)
    algorithm.asked = SimpleNamespace(append=lambda each: None)
    algorithm.branch = lambda group, number: answer
    with pytest.raises(PluginError, match="branch") as caught:
        Branching.of(algorithm, 1).chosen(group)
    assert told in str(caught.value)


def test_a_generator_follows_from_the_episodes_alone(pool, tmp_path):
    tree = Tree(pool, tmp_path, WRITTEN, two_rounds, branches=Branches(2, 1), max_turns=6)
    draw = lambda group: generator(group).integers(0, 2**40).item()  # noqa: E731
    assert draw(tree.rollouts) == draw(tree.rollouts) != draw(tree.rollouts[:3])
    other = Tree(pool, tmp_path, {**WRITTEN, (1, 0): "abd"}, two_rounds, branches=Branches(2, 1), max_turns=6)
    assert np.unique([draw(tree.rollouts), draw(other.rollouts), draw(other.rollouts[:2])]).size == 3
