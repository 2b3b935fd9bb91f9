"""Whole runs of algorithms that ask for hooks, with the fake engine: cut anywhere, replayed, and shown."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.rollout.records import read_lines, recorded_steps
from mmrl.viewer.folder import ViewedRun
from mmrl.viewer.groups import group_document
from tests.faults.comparison import compare, metrics
from tests.faults.kill_sweep import SLOW_TOOLS
from tests.faults.runs import Runs

HOOKS = Path(__file__).with_name("hooks.py")
SHORT = {"group_size": 4, "max_new_tokens": 20}
SPLIT = {"cluster": {"name": "ray", "sampler_ranks": 1, "learner_ranks": 1}}
DENSE = {"algorithm": {"name": f"{HOOKS}:Dense"}, "rewards": [{"name": f"{HOOKS}:spans", "weight": 0.5}]}


def full(*values: Any) -> Any:
    """A case of the full tier."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values: Any) -> Any:
    """A case of the slow tier: another hook has this way."""
    return pytest.param(*values, marks=pytest.mark.slow)


def cut(runs: Runs, points: Any, **sections: Any) -> Path:
    """A run that was killed at each of these points, which is that of one that was left alone."""
    assert runs.train(runs.config("whole", **sections)) == 0
    broken = runs.config("broken", **sections)
    for point, count in points:
        runs.killed(broken, point, count)
    assert runs.train(broken) == 0
    assert not compare(runs.folder / "broken", runs.folder / "whole")
    return runs.folder / "broken"


def lines(run: Path, step: int) -> list[dict[str, Any]]:
    return list(read_lines(recorded_steps(run)[step]))


@pytest.mark.parametrize(
    ("sections", "points"),
    [
        ({}, [("fake.generate", 2), ("fake.update", 2)]),
        full({**SPLIT, "trainer": {"staleness": 2, "steps": 5}}, [("fake.sample", 6), ("checkpoint.filled", 1)]),
        slow({"sampler": {"partial": {"engine_steps": 16}, "max_new_tokens": 40}}, [("fake.update", 2)]),
    ],
    ids=["plain", "behind", "in parts"],
)
def test_values_of_parts_of_texts_are_credited_recorded_replayed_and_shown(
    fake_runs: Runs, sections: dict[str, Any], points: Any
) -> None:
    run = cut(fake_runs, points, **DENSE, **sections)
    assert fake_runs.replay(run) == 0
    for step in (1, 3):
        found = lines(run, step)
        for record in found:
            # The fake engine's letters are not the tokenizer's, so that every part ends with the last token.
            values, text = record["token_rewards"], record["completion"]
            worth = 0.5 * (ord(text[0]) - 100.0 + 1) if text else 0.0
            assert values == [0.0] * (len(values) - 1) + [worth] and len(values) == len(record["token_ids"])
        trained = [record for record in found if record["trained"]]
        assert trained and all(np.allclose(r["advantage"], sum(r["token_rewards"])) for r in trained)
        assert metrics(run)[step]["dense/sum"] == pytest.approx(sum(sum(r["token_rewards"]) for r in trained))
    member = group_document(ViewedRun(run), "step", 1, 0)["members"][0]
    assert member["tokens"]["token_reward"][-1] == pytest.approx(lines(run, 1)[0]["token_rewards"][-1], rel=1e-5)


def shown(runs: Runs, **sections: Any) -> dict[str, Any]:
    train = {"name": "table", "path": str(runs.rows), "demonstration": "written"}
    return {"algorithm": {"name": f"{HOOKS}:Shown"}, "data": {"train": train}, "sampler": SHORT, **sections}


@pytest.mark.parametrize(
    ("sections", "points"),
    [
        ({}, [("fake.generate", 2), ("fake.update", 2)]),
        slow({**SPLIT, "trainer": {"staleness": 2, "steps": 5}}, [("fake.sample", 6), ("checkpoint.filled", 1)]),
        full({"sampler": {**SHORT, "partial": {"engine_steps": 16}}}, [("fake.update", 2)]),
    ],
    ids=["plain", "behind", "in parts"],
)
def test_a_demonstration_is_a_groups_last_member_scored_and_learned_and_in_no_statistics_of_the_sampler(
    fake_runs: Runs, sections: dict[str, Any], points: Any
) -> None:
    run = cut(fake_runs, points, **shown(fake_runs, **sections))
    assert fake_runs.replay(run) == 0
    for step in (1, 3):
        found, values = lines(run, step), metrics(run)[step]
        given = [record for record in found if record["weight_version"] == -1]
        assert [record["index"] for record in given] == [4] * 3 and len(found) == 15
        for record in given:
            assert record["completion"] == f"it is {record['answer']}" and not any(record["sampler_logprobs"])
            assert record["trained"] and record["reward"] > 0 and len(record["learner_logprobs"])
        sampled = [record for record in found if record["weight_version"] != -1]
        assert values["reward/mean"] == pytest.approx(np.mean([record["reward"] for record in sampled]))
        mean = np.mean([record["reward"] for record in found if record["trained"]])
        assert all(np.allclose(record["advantage"], record["reward"] - mean) for record in given)
        assert values["length/completion_mean"] == np.mean([len(record["token_ids"]) for record in sampled])
        assert values["shown/share"] == pytest.approx(
            sum(len(r["token_ids"]) for r in given) / sum(len(r["token_ids"]) for r in found)
        )
        assert values.get("mismatch/logprob_abs_max", 0) == 0  # where the sampler is behind, of no token
    document = group_document(ViewedRun(run), "step", 1, 0)
    assert [member.get("shown") for member in document["members"]] == [None] * 4 + [True]
    assert document["members"][4]["reward"] > 0 and "sampler_logprob" not in document["members"][4]["tokens"]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"environment": SLOW_TOOLS["environment"]},
            "learns a demonstration beside what is sampled, and no environment has played it",
        ),
        ({"learner": {"routing": "replayed"}}, "the sampler's experts are not known"),
        ({"sampler": {"group_size": 4, "max_new_tokens": 2}}, "the demonstration is longer than"),
        ({"data": {"train": {"name": "table", "path": "ROWS"}}}, "no demonstration to learn from"),
    ],
)
def test_a_run_that_cannot_have_demonstrations_is_refused_by_name(
    fake_runs: Runs, sections: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = shown(fake_runs, **sections)
    if sections["data"]["train"]["path"] == "ROWS":
        sections["data"]["train"]["path"] = str(fake_runs.rows)
    assert fake_runs.train(fake_runs.config(**sections)) in (2, 3)
    assert message in capsys.readouterr().err


HINTED = {
    "algorithm": {"name": f"{HOOKS}:Hinted"},
    "rewards": [{"name": f"{HOOKS}:rare"}],
    "sampler": {"group_size": 2, "max_new_tokens": 8},
}


def groups(run: Path, step: int) -> list[list[dict[str, Any]]]:
    """The groups of a step in the order in which they were sampled."""
    found = [list(members) for _, members in itertools.groupby(lines(run, step), lambda record: record["group"])]
    return sorted(found, key=lambda members: members[0]["place"])


@pytest.mark.parametrize(
    ("sections", "points"),
    [
        ({}, [("fake.generate", 2), ("fake.update", 2)]),
        full({**SPLIT, "trainer": {"staleness": 2, "steps": 5}}, [("fake.sample", 6), ("checkpoint.filled", 1)]),
    ],
    ids=["plain", "behind"],
)
def test_a_rejected_group_is_sampled_again_with_other_messages(
    fake_runs: Runs, sections: dict[str, Any], points: Any
) -> None:
    run = cut(fake_runs, points, **HINTED, **sections)
    assert fake_runs.replay(run) == 0
    retries = list[int]()
    for step in range(1, 5):
        of_step = groups(run, step)
        told = {(group[0]["prompt_id"], group[0].get("retries", 0)): group for group in of_step}
        assert len(told) == len(of_step)
        for (name, count), group in told.items():
            retries.append(count)
            question = group[0]["messages"][-1]["content"]
            assert question.count(f"it is {group[0]['answer']}") == count and question in group[0]["prompt"]
            assert group[0]["kept"] == any(record["reward"] for record in group) == group[0]["trained"]
            if count:
                before = told[name, count - 1]
                assert not before[0]["kept"] and group[0]["place"][0] == before[0]["place"][0] + 1
                assert [r["token_ids"] for r in group] != [r["token_ids"] for r in before]
                assert len(group[0]["prompt_token_ids"]) > len(before[0]["prompt_token_ids"])
        fresh = [group for (_, count), group in told.items() if count == 0 and group[0]["place"][0]]
        rejected = [told[key] for key in told if key[1] == 2 and not told[key][0]["kept"]]
        assert len(fresh) <= len(rejected)  # the next row only after the last retry
    assert {0, 1, 2} <= set(retries)
    shown = [group_document(ViewedRun(run), "step", 1, group).get("retries", 0) for group in range(len(groups(run, 1)))]
    assert sorted(shown) == sorted(group[0].get("retries", 0) for group in groups(run, 1)) and max(shown)


REPLAYING = {
    "algorithm": {"name": f"{HOOKS}:Replaying"},
    "trainer": {"steps": 6, "prompts_per_step": 4},
}


@pytest.mark.parametrize(
    ("sections", "points"),
    [
        ({}, [("fake.generate", 4), ("fake.update", 2)]),
        full({**SPLIT, **DENSE, "algorithm": REPLAYING["algorithm"]}, [("fake.sample", 12)]),
    ],
    ids=["plain", "split"],
)
def test_kept_rollouts_take_places_with_their_old_versions_and_are_no_mismatch(
    fake_runs: Runs, sections: dict[str, Any], points: Any
) -> None:
    data = {"train": {"name": "table", "path": str(fake_runs.rows)}}
    run = cut(fake_runs, points, **{**REPLAYING, "data": data, **sections})
    assert fake_runs.replay(run) == 0
    best = dict[str, list[tuple[list[int], float, int]]]()  # of each prompt, as they were sampled
    for step in range(1, 7):
        of_step = groups(run, step)
        recalled = 0
        for members in of_step:
            name = members[0]["prompt_id"]
            old = [record for record in members if record.get("recalled")]
            kept = best.get(name, [])[-2:]
            assert len(old) == bool(kept)
            for record in old:
                assert (record["token_ids"], record["reward"], record["weight_version"]) == kept[0]
                assert record["weight_version"] < step - 1 and record["trained"]
                recalled += 1
            sampled = [record for record in members if not record.get("recalled")]
            assert {record["weight_version"] for record in sampled} == {step - 1}
            # The one that was replaced is not on record: it was the worst, and so not the one that is kept.
            chosen = max(sampled, key=lambda record: record["reward"])
            best.setdefault(name, []).append((chosen["token_ids"], chosen["reward"], step - 1))
        values = metrics(run)[step]
        assert values["replaying/recalled"] == recalled and (recalled == len(of_step) or step < 3)
        assert values["mismatch/logprob_abs_max"] == 0
        own = [r["reward"] for members in of_step for r in members if not r.get("recalled")]
        assert values["reward/mean"] == pytest.approx(np.mean(own))
    document = group_document(ViewedRun(run), "step", 6, 0)
    assert sum(member.get("recalled", False) for member in document["members"]) == 1


@pytest.mark.parametrize(
    ("name", "sections", "message"),
    [
        (
            "Replaying",
            {**SPLIT, "trainer": {"staleness": 1}},
            "recalls rollouts of the steps before, and some of these",
        ),
        ("Replaying", {"sampler": {"partial": {"engine_steps": 16}}}, "in parts some are under way"),
        ("Replaying", {"learner": {"routing": "replayed"}}, "the sampler's experts are not known"),
        ("Hinted", {"sampler": {"partial": {"engine_steps": 16}}}, "in parts a prompt has one group"),
        ("Hinted", {"environment": SLOW_TOOLS["environment"]}, "what the environment has said at first"),
    ],
)
def test_a_run_that_cannot_retry_or_recall_is_refused_by_name(
    fake_runs: Runs, name: str, sections: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake_runs.train(fake_runs.config(algorithm={"name": f"{HOOKS}:{name}"}, **sections)) == 2
    assert message in capsys.readouterr().err
