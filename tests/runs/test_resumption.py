"""Runs that end early and go on: what they may go on with, and that they come out as if nothing had happened."""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.load import load_config
from mmrl.errors import ConfigError, RankLostError
from mmrl.runs.directory import RunDirectory
from mmrl.runs.history import read_ledger
from mmrl.runs.resumption import TEMPLATE, Change, changed_contents, refuse
from tests.faults.runs import REWARDS, Killed, Runs, at, events, fake, outcome, records, rollouts, steps, stop

RIGHT = """\
def right(rollouts):
    return [float("a" in each.text or "b" in each.text) for each in rollouts]
"""


def letters(**options: Any) -> list[dict[str, Any]]:
    return [{"name": f"{REWARDS}:letters", **options}]


def skipping(folder: Path) -> dict[str, Any]:
    """Sections of a run that samples again what it rejects, and carries what it keeps over skipped steps."""
    (folder / "right.py").write_text(RIGHT)
    overlong = {"name": "overlong", "max_tokens": 8, "cache_tokens": 4}
    refill = {"metric": "right", "max_rounds": 1, "on_starvation": "skip"}
    return {
        "algorithm": {"name": "dapo", "dynamic_sampling": refill},
        "rewards": [{"name": f"{folder / 'right.py'}:right"}, *letters(weight=0.1), overlong],
        "sampler": {"group_size": 2},
    }


SECTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "grpo": lambda folder: {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}},
        "learner": {"minibatches": 2, "schedule": "cosine"},
    },
    "dapo": skipping,
    "remax": lambda folder: {"algorithm": {"name": "remax"}, "learner": {"minibatches": 2, "epochs": 2}},
    "reinforce_pp": lambda folder: {
        "algorithm": {"name": "reinforce_pp", "kl": {"coef": 0.05, "target": 0.001, "horizon": 50.0}}
    },
    "reset": lambda folder: {
        "algorithm": {"name": "grpo", "kl": {"coef": 0.5}},
        "reference": {"reset_every": 3},
        "learner": {"minibatches": 2},
    },
    "sft": lambda folder: {
        "algorithm": {"name": "sft"},
        "learner": {"minibatches": 2},
        "data": {"train": {"name": "table", "path": str(folder / "rows.jsonl"), "demonstration": "written"}},
    },
}
EPOCHS = {"steps": 8, "keep_checkpoints": 99, "eval_every": 3}
"""Eight steps of three of eight prompts: three epochs at least; evaluations come with checkpoints and without."""


def sections(runs: Runs, name: str, save_every: int) -> dict[str, Any]:
    rows = {"name": "table", "path": str(runs.rows)}
    options = {"rewards": letters(), "data": {"train": rows}, **SECTIONS[name](runs.folder)}
    options["data"]["eval"] = rows
    return options | {"trainer": {**EPOCHS, "save_every": save_every}}


CUTS: dict[str, Callable[[int], Any]] = {
    "killed in the update": lambda count: at("fake.update", count),
    "killed when the reference is reset": lambda count: at("fake.reset", count),
    "killed when a checkpoint is written": lambda count: at("checkpoint.sealed", count),
    "killed when a checkpoint is there": lambda count: at("checkpoint.renamed", count),
    "stopped in sampling": lambda count: at("fake.generate", count, stop),
    "stopped in the update": lambda count: at("fake.update", count, stop),
    "stopped in a checkpoint": lambda count: at("save.shard", count, stop),
}


def train_with_a_cut(runs: Runs, config: Path, cut: Any) -> bool:
    """True if it was cut short; it then goes on with the next call."""
    try:
        with cut:
            return runs.train(config) == 10
    except Killed:
        return True
    except LookupError:  # there was no such moment
        return False


TIERS = {
    "dapo": [pytest.mark.full],
    "reset": [pytest.mark.full],
    "remax": [pytest.mark.slow],
    "reinforce_pp": [pytest.mark.slow],
    "sft": [pytest.mark.slow],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=TIERS.get(name, [])) for name in SECTIONS])
def test_a_run_cut_at_every_step_comes_out_as_the_unbroken_one(fake_runs: Runs, name):
    """One run, cut after every step: by turns killed when the checkpoint is there, and stopped while it is written."""
    assert fake_runs.train(fake_runs.config("plain", **sections(fake_runs, name, 1))) == 0
    plain, run = fake_runs.folder / "plain", fake_runs.folder / "run"
    config = fake_runs.config(**sections(fake_runs, name, 1))
    for way in itertools.islice(itertools.cycle(["killed when a checkpoint is there", "stopped in a checkpoint"]), 10):
        train_with_a_cut(fake_runs, config, CUTS[way](1))
    assert fake_runs.train(config) == 0
    assert {a["resumed_from"] for a in records(run / "attempts.jsonl") if "pid" in a} >= {None, *range(8)}
    expected, found = outcome(plain), outcome(run)
    for part in expected:
        assert found[part] == expected[part], part
    check_that_there_was_something_to_lose(name, plain, expected)


def check_that_there_was_something_to_lose(name: str, plain: Path, expected: dict[str, Any]) -> None:
    assert {epoch for record in expected["ledger"] for epoch, _, _ in record["samples"]} >= {0, 1, 2}
    states = [json.loads((path / "state" / "run.json").read_text()) for path in plain.glob("checkpoints/step-*")]
    if name == "dapo":
        assert any(state["trainer"]["carried_groups"] for state in states)
        rounds = [values.get("rollout/rounds") for values in expected["metrics"].values()]
        assert 2 in rounds and any(
            values.get("rollout/acceptance_rate", 1) < 1 for values in expected["metrics"].values()
        )
        assert len(expected["ledger"]) < 8
    if name == "reinforce_pp":
        assert len({state["trainer"]["algorithm"]["kl_coef"] for state in states}) > 2
    if name == "remax":
        assert all("reward/greedy_mean" in values for step, values in expected["metrics"].items() if step)


def test_a_run_killed_between_a_reset_and_the_next_checkpoint_comes_out_as_the_unbroken_one(fake_runs: Runs):
    """The reference becomes the policy after steps 2, 4 and 6; checkpoints come after 3 and 6."""
    options = {**SECTIONS["reset"](fake_runs.folder), "reference": {"reset_every": 2}}
    options["trainer"] = {"steps": 7, "save_every": 3, "keep_checkpoints": 9}
    assert fake_runs.train(fake_runs.config("plain", **options)) == 0
    expected = outcome(fake_runs.folder / "plain")
    roles = {
        path.name: {*json.loads((path / "manifest.json").read_text())["roles"]}
        for path in (fake_runs.folder / "plain" / "checkpoints").iterdir()
    }
    before, after = {"policy"}, {"policy", "reference"}
    assert [roles[f"step-{step:06}"] for step in (0, 3, 6, 7)] == [before, after, after, after]
    for name, point, count in (("reset", "fake.reset", 2), ("update", "fake.update", 10), ("saved", "save.shard", 3)):
        config = fake_runs.config(name, **options)
        fake_runs.killed(config, point, count)
        assert fake_runs.train(config) == 0
        assert records(fake_runs.folder / name / "attempts.jsonl")[-2]["resumed_from"] == 3
        found = outcome(fake_runs.folder / name)
        for part in expected:
            assert found[part] == expected[part], (name, part)
    gaps = [values["kl/reference"] for values in expected["metrics"].values() if "kl/reference" in values]
    assert gaps[2] == pytest.approx(0, abs=1e-3) and gaps[1] > 10 * gaps[2]  # of the minibatches of steps 3 and 2


@pytest.mark.slow
@pytest.mark.parametrize("way", CUTS)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_run_cut_once_anywhere_comes_out_as_the_unbroken_one(name, way, models, tmp_path):
    with fake(tmp_path, models("qwen2")) as runs:
        assert runs.train(runs.config("plain", **sections(runs, name, 2))) == 0
        expected = outcome(tmp_path / "plain")
        for count in itertools.count(1):
            config = runs.config(f"cut{count}", **sections(runs, name, 2))
            if not train_with_a_cut(runs, config, CUTS[way](count)):
                break
            assert runs.train(config) == 0
            assert outcome(tmp_path / f"cut{count}") == expected, count
        assert count > 2 or (way == "killed when the reference is reset" and (name != "reset") == (count == 1))


def test_a_run_killed_before_its_first_checkpoint_begins_anew(fake_runs: Runs):
    assert fake_runs.train(fake_runs.config("plain")) == 0
    config, run = fake_runs.config(), fake_runs.folder / "run"
    for point in ("checkpoint.begin", "save.state", "checkpoint.sealed"):
        fake_runs.killed(config, point)
    assert steps(run) == []
    assert fake_runs.train(config) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_a_run_with_finished_steps_and_no_checkpoint_is_not_begun_anew(fake_runs: Runs, capsys):
    def full() -> None:
        raise OSError(28, "No space left on device")

    config, run = fake_runs.config(trainer={"save_every": 9}), fake_runs.folder / "run"
    with at("checkpoint.filled", 1, full):
        fake_runs.killed(config, "fake.update", 3)
    assert steps(run) == [] and len(read_ledger(run)) == 2
    kept = {name: (run / name).read_bytes() for name in ("config.yaml", "metrics.jsonl", "ledger.jsonl")}
    for remove in (lambda: None, lambda: shutil.rmtree(run / "checkpoints")):
        remove()
        assert fake_runs.train(config) == 2
        error = capsys.readouterr().err
        assert "no checkpoint to go on from" in error and "choose another trainer.run_dir" in error
        assert {name: (run / name).read_bytes() for name in kept} == kept


@pytest.mark.full
def test_a_config_that_changes_before_the_first_step_is_finished_is_a_new_start(fake_runs: Runs):
    fake_runs.killed(fake_runs.config(), "fake.update")
    config = fake_runs.config(learner={"lr": 0.05})
    assert fake_runs.train(config) == 0
    run = fake_runs.folder / "run"
    assert len(events(run, "start_anew")) == 1
    assert fake_runs.train(fake_runs.config("plain", learner={"lr": 0.05})) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")


@pytest.mark.full
def test_a_finished_run_is_left_alone_and_can_be_prolonged(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config("plain", trainer={"steps": 6})) == 0
    config, run = fake_runs.config(), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert fake_runs.train(config) == 0
    assert "is finished: it has 4 steps" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert fake_runs.train(fake_runs.config(trainer={"steps": 6})) == 0
    assert "changed: trainer.steps: 4 -> 6" in capsys.readouterr().out
    assert outcome(run) == outcome(fake_runs.folder / "plain")


@pytest.mark.full
def test_a_run_that_ended_by_its_condition_says_so_until_the_condition_changes(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config("plain")) == 0
    trainer = {"save_every": 9, "stop_when": "length/completion_mean > 0"}
    config, run = fake_runs.config(trainer=trainer), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0
    assert steps(run) == ["step-000000", "step-000001"] and len(events(run, "stop_when")) == 1
    capsys.readouterr()
    assert fake_runs.train(config) == 0
    assert "has ended after step 1 by trainer.stop_when: length/completion_mean is" in capsys.readouterr().out
    assert steps(run) == ["step-000000", "step-000001"]
    assert fake_runs.train(fake_runs.config(trainer={"stop_when": "length/completion_mean > 999"})) == 0
    assert "changed: trainer.stop_when: length/completion_mean > 0 ->" in capsys.readouterr().out
    assert fake_runs.train(fake_runs.config()) == 0
    assert outcome(run)["state"] == outcome(fake_runs.folder / "plain")["state"], "as if it had never stopped"


@pytest.mark.full
def test_epochs_are_as_many_steps_as_the_rows_give(fake_runs: Runs, capsys):
    config, run = fake_runs.config(trainer={"steps": None, "epochs": 1.1}), fake_runs.folder / "run"
    assert fake_runs.train(config) == 0  # 1.1 epochs of 8 rows in batches of 3
    assert steps(run)[-1] == "step-000003" and "step 3/3" in capsys.readouterr().out
    written = load_config([run / "config.yaml"]).config.trainer
    assert (written.steps, written.epochs) == (3, None)
    assert fake_runs.train(config) == 0
    assert "is finished: it has 3 steps" in capsys.readouterr().out
    longer = fake_runs.config(trainer={"steps": None, "epochs": 2})
    assert fake_runs.train(longer) == 0
    assert "changed: trainer.steps: 3 -> 6" in capsys.readouterr().out
    late = {"trainer": {"steps": None, "epochs": 1}, "learner": {"warmup_steps": 3}}
    assert fake_runs.train(fake_runs.config("late", **late)) == 2
    assert (
        "but the run has only 3 optimizer steps\n  where:    trainer.epochs: 1 of 8 rows make 3 steps"
        in capsys.readouterr().err
    )


def test_a_schedule_that_decays_towards_the_last_step_has_a_fixed_last_step(fake_runs: Runs, capsys):
    learner = {"lr": 1e-2, "schedule": "linear"}
    assert fake_runs.train(fake_runs.config(learner=learner)) == 0
    longer = fake_runs.config(learner=learner, trainer={"steps": 6})
    assert fake_runs.train(longer) == 2
    error = capsys.readouterr().err
    assert "trainer.steps: 4 -> 6" in error and "--allow-change trainer.steps" in error
    assert fake_runs.train(longer, "--allow-change", "trainer.steps") == 0


CHANGES = {
    "learner.lr": ({"learner": {"lr": 0.05}}, "0.01 -> 0.05"),
    "trainer.seed": ({"trainer": {"seed": 1}}, "0 -> 1"),
    "trainer.prompts_per_step": ({"trainer": {"prompts_per_step": 2}}, "3 -> 2"),
    "sampler.group_size": ({"sampler": {"group_size": 2}}, "4 -> 2"),
    "algorithm.clip_high": ({"algorithm": {"name": "grpo", "clip_high": 0.3}}, ""),
    "algorithm.name": ({"algorithm": {"name": "rloo"}}, "grpo -> rloo"),
    "rewards.0.weight": ({"rewards": letters(weight=0.5)}, "1.0 -> 0.5"),
    "rewards.1.name": ({"rewards": [*letters(), {"name": "exact"}]}, "null -> exact"),
    "reference.path": (
        {"algorithm": {"name": "grpo", "kl": {"coef": 0.1}}, "reference": {"path": "MODEL"}},
        "null -> ",
    ),
}


@pytest.fixture(scope="module")
def cut(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of four steps that was killed in the third, to be copied."""
    folder = tmp_path_factory.mktemp("cut")
    with fake(folder, models("qwen2")) as runs:
        runs.killed(runs.config(), "fake.update", 3)
        yield runs


@pytest.fixture
def again(cut: Runs, tmp_path: Path) -> Any:
    """Copies of the cut run: ``again(**sections)`` is a config for the copy."""
    shutil.copytree(cut.folder / "run", tmp_path / "run")
    return Runs(tmp_path, cut.model)


@pytest.mark.parametrize("key", CHANGES)
def test_what_changes_the_results_is_refused_by_name_unless_allowed(again: Runs, key, capsys):
    changed, shown = json.loads(json.dumps(CHANGES[key]).replace("MODEL", str(again.model)))
    before = {path: path.read_bytes() for path in (again.folder / "run").rglob("*") if path.is_file()}
    config = again.config(**{**changed, "trainer": {"steps": 3, **changed.get("trainer", {})}})
    assert again.train(config) == 2
    error = capsys.readouterr().err
    assert f"{key}: {shown}" in error and f"--allow-change {key}" in error and "Traceback" not in error
    assert "step-000002" in error
    after = {path: path.read_bytes() for path in (again.folder / "run").rglob("*") if path.is_file()}
    assert {p: c for p, c in after.items() if p.name not in ("events.jsonl", ".lock")} == {
        p: c for p, c in before.items() if p.name != ".lock"
    }


def test_to_allow_one_change_is_not_to_allow_another() -> None:
    changes = [
        Change("learner.lr", 1, 2, True),
        Change("trainer.seed", 0, 1, True),
        Change("trackers", [], ["x"], False),
    ]
    with pytest.raises(ConfigError, match=r"began:\n +trainer\.seed: 0 -> 1\n") as refused:
        refuse(changes, {"learner.lr"}, "the run")
    assert "learner.lr" not in str(refused.value)
    refuse(changes, {"learner.lr", "trainer.seed"}, "the run")


def test_several_changes_are_refused_together_and_allowed_each_by_name(again: Runs, capsys):
    config = again.config(learner={"lr": 0.05}, sampler={"temperature": 0.9}, rewards=letters(weight=0.5))
    keys = ["learner.lr", "sampler.temperature", "rewards.0.weight"]
    assert again.train(config) == 2
    error = capsys.readouterr().err
    assert all(f"--allow-change {key}" in error for key in keys)
    words = [word for key in keys for word in ("--allow-change", key)]
    assert again.train(config, *words[:4]) == 2
    error = capsys.readouterr().err
    assert "--allow-change rewards.0.weight" in error and "learner.lr" not in error
    assert again.train(config, *words) == 0
    out = capsys.readouterr().out
    assert all(f"changed: {key}: " in out for key in keys)
    last = [record for record in records(again.folder / "run" / "attempts.jsonl") if "pid" in record][-1]
    assert last["changes"][:1] == ["sampler.temperature: 1.0 -> 0.9"] or len(last["changes"]) >= 3
    assert any(change.startswith("learner.lr: 0.01 -> 0.05") for change in last["changes"])


def test_what_does_not_change_the_results_is_printed_and_taken(again: Runs, cut: Runs, capsys):
    elsewhere = again.folder / "elsewhere"
    shutil.copytree(again.model, elsewhere)
    (again.folder / "moved").mkdir()
    rows = shutil.copy(again.rows, again.folder / "moved" / "rows.jsonl")
    config = again.config(
        model={"path": str(elsewhere)},
        data={"train": {"name": "table", "path": str(rows)}, "eval": {"name": "table", "path": str(rows)}},
        rewards=letters(timeout_s=20.0),
        learner={"lr": 1e-2, "tokens_per_microbatch": 512},
        trainer={"save_every": 3, "keep_checkpoints": 7, "eval_every": 2, "step_timeout_s": 900.0},
        trackers=[{"name": "tensorboard"}],
    )
    assert again.train(config) == 0
    out = capsys.readouterr().out
    for key in ("model.path", "data.train.path", "rewards.0.timeout_s", "learner.tokens_per_microbatch",
                "trainer.save_every", "trainer.keep_checkpoints", "data.eval.name", "trackers.0.name"):  # fmt: skip
        assert f"changed: {key}: " in out, key
    fresh = Runs(again.folder / "fresh", cut.model) if (again.folder / "fresh").mkdir() is None else again
    assert fresh.train(fresh.config()) == 0
    found, expected = outcome(again.folder / "run"), outcome(fresh.folder / "run")
    assert found["state"] == expected["state"] and found["ledger"] == expected["ledger"]


def test_other_model_files_under_the_same_path_are_refused(again: Runs, capsys):
    mine = again.folder / "model"
    shutil.copytree(again.model, mine)
    config = again.config(model={"path": str(mine)})
    weights = next(mine.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert again.train(config) == 2
    error = capsys.readouterr().err
    assert "model: " in error and "--allow-change model" in error
    assert again.train(config, "--allow-change", "model") == 0


def test_code_of_ones_own_that_was_edited_is_refused(fake_runs: Runs, capsys):
    """A reward is code of one's own, and so are files that its options name; an older version did not look at them."""
    mine, table = fake_runs.folder / "mine.py", fake_runs.folder / "table.py"
    mine.write_text("def mine(rollouts, by):\n    return [float(len(each.text)) for each in rollouts]\n")
    table.write_text("one")
    rewards = [{"name": f"{mine}:mine", "by": f"{table}:scores", "workers": 1}]
    learner = {"schedule": "constant"}

    def train(steps, *words):
        return fake_runs.train(fake_runs.config(rewards=rewards, learner=learner, trainer={"steps": steps}), *words)

    assert train(1) == 0
    for number, path in enumerate((mine, table), 2):
        path.write_text(path.read_text() + "\n# edited\n")
        assert train(number) == 2
        error = capsys.readouterr().err
        assert f"{path}: " in error and f"--allow-change {path}" in error
        assert train(number, "--allow-change", path) == 0
        assert f"changed: {path}: " in capsys.readouterr().out
    assert train(4) == 0
    older = dict.fromkeys(("model", "data.train"), "same")
    assert changed_contents(older, {**older, "mine.py": "abc"}) == []


def test_another_chat_template_or_option_is_refused_by_its_key(fake_runs: Runs, capsys):
    file = fake_runs.folder / "chat.jinja"
    mine = (fake_runs.model / "chat_template.jinja").read_text() + "{{ 'Short.' if brief }}"
    file.write_text(mine)

    def train(steps, option: Any = True, **model):
        model = {"path": str(fake_runs.model), "chat_template": str(file)} | model
        data = {"train": {"name": "table", "path": str(fake_runs.rows)}, "template_options": {"brief": option}}
        code = fake_runs.train(fake_runs.config(model=model, data=data, trainer={"steps": steps}))
        streams = capsys.readouterr()
        return code, streams.out + streams.err

    code, told = train(1)
    assert code == 0 and f"chat template {file}, template options {{brief: true}}" in told
    assert (fake_runs.folder / "run" / "config.yaml").read_text().count("brief: true") == 1
    file.write_text(mine + "{# edited #}")
    code, told = train(2)
    assert code == 2 and "--allow-change model.chat_template" in told
    file.write_text(mine)
    code, told = train(2, option=False)
    assert code == 2 and "data.template_options.brief: true -> false" in told
    file.unlink()
    code, told = train(2)
    assert code == 2 and "the chat template cannot be read" in told and "of its checkpoints" in told
    (other := fake_runs.folder / "moved.jinja").write_text(mine)
    assert train(2, chat_template=str(other))[0] == 0
    known, own = dict.fromkeys(("model", "data.train"), "same"), "the model's own"
    assert changed_contents({**known, TEMPLATE: "a"}, known) == [Change(TEMPLATE, "a", own, True)]
    assert changed_contents(known, {**known, TEMPLATE: "a"}) == [Change(TEMPLATE, own, "a", True)]


def test_other_rows_are_refused(again: Runs, capsys):
    changes: dict[str, Any] = {
        "removed": [0, 1, 2, 3, 4, 5, 6],
        "reordered": [1, 0, 2, 3, 4, 5, 6, 7],
        "one more": range(9),
        "another": [0, 1, 2, 3, 4, 5, 6, 8],
    }
    for what, numbers in changes.items():
        again.write_rows(numbers)
        assert again.train(again.config()) == 2, what
        error = capsys.readouterr().err
        assert "data.train: " in error and "--allow-change data.train" in error, what
    again.write_rows(range(8))
    rows = [json.loads(line) for line in again.rows.read_text().splitlines()]
    again.rows.write_text("".join(json.dumps(row | {"answer": "other"}) + "\n" for row in rows))
    assert again.train(again.config()) == 2
    again.write_rows(range(8))
    template = {"train": {"name": "table", "path": str(again.rows)}, "prompt_template": "{{ prompt }} Think."}
    assert again.train(again.config(data=template)) == 2
    assert "data.train: " in capsys.readouterr().err
    assert again.train(again.config()) == 0


def test_secrets_in_a_changed_config_are_not_shown(again: Runs, capsys, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "correct-horse-battery")
    url = "https://me:correct-horse@host/v1"
    config = again.config(rewards=letters(url=url, key="correct-horse-battery"), learner={"lr": 0.05})
    assert again.train(config) == 2
    error = capsys.readouterr()
    assert "correct-horse" not in error.err + error.out
    for path in (again.folder / "run").rglob("*.json*"):
        assert "correct-horse" not in path.read_text(), path


def fork(runs: Runs, source: object, name: str = "fork", **sections: Any) -> tuple[int, Path]:
    return runs.train(runs.config(name, **sections), "--resume", source), runs.folder / name


@pytest.mark.full
def test_a_new_run_can_begin_from_a_checkpoint_of_another(fake_runs: Runs):
    assert fake_runs.train(fake_runs.config(trackers=[{"name": "tensorboard"}])) == 0
    run = fake_runs.folder / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, forked = fork(fake_runs, run / "checkpoints" / "step-000002")
    assert code == 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    expected, found = outcome(run), outcome(forked)
    rollouts = expected.pop("rollouts")
    assert found.pop("rollouts") == {name: text for name, text in rollouts.items() if name > "step-000002.parquet"}
    assert found == expected
    first, _ = records(forked / "attempts.jsonl")
    assert first["resumed_from"] == 2 and first["checkpoint"] == str(run / "checkpoints" / "step-000002")
    assert [record["step"] for record in records(forked / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert steps(forked)[0] == "step-000002"  # from which it goes on when it is killed now


def test_a_fork_may_change_what_is_allowed_and_begins_from_the_newest_of_a_run(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config(trainer={"steps": 2})) == 0
    code, _ = fork(fake_runs, fake_runs.folder / "run", learner={"lr": 0.05})
    assert code == 2 and "--allow-change learner.lr" in capsys.readouterr().err
    config = fake_runs.config("fork", learner={"lr": 0.05})
    words = ["--resume", fake_runs.folder / "run", "--allow-change", "learner.lr"]
    assert fake_runs.train(config, *words) == 0
    forked = fake_runs.folder / "fork"
    assert [record["lr"] for record in records(forked / "metrics.jsonl")[1:]] == [0.01, 0.01, 0.05, 0.05]
    assert sorted(path.name for path in (forked / "rollouts").iterdir()) == [f"step-00000{i}.parquet" for i in (3, 4)]


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("save.shard", marks=pytest.mark.full),
        "checkpoint.sealed",
        pytest.param("fake.update", marks=pytest.mark.full),
    ],
)
def test_a_fork_that_is_killed_goes_on_with_the_same_command(fake_runs: Runs, point):
    assert fake_runs.train(fake_runs.config(trainer={"save_every": 9})) == 0
    config = fake_runs.config("fork", trainer={"save_every": 9, "steps": 6})
    words = ["--resume", fake_runs.folder / "run" / "checkpoints" / "step-000004"]
    fake_runs.killed(config, point, 1, *words)
    assert fake_runs.train(config, *words) == 0
    assert fake_runs.train(fake_runs.config("plain", trainer={"save_every": 9, "steps": 6})) == 0
    expected, found = outcome(fake_runs.folder / "plain"), outcome(fake_runs.folder / "fork")
    assert expected.pop("rollouts").keys() > found.pop("rollouts").keys()
    assert found == expected


@pytest.mark.full
def test_a_fork_that_never_began_is_no_run_to_go_on_with(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config()) == 0
    config, source = fake_runs.config("fork", trainer={"steps": 6}), fake_runs.folder / "run"
    fake_runs.killed(config, "checkpoint.sealed", 1, "--resume", source)
    assert fake_runs.train(config) == 2  # and not from the very beginning, as if it had been asked for that
    error = capsys.readouterr().err
    assert "--resume" in error and str(source / "checkpoints" / "step-000004") in error


def test_a_path_that_is_no_good_checkpoint_is_a_clear_error(fake_runs: Runs, capsys):
    assert fake_runs.train(fake_runs.config()) == 0
    run = fake_runs.folder / "run"
    for path in (fake_runs.folder / "nowhere", fake_runs.folder, run / "rollouts"):
        code, forked = fork(fake_runs, path)
        assert code == 3 and "there is no checkpoint" in capsys.readouterr().err
        assert not list(forked.glob("*.yaml"))
    (run / "checkpoints" / "step-000003" / "state" / "run.json").write_text("{}")
    code, _ = fork(fake_runs, run / "checkpoints" / "step-000003")
    assert code == 3 and "run.json is not the file of" in capsys.readouterr().err
    (run / "checkpoints" / "step-000004" / "state" / "run.json").write_text("{}")
    code, forked = fork(fake_runs, run)
    assert code == 0 and records(forked / "attempts.jsonl")[0]["resumed_from"] == 2
    code = fake_runs.train(fake_runs.config("other"), "--resume", run, "--strict-resume")
    assert code == 3 and "leave out --strict-resume" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("resume", ["never", "path"])
def test_a_folder_that_holds_a_run_is_not_taken_for_a_new_one(fake_runs: Runs, resume, capsys):
    for name in ("run", "other"):
        assert fake_runs.train(fake_runs.config(name)) == 0
    before = {path: path.read_bytes() for path in (fake_runs.folder / "run").rglob("*") if path.is_file()}
    word = fake_runs.folder / "other" if resume == "path" else resume
    assert fake_runs.train(fake_runs.config(), "--resume", word) == 2
    error = capsys.readouterr().err
    assert "already holds a run" in error and "--resume auto" in error
    assert {path: path.read_bytes() for path in (fake_runs.folder / "run").rglob("*") if path.is_file()} == before


@pytest.mark.full
def test_a_fork_takes_the_images_of_carried_groups_along(models, picture, tmp_path, capsys):
    rows = []
    for number in range(8):
        image = tmp_path / f"{number}.png"
        image.write_bytes(picture(56, 56, number).data)
        rows.append({"id": f"r{number}", "prompt": "<image>which?", "images": [image.name], "answer": str(number)})
    with fake(tmp_path, models("qwen2_5_vl")) as runs:
        runs.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = skipping(tmp_path) | {"trainer": {"steps": 6, "keep_checkpoints": 9}}
        assert runs.train(runs.config(**options)) == 0
        run = tmp_path / "run"
        states = {
            path.name: json.loads((path / "state" / "run.json").read_text())["trainer"]["carried_groups"]
            for path in sorted(run.glob("checkpoints/step-*"))[:-1]
        }
        name = next(name for name, carried in states.items() if carried)
        hashes = {image["hash"] for record in states[name] for image in record["images"]}
        code, forked = fork(runs, run / "checkpoints" / name, **options)
        assert code == 0 and hashes
        assert hashes <= {path.stem for path in (forked / "media").iterdir()}
        assert outcome(forked)["state"] == outcome(run)["state"]
        shutil.copytree(run / "checkpoints" / name, tmp_path / "lone" / name)  # a checkpoint without its run
        code, _ = fork(runs, tmp_path / "lone" / name, "lonely", **options)
        assert code == 3
        error = capsys.readouterr().err
        assert "Traceback" not in error and ".png" in error
        image = run / "media" / f"{min(hashes)}.png"
        other = next(path for path in (run / "media").iterdir() if path != image)
        shutil.copy(image, tmp_path / "copy.png")
        image.unlink()
        image.symlink_to(tmp_path / "copy.png")
        assert fork(runs, run / "checkpoints" / name, "linked", **options)[0] == 3
        assert "as a file of its own" in capsys.readouterr().err
        image.unlink()
        shutil.copy(other, image)
        assert fork(runs, run / "checkpoints" / name, "swapped", **options)[0] == 3
        assert "does not hold the pixels of its hash" in capsys.readouterr().err


def test_two_processes_do_not_share_a_folder(fake_runs: Runs, capsys):
    fake_runs.killed(fake_runs.config(), "fake.update", 3)
    with (fake_runs.folder / "run" / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert fake_runs.train(fake_runs.config()) == 5
    assert "another process is using" in capsys.readouterr().err
    assert fake_runs.train(fake_runs.config()) == 0


def test_half_a_line_at_the_end_of_a_history_is_taken_away(fake_runs: Runs):
    assert fake_runs.train(fake_runs.config("plain")) == 0
    config, run = fake_runs.config(), fake_runs.folder / "run"
    fake_runs.killed(config, "fake.update", 3)
    torn = '{"step": 2, "attempt": 1, "samples": [[0, "r'
    for name in ("metrics", "ledger", "events", "attempts"):
        with (run / f"{name}.jsonl").open("a") as file:
            file.write(torn)
    assert fake_runs.train(config) == 0
    for name in ("metrics", "ledger", "events", "attempts"):
        assert torn not in (run / f"{name}.jsonl").read_text() and records(run / f"{name}.jsonl")
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_a_broken_line_within_a_history_is_said(fake_runs: Runs, capsys):
    fake_runs.killed(fake_runs.config(), "fake.update", 3)
    metrics = fake_runs.folder / "run" / "metrics.jsonl"
    metrics.write_text("{broken\n" + metrics.read_text())
    assert fake_runs.train(fake_runs.config()) == 3
    error = capsys.readouterr().err
    assert "a line of the run's history is no JSON" in error and "metrics.jsonl" in error


def test_attempts_tell_where_each_began_and_how_it_ended(fake_runs: Runs):
    config, run = fake_runs.config(), fake_runs.folder / "run"
    fake_runs.killed(config, "fake.update", 2)
    with at("fake.update", 2, stop):
        assert fake_runs.train(config) == 10
    assert fake_runs.train(config) == 0
    found = records(run / "attempts.jsonl")
    begun, ended = found[::2], found[1::2]
    assert [record["attempt"] for record in found] == [1, 1, 2, 2, 3, 3]
    assert [record["resumed_from"] for record in begun] == [None, 1, 3]
    assert {record["pid"] for record in begun} == {os.getpid()} and all(record["host"] for record in begun)
    assert begun[1]["checkpoint"] == str(run / "checkpoints" / "step-000001") and begun[0]["checkpoint"] is None
    assert [record["exit_code"] for record in ended[1:]] == [10, 0]
    assert "SIGTERM" in ended[1]["message"]
    assert all(one["time"] <= other["time"] for one, other in itertools.pairwise(found))
    metrics = {record["step"]: record["attempt"] for record in records(run / "metrics.jsonl")}
    assert metrics == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3}


@pytest.fixture
def evaluated(fake_runs: Runs) -> Callable[..., Path]:
    """A config whose run evaluates after every second step."""
    data = {
        "train": {"name": "table", "path": str(fake_runs.rows)},
        "eval": {"name": "table", "path": str(fake_runs.rows)},
    }
    return lambda name="run", **trainer: fake_runs.config(name, data=data, trainer={"eval_every": 2, **trainer})


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(fake_runs: Runs, evaluated):
    assert fake_runs.train(evaluated("plain")) == 0
    run = fake_runs.folder / "run"
    for count in (1, 2, 2):  # after the checkpoints of steps 0, 2 (of another attempt) and 4
        fake_runs.killed(evaluated(), "checkpoint.renamed", count)
        assert "eval/accuracy" not in (records(run / "metrics.jsonl") or [{}])[-1] or count == 1
    assert fake_runs.train(evaluated()) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")
    last = {record["step"]: record for record in records(run / "metrics.jsonl")}
    assert [step for step, values in last.items() if "eval/accuracy" in values] == [0, 2, 4]


def test_a_line_of_an_attempt_that_was_undone_is_not_the_checkpoints(fake_runs: Runs, evaluated):
    assert fake_runs.train(evaluated()) == 0
    file = fake_runs.folder / "run" / "metrics.jsonl"
    *others, last = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*others, last.replace('"attempt": 1', '"attempt": 0')]))  # the checkpoint is the first's
    assert fake_runs.train(evaluated()) == 0
    found = records(file)[-1]
    assert (found["step"], found["attempt"]) == (4, 2)
    assert found["eval/accuracy"] == json.loads(last)["eval/accuracy"]


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_next_start(fake_runs: Runs, evaluated):
    assert fake_runs.train(evaluated("plain")) == 0
    with at("fake.generate", 7, stop):  # evaluations of 0 and 2, four steps, and this one
        assert fake_runs.train(evaluated()) == 10
    run = fake_runs.folder / "run"
    assert steps(run)[-1] == "step-000004" and records(run / "metrics.jsonl")[-1]["step"] == 3
    assert fake_runs.train(evaluated()) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_a_signal_while_a_step_is_logged_loses_no_step(fake_runs: Runs, monkeypatch):
    """It comes after the moment at which the step's checkpoint is due."""
    assert fake_runs.train(fake_runs.config("plain", trainer={"save_every": 100})) == 0
    append = RunDirectory.append_metrics

    def append_and_stop(directory, step, metrics):
        line = append(directory, step, metrics)
        if step == 2:
            stop()
        return line

    config, run = fake_runs.config(trainer={"save_every": 100}), fake_runs.folder / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", append_and_stop)
        assert fake_runs.train(config) == 10
    assert steps(run)[-1] == "step-000002" and records(run / "metrics.jsonl")[-1]["step"] == 2
    assert fake_runs.train(config) == 0
    assert [record["step"] for record in records(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_an_evaluation_that_fails_loses_no_step(fake_runs: Runs, evaluated, capsys):
    assert fake_runs.train(evaluated("plain")) == 0

    def fail() -> None:
        raise ValueError("a bug in generation")

    with at("fake.generate", 4, fail):  # the evaluation of step 2
        assert fake_runs.train(evaluated()) == 1
    run = fake_runs.folder / "run"
    assert [record["step"] for record in records(run / "metrics.jsonl")] == [0, 1, 2]
    assert steps(run)[-1] == "step-000002" and "a bug in generation" in capsys.readouterr().err
    assert fake_runs.train(evaluated()) == 0
    assert outcome(run) == outcome(fake_runs.folder / "plain")


def test_the_ledger_leaves_out_what_is_undone(fake_runs: Runs):
    config, run = fake_runs.config(trainer={"save_every": 2}, learner={"minibatches": 2}), fake_runs.folder / "run"
    fake_runs.killed(config, "fake.update", 8)  # the last of step 4; 5, 6 and 7 are undone with step 3
    assert [(r["step"], r["update"]) for r in read_ledger(run)] == [
        (1, 1),
        (1, 2),
        (2, 3),
        (2, 4),
        (3, 5),
        (3, 6),
        (4, 7),
    ]
    assert fake_runs.train(config) == 0
    ledger = read_ledger(run)
    assert [(record["step"], record["update"]) for record in ledger] == [((i + 1) // 2, i) for i in range(1, 9)]
    assert [record["attempt"] for record in ledger] == [1] * 4 + [2] * 4
    for step in range(1, 5):
        trained = sorted(tuple(sample) for r in ledger if r["step"] == step for sample in r["samples"])
        rolled = rollouts(run, step)
        assert trained == sorted((r["epoch"], r["prompt_id"], r["index"]) for r in rolled) and len(set(trained)) == 12


def test_a_damaged_checkpoint_after_a_lost_rank_is_not_counted_among_the_newest(fake_runs: Runs):
    trainer = {"steps": 6, "save_every": 2, "keep_checkpoints": 1, "best_metric": "lr"}  # which keeps the earliest
    assert fake_runs.train(fake_runs.config("plain", trainer=trainer)) == 0
    config, run = fake_runs.config(trainer=trainer), fake_runs.folder / "run"

    def lose() -> None:
        (run / "checkpoints" / "step-000004" / "model" / "model.safetensors").write_bytes(b"")
        raise RankLostError("rank 0 was killed")

    with at("fake.update", 5, lose), at("fake.update", 5, stop):  # in step 5, and in step 3 again
        assert fake_runs.train(config) == 10
    assert [event["step"] for event in events(run, "checkpoint_damaged")] == [4]
    assert steps(run) == ["best", "damaged-step-000004", "step-000002", "step-000003"]
    assert fake_runs.train(config) == 0
    assert [event["step"] for event in events(run, "resumed")] == [2, 3]
    assert outcome(run) == outcome(fake_runs.folder / "plain")


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.full)])
def test_a_lost_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(fake_runs: Runs, count):
    trainer = {"steps": 6, "save_every": 2}
    assert fake_runs.train(fake_runs.config("plain", trainer=trainer)) == 0
    source, run = fake_runs.folder / "plain", fake_runs.folder / "run"

    def lose() -> None:
        raise RankLostError("rank 0 was killed")

    with at("fake.update", count, lose):
        assert fake_runs.train(fake_runs.config(trainer=trainer)) == 0
    assert outcome(run) == outcome(source)
    assert len(events(run, "restart")) == 1
    with at("save.shard", 1, lose):  # a fork that has no checkpoint yet begins again where it began
        assert fork(fake_runs, source / "checkpoints" / "step-000004", trainer=trainer)[0] == 0
    assert outcome(fake_runs.folder / "fork")["ledger"] == outcome(source)["ledger"]
    assert outcome(fake_runs.folder / "fork")["state"] == outcome(source)["state"]


@pytest.mark.full
def test_memory_descriptors_and_threads_are_flat_over_500_steps(fake_runs: Runs):
    check_flat(fake_runs, 500, 16 * 2**20)  # 40 KiB a step would be seen


@pytest.mark.slow
def test_memory_descriptors_threads_and_seconds_are_flat_over_5000_steps(fake_runs: Runs):
    check_flat(fake_runs, 5000, 32 * 2**20)  # 7 KiB a step would be seen
    times = [record["time"] for record in records(fake_runs.folder / "run" / "metrics.jsonl")]
    parts = times[50:450], times[-400:]
    # The fastest tenth: other work on the machine comes and goes.
    early, late = (statistics.quantiles((b - a for a, b in itertools.pairwise(part)), n=10)[0] for part in parts)
    print(f"{early * 1e3:.1f} ms a step around step 250, {late * 1e3:.1f} ms at the end")
    assert late < 1.5 * early, (early, late)


def check_flat(runs: Runs, num_steps: int, most_bytes: int) -> None:
    """The driver holds as much after 100 steps as at the end; checkpoints, evaluations and a tracker take part."""
    import psutil

    process, taken = psutil.Process(), []

    def measure() -> None:
        for thread in threading.enumerate():
            if thread.name in ("mmrl-prompts", "mmrl-rollouts"):  # they end when their step is prepared or written
                thread.join()
        gc.collect()
        threads = process.num_threads()
        for _ in range(20):  # the kernel counts a thread for a moment after it was joined
            time.sleep(0.02)
            threads = min(threads, process.num_threads())
        taken.append((process.memory_info().rss, process.num_fds(), threads))

    rows = {"name": "table", "path": str(runs.rows)}
    config = runs.config(
        data={"train": rows, "eval": dict(rows)},
        trainer={"steps": num_steps, "save_every": 20, "eval_every": 50, "keep_checkpoints": 2},
        trackers=[{"name": "tensorboard"}],
    )
    half = num_steps // 2 + 50
    with at("fake.update", 100, measure), at("fake.update", half, measure), at("fake.update", num_steps, measure):
        assert runs.train(config) == 0
    (rss, descriptors, threads), middle, last = taken
    print([each[0] / 2**20 for each in taken])
    assert last[1:] == middle[1:] == (descriptors, threads)
    assert last[0] - rss < most_bytes, [each[0] / 2**20 for each in taken]


EVEN = """\
def even(rollouts):
    return [float((rollout.token_ids % 2 == 0).mean()) for rollout in rollouts]
"""
KILLED = """\
import os, signal, sys
from mmrl.system import failpoints
from mmrl.commands.cli import main

reached = []

def inject(name):
    reached.append(name)
    if reached.count("checkpoint.renamed") == 2:
        os.kill(os.getpid(), signal.SIGKILL)

failpoints.inject = inject
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["grpo", "dapo", "remax"])
@pytest.mark.slow  # test_adapters.py has a run that is killed like this, and test_kills.py the fake engine's
def test_the_real_engine_goes_on_to_the_same_bits_after_a_kill(name, models, household, tmp_path):
    """vLLM and DeepSpeed: killed when the checkpoint of step 1 is there, before the step is logged."""
    (tmp_path / "even.py").write_text(EVEN)
    (tmp_path / "killed.py").write_text(KILLED)
    runs = Runs(tmp_path, models("qwen2"))
    rows = {"name": "table", "path": str(runs.rows)}
    options: dict[str, Any] = {
        "model": {"path": str(runs.model), "dtype": "float32"},
        "rewards": [{"name": f"{tmp_path / 'even.py'}:even"}],
        "data": {"train": rows, "eval": dict(rows)},
        "algorithm": {"name": name, "kl": {"coef": 0.05, "target": 0.001}},
        "sampler": {"group_size": 3, "max_new_tokens": 8, "engine": {"kv_cache_memory_bytes": 2**26}},
        "learner": {"lr": 1e-3, "zero_stage": 0, "minibatches": 2, "tokens_per_microbatch": 128},
        "trainer": {"steps": 3, "eval_every": 2},
    }
    done = household.run("train", str(runs.config("plain", **options)), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    config = str(runs.config(**options))
    killed = household.call("killed.py", "train", config, folder=tmp_path)
    assert killed.returncode == -9 and steps(tmp_path / "run")[-1] == "step-000001", killed.stderr
    done = household.run("train", config, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    expected, found = outcome(tmp_path / "plain"), outcome(tmp_path / "run")
    for part in expected:
        assert found[part] == expected[part], part
    assert [event["step"] for event in events(tmp_path / "run", "resumed")] == [1]
    assert all(values["policy/grad_norm"] > 0 for step, values in expected["metrics"].items() if step)
