"""Rows of a run's own rollouts: which completions are taken, in which order, and in which tokens they are learned."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mmrl.commands.eval.output import OutputFolder, Samples
from mmrl.errors import ConfigError, DataError
from mmrl.rollout.records.reading import read_rollouts
from mmrl.runs.directory import RunDirectory
from mmrl.runs.files import locked
from mmrl.runs.reader import load_run
from mmrl.runs.sampled_rows import sampled_warnings
from mmrl.runs.setup import RunSetup
from mmrl.testing import check_dataset
from mmrl.types import (
    GIVEN,
    CreditedGroup,
    EncodedPrompt,
    Observation,
    PlayedTurn,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredGroup,
    Segment,
    Turn,
)
from mmrl_datasets.recorded import Recorded
from tests.conftest import Bench
from tests.faults.runs import Runs, events, rollouts


@dataclass(frozen=True)
class Said:
    """A completion as a policy said it, and its reward."""

    text: str
    reward: float | None
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Maker:
    """Writes runs by hand, of the bench's model and prompts."""

    bench: Bench
    folder: Path

    def run(self, name: str = "run") -> RunDirectory:
        directory = RunDirectory.create(self.folder / name)
        directory.begin_attempt(None, command=["mmrl", "train"], changes=[])
        directory.write_config("model: {path: models/first}\n")
        directory.append_metrics(1, {"reward/mean": 0.5})
        shutil.copytree(self.bench.media.folder, directory.path / "media", dirs_exist_ok=True)
        return directory

    def group(self, place: int, *said: Said, epoch: int = 0, **row: Any) -> CreditedGroup:
        """Completions of one of the bench's prompts, 1 and 2 of which have images."""
        prompt = replace(self.bench.prompts[place], epoch=epoch)
        prompt = replace(prompt, prompt=replace(prompt.prompt, answer="7", columns={"unit": "cm"}, **row))
        rollouts = tuple(self.rollout(prompt, index, each) for index, each in enumerate(said))
        rewards = np.array([each.reward or 0.0 for each in said])
        valid = np.array([each.reward is not None for each in said])
        components = {"exact": np.where(valid, rewards, np.nan), "short": np.array([-float(len(s.text)) for s in said])}
        scored = ScoredGroup(RolloutGroup(prompt, rollouts), rewards, valid, components)
        zeros = [np.zeros(len(rollout.token_ids)) for rollout in rollouts]
        return CreditedGroup(scored, zeros, zeros, trained=True, updates=[[] for _ in rollouts])

    def rollout(self, prompt: EncodedPrompt, index: int, said: Said) -> Rollout:
        ids = [*self.tokens(said.text), self.end]
        segment = Segment(np.array(ids, np.int32), True, np.zeros(len(ids), np.float32))
        facts: dict[str, Any] = {"finish_reason": "stop", "weight_version": 3, **said.fields}
        return Rollout(prompt, (segment,), index, said.text, **facts)

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.bench.folder.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @property
    def end(self) -> int:
        return int(self.bench.folder.processor.tokenizer.convert_tokens_to_ids("<|im_end|>"))


@pytest.fixture
def make(vision: Bench, tmp_path: Path) -> Maker:
    return Maker(vision, tmp_path)


@pytest.fixture
def run(make: Maker) -> Path:
    """Two steps, in which two prompts were sampled twice, and an evaluation."""
    directory = make.run()
    mixed = Said("red", 0.0), Said("blue", 1.0), Said("green", 0.25), Said("blue", 1.0)
    first = make.group(1, *mixed), make.group(0, Said("7", 1.0), Said("seven", 1.0))
    second = make.group(1, *mixed[1:], mixed[0], epoch=1), make.group(2, Said("2", 0.5), Said("3", -0.5), epoch=1)
    directory.write_rollouts(1, first, {})
    directory.write_rollouts(2, second, {})
    directory.write_evaluation(2, [make.group(0, Said("6", 0.0), Said("7", 1.0))])
    directory.end_attempt(0)
    directory.release()
    return directory.path


def loader(path: Path, **options: Any) -> Recorded:
    return Recorded(Recorded.Config(path=str(path), **options))


def load(path: Path, **options: Any) -> list[Prompt]:
    check_dataset(found := loader(path, **options))
    return list(found.load())


def compared(prompts: Sequence[Prompt]) -> dict[str, list[tuple[str, float | None]]]:
    return {each.id: [(candidate.text, candidate.score) for candidate in each.candidates] for each in prompts}


def imitated(prompts: Sequence[Prompt]) -> dict[str, str | None]:
    return {each.id: each.demonstration for each in prompts}


def test_a_group_is_a_row_with_its_completions_and_rewards_and_its_images(run: Path, vision: Bench) -> None:
    rows = load(run)
    assert compared(rows) == {
        "step-1/epoch-0/one": [("red", 0.0), ("blue", 1.0), ("green", 0.25)],
        "step-2/epoch-1/two": [("2", 0.5), ("3", -0.5)],
    }
    for row, place in zip(rows, (1, 2), strict=True):
        given, asked = vision.encoder.encode(row), vision.prompts[place]
        assert [ref.hash for ref in given.images] == [ref.hash for ref in asked.images]
        assert given.text == asked.text and np.array_equal(given.token_ids, asked.token_ids)
        assert row.answer == "7" and row.columns == {"unit": "cm"} and row.demonstration is None
    told = dict(loaded(run).describe())
    assert told["rows"] == "2 of 4 groups (12 completions)" and told["recorded"].startswith("a run, ")
    assert told["answers"] == "to compare: 2 to 3 of a row" and told["values"] == "reward -0.5 to 1, 0.25 in the mean"
    causes = "equal to another one of their group 2, groups without an order 1, equal rows 1"
    assert told["left out"] == causes


def loaded(path: Path, **options: Any) -> Recorded:
    found = loader(path, **options)
    found.load()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"candidates": "pair"}, {"step-1/epoch-0/one": ["blue", "red"], "step-2/epoch-1/two": ["2", "3"]}),
        (
            {"candidates": "single", "steps": [1]},
            {
                "step-1/epoch-0/one/0": ["red"], "step-1/epoch-0/one/1": ["blue"], "step-1/epoch-0/one/2": ["green"],
                "step-1/epoch-0/text/0": ["7"], "step-1/epoch-0/text/1": ["seven"],
            },
        ),
        ({"duplicates": True, "steps": {"first": 2}}, {
            "step-2/epoch-1/one": ["blue", "green", "red"], "step-2/epoch-1/two": ["2", "3"],
        }),
        ({"duplicates": True}, {
            "step-1/epoch-0/one": ["red", "blue", "green"], "step-2/epoch-1/one": ["blue", "green", "red"],
            "step-2/epoch-1/two": ["2", "3"],
        }),
        ({"reward": "short", "steps": {"last": 1}}, {
            "step-1/epoch-0/one": ["red", "blue", "green"], "step-1/epoch-0/text": ["7", "seven"],
        }),
        ({"rollouts": "evaluations"}, {"evaluation-2/epoch-0/text": ["6", "7"]}),
        ({"rollouts": "both", "steps": [2]}, {
            "step-2/epoch-1/one": ["blue", "green", "red"], "step-2/epoch-1/two": ["2", "3"],
            "evaluation-2/epoch-0/text": ["6", "7"],
        }),
    ],
    ids=str,
)  # fmt: skip
def test_options_choose_what_is_compared(run: Path, options: dict[str, Any], expected: dict[str, list[str]]) -> None:
    assert {name: [text for text, _ in said] for name, said in compared(load(run, **options)).items()} == expected


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("best", {"step-1/epoch-0/one/1": "blue", "step-1/epoch-0/text/0": "7", "step-2/epoch-1/two/0": "2"}),
        (
            {"above": 0.25},
            {
                "step-1/epoch-0/one/1": "blue", "step-1/epoch-0/text/0": "7", "step-1/epoch-0/text/1": "seven",
                "step-2/epoch-1/two/0": "2",
            },
        ),
        ({"above": 0.5, "most": 1}, {"step-1/epoch-0/one/1": "blue", "step-1/epoch-0/text/0": "7"}),
    ],
    ids=str,
)  # fmt: skip
def test_good_completions_are_demonstrations(run: Path, keep: Any, expected: dict[str, str]) -> None:
    """One of each prompt and text, though both steps have it."""
    rows = load(run, keep=keep)
    assert imitated(rows) == expected and not any(row.candidates for row in rows)
    assert "equal rows 1" in loaded(run, keep=keep).describe()["left out"]


def test_a_named_evaluation_set_has_its_images(make: Maker) -> None:
    directory = make.run()
    for name in ("easy", "hard"):
        directory.write_evaluation(4, [make.group(1, Said(name, 1.0), Said("no", 0.0))], name=name)
    directory.release()
    both = compared(load(directory.path, rollouts="evaluations"))
    assert list(both) == ["evaluation/easy-4/epoch-0/one", "evaluation/hard-4/epoch-0/one"]
    (row,) = load(directory.path, rollouts="evaluations", sets=["hard"])
    assert [candidate.text for candidate in row.candidates] == ["hard", "no"] and len(row.images) == 1
    (read, _) = load_run(directory.path).evaluations(4, "hard")
    assert [path.is_file() for path in read.images] == [True]
    with pytest.raises(DataError, match="no evaluation set 'worse'") as caught:
        loader(directory.path, rollouts="evaluations", sets=["worse"]).load()
    assert caught.value.possible == "easy, hard"


def test_what_cannot_be_an_answer_is_left_out_and_counted(make: Maker) -> None:
    directory = make.run()
    turn = PlayedTurn(Turn("look", (), 0, "stop", 9), ("there",), observation := "tool")
    assert observation == Observation().role
    long = make.group(
        1,
        Said(" \n", 1.0),
        Said("cut", 0.5, {"finish_reason": "length"}),
        Said("unscored", None),
        Said("episode", 1.0, {"episode": (turn, turn)}),
        Said("one turn", 0.75, {"episode": (turn,)}),
        Said("plain", 0.0),
    )
    given = make.group(0, *(Said(text, float(text == "a"), {"weight_version": GIVEN}) for text in "ab"))
    directory.write_rollouts(1, [long, given], {})
    directory.release()
    found = loaded(directory.path)
    assert compared(list(found.load())) == {"step-1/epoch-0/one": [("one turn", 0.75), ("plain", 0.0)]}
    told = found.describe()["left out"]
    for cause in (
        "empty 1",
        "cut off by a limit 1",
        "without a valid reward 1",
        "of several turns 1",
        "nobody sampled 2",
    ):
        assert cause in told
    assert any("1 completion left out that are episodes of several turns" in note for note in found.notes())
    (row,) = load(directory.path, truncated=True)
    assert [candidate.text for candidate in row.candidates] == ["cut", "one turn", "plain"]
    assert imitated(load(directory.path, keep="best", truncated=True)) == {"step-1/epoch-0/one/4": "one turn"}


def test_a_greedy_completion_beside_a_group_is_one_of_it(make: Maker) -> None:
    directory = make.run()
    group = make.group(0, Said("a", 0.0), Said("b", 0.0))
    beside = make.group(0, Said("c", 1.0, {"greedy": True})).scored
    directory.write_rollouts(1, [replace(group, scored=replace(group.scored, greedy=beside))], {})
    directory.release()
    assert compared(load(directory.path)) == {"step-1/epoch-0/text": [("a", 0.0), ("b", 0.0), ("c", 1.0)]}
    assert imitated(load(directory.path, keep="best")) == {"step-1/epoch-0/text/-1": "c"}


def test_an_evaluations_folder_is_read_while_it_grows(make: Maker) -> None:
    prompts = [make.bench.prompts[place] for place in (0, 1)]
    with OutputFolder(make.folder / "out") as output:
        output.claim({"mmrl": "1"})
        with pytest.raises(DataError, match="has recorded no completions"):
            loader(output.path).load()
        shutil.copytree(make.bench.media.folder, output.media)
        samples = Samples(output.path / "samples.jsonl", prompts, 2, output.media)
        samples.keep(make.group(1, Said("blue", 1.0), Said("red", 0.0)).scored, [])
        found = loaded(output.path)
        assert found.describe()["recorded"] == "an evaluation"
        assert any("is at work: what it records from now on is not read" in note for note in found.notes())
        assert [len(row.images) for row in found.load()] == [1]
        samples.keep(make.group(0, Said("7", 1.0), Said("6", 0.0)).scored, [])
        before = loaded(output.path).fingerprint()
        samples.finish()
        output.write_results({"model": "models/second"})
    assert list(compared(load(output.path))) == ["text", "one"], "in the order of the prompts"
    assert imitated(load(output.path, keep={"above": 0})) == {"text/0": "7", "one/0": "blue"}
    after = loaded(output.path)
    assert after.sampled()[0].by == "models/second" and not after.notes() and after.fingerprint() != before
    in_a_run = Recorded.Config(path=str(output.path)).model_dump()  # whose config has every option
    assert compared(Recorded(Recorded.Config(**in_a_run)).load()) == compared(load(output.path))
    with pytest.raises(ConfigError, match="no steps and no sets, and rollouts and steps choose among a run's"):
        loader(output.path, rollouts="both", steps=[1]).load()


def test_a_run_at_work_says_that_more_will_come(run: Path) -> None:
    assert loaded(run).notes() == []
    lock = locked(run, "test")
    try:
        (note,) = loaded(run).notes()
    finally:
        lock.close()
    assert "is at work" in note and "steps: {last: N}" in note


def test_the_fingerprint_is_one_of_what_is_learned(run: Path, make: Maker) -> None:
    first = loaded(run)
    assert loaded(run).fingerprint() == first.fingerprint() != loaded(run, steps=[1]).fingerprint()
    RunDirectory(run).write_rollouts(2, [make.group(1, Said("red", 0.0), Said("blue", 0.9))], {})
    assert loaded(run).fingerprint() != first.fingerprint()
    RunDirectory(run).write_rollouts(2, [make.group(1, Said("red", 0.0), Said("blue", 1.0))], {})
    texts = loaded(run).fingerprint()
    RunDirectory(run).write_rollouts(2, [make.group(2, Said("red", 0.0), Said("blue", 1.0))], {})
    assert loaded(run).fingerprint() != texts


@pytest.mark.parametrize(
    ("options", "match", "possible"),
    [
        ({"steps": [1, 7]}, "There is no record of step 7", "1, 2"),
        ({"steps": {"first": 9}}, r"No step is recorded within steps: \{first: 9\}", "1, 2"),
        ({"reward": "exakt"}, "There is no reward 'exakt' in the records", "exact, short"),
        ({"keep": {"above": 1}}, "No recorded completion has a reward above 1", ""),
        ({"reward": "exact", "steps": [2], "rollouts": "evaluations", "keep": {"above": 5}}, "has a exact above 5", ""),
    ],
    ids=str,
)
def test_what_is_not_there_is_an_error_that_says_what_is(
    run: Path, options: dict[str, Any], match: str, possible: str
) -> None:
    with pytest.raises(DataError, match=match) as caught:
        loader(run, **options).load()
    assert caught.value.possible == possible


def test_nothing_to_compare_is_an_error_with_counts(make: Maker) -> None:
    directory = make.run()
    directory.release()
    with pytest.raises(DataError, match="has recorded no rollouts so far") as caught:
        loader(directory.path).load()
    assert "the run is " in caught.value.where
    RunDirectory(directory.path).write_rollouts(1, [make.group(0, Said("a", 1.0), Said("b", 1.0))], {})
    with pytest.raises(DataError, match="No recorded group has completions of different reward") as caught:
        loader(directory.path).load()
    assert "groups without an order 1" in caught.value.where


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="no such folder" if name else "neither a run nor an evaluation") as caught:
        loader(tmp_path / name).load()
    assert "mmrl eval --output" in caught.value.possible


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"keep": "best", "candidates": "pair"}, "leave one out"),
        ({"sets": ["easy"]}, "set rollouts to evaluations or both"),
        ({"keep": {"most": 0}}, "greater than or equal to 1"),
        ({"keep": "worst"}, "best"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        Recorded.Config(path="runs/a", **options)


def test_an_image_that_is_gone_is_an_error_of_its_row(run: Path) -> None:
    shutil.rmtree(run / "media")
    rows = loader(run).load()
    with pytest.raises(DataError, match="A recorded image cannot be read") as caught:
        rows[0]
    assert caught.value.where.startswith("step-1/epoch-0/one: ")
    assert loaded(run).sampled() == [], "it is told where the row is drawn"


def test_completions_are_learned_in_the_tokens_that_were_sampled(run: Path, vision: Bench) -> None:
    """Those of the prompt and of each completion, whatever images are in the prompt."""
    by_text = {
        (prompt.id, rollout.text): rollout.token_ids
        for step in (1, 2)
        for rollout in (each.rollout for each in read_rollouts(run / "rollouts" / f"step-{step:06d}.parquet"))
        for prompt in [rollout.prompt]
    }
    for row in load(run):
        encoded = vision.encoder.encode(row)
        for candidate, sample in zip(row.candidates, vision.encoder.given(encoded), strict=True):
            assert np.array_equal(sample.token_ids, by_text[row.id.rpartition("/")[2], candidate.text])
    for row in load(run, keep="best"):
        shown = vision.encoder.demonstrate(vision.encoder.encode(row))
        assert np.array_equal(shown.token_ids, by_text[row.id.split("/")[2], row.demonstration or ""])


def warnings(make: Maker, run: Path, **data: Any) -> list[str]:
    """Those of a run of the bench's model on such rows."""
    train = {"name": "recorded", "path": str(run), "keep": "best"}
    sections: dict[str, Any] = {"algorithm": {"name": "sft"}, "sampler": {"temperature": 1.0}}
    setup = RunSetup(make.bench.config(data={"train": train, **data}, **sections), make.folder / "media")
    return sampled_warnings(setup, setup.prompts)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, []),
        ({"system_prompt": "Be brief."}, ["3 of 3 rows that were looked at are read otherwise than where "]),
        ({"prompt_template": "Say: {{ prompt }}"}, ["<|im_start|>user\\nSay: ", "by models/first"]),
        (
            {"max_pixels": 8000},
            ["1 of 3 rows", "images of 56x84 and 84x56 by ", " and 140x112 by models/first (row step-2"],
        ),
    ],
    ids=str,
)
def test_rows_that_the_model_reads_otherwise_are_told_with_both_models(
    run: Path, make: Maker, data: dict[str, Any], expected: list[str]
) -> None:
    found = warnings(make, run, **data)
    assert len(found) == (1 if expected else 0)
    for part in [*expected, *(["data.train: ", f"{make.bench.folder.path} (model.path)"] if expected else [])]:
        assert part in found[0]


def test_completions_in_other_tokens_are_told_where_they_are_many(make: Maker) -> None:
    """As those of another tokenizer; a policy may sample a text in unusual tokens now and then."""
    directory, other = make.run(), Said("seven", 1.0)
    group = make.group(0, other, Said("6", 0.0))
    (first, second) = group.scored.rollouts
    letters = [token for letter in "seven" for token in make.tokens(letter)]
    ids = np.array([*letters, make.end], np.int32)
    assert len(ids) > len(first.token_ids)
    unusual = replace(first, segments=(Segment(ids, True, np.zeros(len(ids), np.float32)),))
    scored = replace(group.scored, group=RolloutGroup(group.scored.group.prompt, (unusual, second)))
    zeros = [np.zeros(len(each.token_ids)) for each in scored.rollouts]
    changed = replace(group, scored=scored, advantages=zeros, logprobs=zeros)
    directory.write_rollouts(1, [changed], {})
    directory.release()
    (warning,) = warnings(make, directory.path)
    assert "1 of 1 completions that were looked at have other tokens by the tokenizer of" in warning
    directory.write_rollouts(2, [make.group(1, Said("blue", 1.0))], {})
    assert warnings(make, directory.path) == []


def test_a_run_on_a_runs_own_rollouts_goes_on_only_with_the_same_ones(fake_runs: Runs, capsys: Any) -> None:
    """A run of rollouts, one that compares them, and more rollouts; named steps stay the same."""
    assert fake_runs.train(fake_runs.config(trainer={"steps": 2})) == 0
    train = {"name": "recorded", "path": str(fake_runs.folder / "run"), "truncated": True}
    given: dict[str, Any] = {"rewards": [], "algorithm": {"name": "dpo"}, "sampler": {"max_new_tokens": 16}}
    length = {"steps": 2, "prompts_per_step": 2, "save_every": 1}
    for name, options in {"all": {}, "named": {"steps": {"last": 2}}}.items():
        sections = {"data": {"train": train | options}, "trainer": length | {"run_dir": str(fake_runs.folder / name)}}
        assert fake_runs.train(fake_runs.config(name, **given, **sections)) == 0
    told = events(fake_runs.folder / "all", "warning")
    assert any(
        "completions that were looked at have other tokens by the tokenizer of" in each["message"] for each in told
    )
    learned = rollouts(fake_runs.folder / "all", 1)
    known = {each["completion"]: each["reward"] for each in rollouts(fake_runs.folder / "run", 1)}
    known |= {each["completion"]: each["reward"] for each in rollouts(fake_runs.folder / "run", 2)}
    assert len(learned) >= 4 and {each["weight_version"] for each in learned} == {GIVEN}
    assert all(each["reward"] == known[each["completion"]] for each in learned)
    assert fake_runs.train(fake_runs.folder / "run.yaml", "trainer.steps=3") == 0
    capsys.readouterr()
    assert fake_runs.train(fake_runs.folder / "all.yaml", "trainer.steps=3") != 0
    assert "data.train" in capsys.readouterr().err
    assert fake_runs.train(fake_runs.folder / "named.yaml", "trainer.steps=3") == 0
