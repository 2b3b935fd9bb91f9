"""``mmrl check`` on whole configs: what it says of a sound one, and that it names each planted fault."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from PIL import Image, ImageDraw

from mmrl.commands.cli import main
from mmrl.config.load import from_mapping
from mmrl.data.prompts import OVERLONG
from mmrl.engine.network import family
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.features import Limit
from mmrl.runs.budget import Arithmetic, disk
from mmrl.step.gather import Given, Rollouts

ANSWERS = [f"\\frac {{ {number} }} {{ 7 }}" for number in (8, 9, 10, 11, 12, 13, 15, 16, 17, 18)] * 2


def picture(mode: str, seed: int) -> str:
    """A drawn PNG file, in base64."""
    image = Image.new("RGBA", (84, 56), (0, 0, 0, 0) if mode == "RGBA" else "white")
    ImageDraw.Draw(image).ellipse((5, 5, 20 + seed, 30), fill=(200, 10 * seed, 0, 255))
    stream = io.BytesIO()
    image.convert(mode).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode()


def rows(answers: Sequence[str] = ANSWERS, mode: str = "RGB") -> list[dict[str, Any]]:
    return [
        {
            "problem": f"<image>What is x in figure {index}?",
            "images": [picture(mode, index)],
            "answer": answer,
            "solution": f"It is half of it, so x is \\boxed{{{ANSWERS[index]}}}.",
        }
        for index, answer in enumerate(answers)
    ]


Check = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def check(models: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs ``mmrl check --json`` on rows; exit code, answer and stderr."""

    def run(table: Sequence[dict[str, Any]], **sections: Any) -> tuple[int, dict[str, Any], str]:
        for index, row in enumerate(table):
            for data in row["images"]:
                (tmp_path / f"{index}.png").write_bytes(base64.b64decode(data))
        table = [row | {"images": [f"{index}.png"] * len(row["images"])} for index, row in enumerate(table)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
        config = {
            "model": {"path": str(models("qwen2_5_vl"))},
            "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}},
            "rewards": [{"name": "math"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"group_size": 4, "max_new_tokens": 32},
            "trainer": {"prompts_per_step": 4, "steps": 10, "run_dir": str(tmp_path / "run")},
        }
        for key, value in sections.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        code = main(["check", str(path), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


def test_a_sound_config_is_described(check: Check) -> None:
    code, found, _ = check(rows())
    assert code == 0 and found["errors"] == [] and found["warnings"] == []
    train = found["train"]
    assert train["prompts"] == train["rows"] == len(ANSWERS) and train["dropped"] == 0
    assert sum(count for _, _, count in train["tokens_histogram"]) == len(ANSWERS)
    assert train["image_modes"] == {"RGB": 20} and train["image_width"] == [84, 84, 84]
    tokens = (84 // 28) * (56 // 28)
    assert train["image_tokens_fraction"] == pytest.approx(tokens / train["tokens_mean"], rel=1e-3)
    (references,) = found["train_references"]
    assert references == {
        "reward": "'math'",
        "graded": 20,
        "unscored": 0,
        "unscored_rows": [],
        "ignores_references": False,
        "without_reference": 0,
        "rejected": [],
        "accepted_only_as_spelled": [],
        "accepted_only_without_box": [],
        "towers": [],
        "slow": [],
        "demonstrations": 20,
        "demonstrations_contradict_reference": [],
    }
    assert "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is x" in found["samples"][0]["text"]
    assert found["samples"][0]["image_tokens"] == [tokens]
    trial = {each["answer"]: each["reward"] for each in found["trials"][0]["answers"]}
    assert trial == {"right": 1.0, "wrong": 0.0, "empty": 0.0, "truncated": 0.0}
    batches = found["batches"]
    assert (batches["completions_per_step"], batches["updates"], batches["epochs_of_data"]) == (16, 10, 2.0)
    assert found["disk"]["checkpoints"] > 0 and found["disk"]["needed"] < found["disk"]["free"]


def test_a_wrong_column_is_named(check: Check, tmp_path: Path) -> None:
    data = {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl"), "answer": "anwser"}}
    code, _, error = check(rows(), data=data)
    assert code == 3 and "anwser" in error and "answer" in error


@pytest.mark.full
def test_swapped_references_are_found_by_the_demonstrations(check: Check) -> None:
    code, found, error = check(rows(ANSWERS[1:] + ANSWERS[:1]))
    assert code == 3
    assert (
        "20 of 20 demonstrations do not earn their row's reference answer, but most of them earn another row's" in error
    )
    assert len(found["train_references"][0]["demonstrations_contradict_reference"]) == 20


@pytest.mark.full
def test_demonstrations_that_the_reward_does_not_read_are_a_warning(check: Check) -> None:
    prose = [row | {"solution": "It follows from Pythagoras."} for row in rows()]
    code, found, _ = check(prose)
    assert code == 0
    assert "20 of 20 demonstrations do not earn their row's reference answer: reward 'math' may not read them" in str(
        found["warnings"]
    )


def test_references_that_no_answer_can_match_are_named(check: Check) -> None:
    sentence = "because the two triangles are similar, and " * 10
    code, found, error = check(rows([*ANSWERS[:18], sentence, sentence]))
    assert code == 3
    assert "Reward 'math' accepts no answer to 2 of 20 reference answers: these rows teach nothing" in error
    assert [each["prompt"] for each in found["train_references"][0]["rejected"]] == ["rows/18", "rows/19"]


@pytest.mark.full
def test_references_that_graders_hang_on_are_named(check: Check) -> None:
    code, found, error = check(rows([*ANSWERS[:18], "9**9**9", "99999999!"]))
    (text,) = [warning for warning in found["warnings"] if "9**9**9" in warning]
    assert text.startswith("data.train, column answer: 2 reference answers are powers of powers or factorials")
    assert code == 3 and "Reward 'math' cannot grade in time" in error
    assert "'99999999!'" in [each["reference"] for each in found["train_references"][0]["slow"]]


def test_transparent_images_are_counted(check: Check) -> None:
    code, found, _ = check(rows(mode="RGBA"))
    assert code == 0
    assert found["train"]["image_modes"] == {"RGBA": 20} and found["train"]["images_transparent"] == 20


def test_too_long_prompts_are_counted_and_named(check: Check) -> None:
    table = rows()
    for row in table[:12]:
        row["problem"] += " and then some more" * 40
    code, found, _ = check(table, data={"max_prompt_tokens": 100})
    assert code == 0 and found["train"]["dropped"] == 12
    assert found["train"]["dropped_by_cause"] == {OVERLONG: 12}
    assert f"data.train: more than half of the rows are dropped (12 x {OVERLONG})" in found["warnings"]
    code, _, error = check(table, data={"max_prompt_tokens": 10})
    assert code == 3 and "No row is left" in error


def test_a_reward_that_fails_is_named_and_the_rest_is_still_said(check: Check, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def mine(rollouts):\n    raise ConnectionError('nobody listens')\n")
    code, found, error = check(rows(), rewards=[{"name": "math"}, {"name": f"{tmp_path / 'mine.py'}:mine"}])
    assert code == 4 and "mine' raised ConnectionError: nobody listens" in error
    assert found["batches"] and found["disk"] and found["train_references"][0]["rejected"] == []


@pytest.mark.full
def test_rows_are_graded_by_the_reward_of_their_source(check: Check, tmp_path: Path) -> None:
    letters = [{"question": f"Which one is {i}?", "options": ["3", "4"], "answer": "AQ"[i % 2]} for i in range(20)]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in letters))
    code, found, error = check(
        rows(),
        data={"mix": [{"name": "table", "path": str(tmp_path / "letters.jsonl"), "label": "letters"}]},
        rewards=[
            {"name": "math", "label": "right", "sources": ["table"]},
            {"name": "choice", "label": "right", "sources": ["letters"]},
        ],
    )
    first, second = found["train_references"]
    assert (first["reward"], first["graded"], first["rejected"]) == ("'right' (math, table)", 20, [])
    assert second["reward"] == "'right' (choice, letters)"
    assert second["unscored"] + len(second["rejected"]) == 10
    assert code == 3 and "'right' (choice, letters)" in error
    assert [each["source"] for each in found["trials"]] == ["table", "letters"]
    assert found["train"]["chosen"]["data.mix.0"]["prompt"] == "question"
    assert found["batches"]["epochs_by_source"] == {"table": 1.0, "letters": 1.0}


@pytest.mark.full
def test_a_service_that_only_the_second_source_needs_and_that_is_away_is_named(check: Check, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"problem": "what is 1+1?", "answer": "2"}\n' * 4)
    away = {"name": "http", "url": "http://127.0.0.1:9/score", "retries": 0, "sources": ["more"]}
    code, found, error = check(
        rows(),
        data={"mix": [{"name": "table", "path": str(tmp_path / "more.jsonl"), "label": "more"}]},
        rewards=[{"name": "math"}, away],
    )
    assert code == 4 and "http://127.0.0.1:9/score" in error
    assert found["train_references"][0]["graded"] == 24


@pytest.mark.parametrize(("answer", "graded"), [([3.0, 1.5], 20), (4.0, 20), ("", 0)])
def test_references_that_are_no_text_are_answered_as_a_model_would(check: Check, answer: Any, graded: int) -> None:
    table = [{"problem": f"what is {i}?", "answer": answer} for i in range(20)]
    (code, found, error) = check([row | {"images": [picture("RGB", i)]} for i, row in enumerate(table)])
    assert found["train_references"][0]["graded"] == graded
    assert code == (0 if graded else 3), error


def test_a_reward_that_gives_everything_the_same_is_an_error(check: Check, tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("def flat(rollouts):\n    return [1.0] * len(rollouts)\n")
    code, _, error = check(rows(), rewards=[{"name": f"{tmp_path / 'flat.py'}:flat"}])
    assert code == 3 and "A right answer earns 1 and a wrong one 1" in error
    assert "accepts no answer to 20 of 20 reference answers" in error


def test_a_reason_that_a_reward_gives_for_what_it_cannot_score_is_shown(check: Check, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "from mmrl import Unscored\n\n"
        "def picky(rollouts):\n"
        "    return [float(str(r.answer) in r.text) if r.text else Unscored('found no text') for r in rollouts]\n"
    )
    code, found, error = check(rows(), rewards=[{"name": f"{tmp_path / 'picky.py'}:picky"}])
    assert code == 0, error
    answers = {each["answer"]: each.get("reasons") for each in found["trials"][0]["answers"]}
    assert answers == {"right": None, "wrong": None, "empty": {"picky": "found no text"}, "truncated": None}


@pytest.mark.full
def test_a_reward_that_judges_style_is_a_note_unless_it_gives_everything_the_same(check: Check, tmp_path: Path) -> None:
    (tmp_path / "style.py").write_text(
        "def short(rollouts):\n    return [1.0 / (1 + len(r.text)) for r in rollouts]\n"
        "def tidy(rollouts):\n    return [1.0 for r in rollouts]\n"
    )
    style = f"{tmp_path / 'style.py'}"
    code, found, error = check(rows(), rewards=[{"name": f"{style}:tidy"}, {"name": "math"}])
    assert code == 0, error
    assert found["train_references"][0]["ignores_references"] and "judge their style" in str(found["warnings"])
    long = [row | {"answer": "1", "solution": "1"} for row in rows()]
    for row in long:
        row["answer"] = "the triangles are similar " * 3
    code, found, error = check(long, rewards=[{"name": f"{style}:short"}])
    assert code == 0, error
    assert "reward 'short' does not read the reference answers" in str(found["warnings"])


def test_rows_without_a_reference_are_not_blamed_on_a_reward_that_needs_none(check: Check, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(
        "def short(rollouts):\n"
        "    return [float(r.answer is None or str(r.answer) in r.text) / (1 + len(r.text)) for r in rollouts]\n"
    )
    (tmp_path / "sums.jsonl").write_text('{"problem": "what is 1+1?", "answer": "2"}\n' * 4)
    code, found, error = check(
        rows(),
        data={
            "train": {"name": "table", "path": str(tmp_path / "rows.jsonl"), "answer": ""},
            "mix": [{"name": "table", "path": str(tmp_path / "sums.jsonl"), "label": "sums"}],
        },
        rewards=[{"name": f"{tmp_path / 'short.py'}:short"}],
    )
    (warning,) = found["warnings"]
    assert code == 0 and "an answer, and not 0 or 1 alone: accuracy is the share of value 1" in warning, error
    (references,) = found["train_references"]
    assert (references["graded"], references["without_reference"], references["unscored"], references["rejected"]) == (
        4,
        20,
        0,
        [],
    )
    without, with_reference = found["trials"]
    assert [answer["answer"] for answer in without["answers"]] == ["one", "another", "empty", "truncated"]
    assert [answer["answer"] for answer in with_reference["answers"]] == ["right", "wrong", "empty", "truncated"]


def test_rows_without_a_reference_are_blamed_where_the_reward_cannot_score_them(check: Check, tmp_path: Path) -> None:
    code, found, error = check(
        rows(), data={"train": {"name": "table", "path": str(tmp_path / "rows.jsonl"), "answer": ""}}
    )
    assert code == 3 and "Reward 'math' cannot score 20 of 20 rows, whatever the answer" in error
    assert "where:    data.train: rows/0; rows/1;" in error and "rows/9; and 10 more" in error
    assert (found["train_references"][0]["graded"], found["train_references"][0]["without_reference"]) == (0, 0)


def test_images_of_observations_need_room_for_each_turn_up_to_their_limit() -> None:
    def media(observed_bytes: int, **limits: int) -> int:
        plain: dict[str, Any] = {
            "model": {"path": "m"},
            "data": {"train": {"name": "table"}},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "game", **limits},
            "sampler": {"group_size": 4},
            "trainer": {"steps": 10, "prompts_per_step": 3},
        }
        return disk(from_mapping(plain), 1000, [10], 77, observed_bytes=observed_bytes).media

    assert media(1000, max_turns=6, max_images=5) == 77 + 10 * 3 * 4 * 5 * 1000
    assert media(1000, max_turns=2, max_images=5) == 77 + 10 * 3 * 4 * 2 * 1000
    assert media(0, max_turns=2, max_images=5) == 77


@pytest.mark.parametrize(("dtype", "weight", "optimizer"), [("float32", 4, 8), ("bfloat16", 2, 12)])
def test_optimizers_states_that_are_not_saved_need_no_room(dtype: str, weight: int, optimizer: int) -> None:
    def needed(save: str, reset: int | None = None) -> int | None:
        plain: dict[str, Any] = {
            "model": {"path": "m", "dtype": dtype},
            "data": {"train": {"name": "table"}},
            "algorithm": {"name": "grpo"},
            "reference": {"reset_every": reset},
            "trainer": {"keep_checkpoints": 3, "save_optimizer": save},
        }
        return disk(from_mapping(plain), 1000, [10], 0).checkpoints

    assert needed("all") == 1000 * 4 * (weight + optimizer)
    assert needed("last") == 1000 * (4 * weight + 2 * optimizer)
    assert needed("none") == 1000 * 4 * weight
    assert needed("all", reset=5) == 1000 * 4 * (2 * weight + optimizer)  # the reference is there too


def test_a_run_that_learns_from_demonstrations_has_numbers_of_its_own() -> None:
    plain: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": {"name": "table"}},
        "algorithm": {"name": "sft"},
        "sampler": {"group_size": 8},
        "learner": {"minibatches": 2},
        "trainer": {"steps": 10, "prompts_per_step": 16},
        "cluster": {"name": "ray", "ranks": 2},
    }
    config = from_mapping(plain)
    learned = Arithmetic(config, [("table", 200, 1.0)], 10**6, {}, Given)
    assert learned.lines() == [
        "16 demonstrations a step; 2 optimizer steps of 8",
        "10 steps = 0.8 epochs of 200 rows, 20 optimizer steps",
        "8 demonstrations per rank, 2 ranks",
    ]
    assert list(learned.warnings()) == [] and "completions_per_step" not in learned.data()
    room = disk(config, 1000, [10], 0, demonstrated=50.0)
    assert room.rollouts == 160 * (50 * 32 + 10 * 8) + 10 * 15_000 < disk(config, 1000, [10], 0).rollouts / 8
    data = {"train": {"name": "table"}, "eval": {"name": "table"}}
    evaluating = from_mapping({**plain, "data": data, "rewards": [{"name": "right"}]})
    assert disk(evaluating, 1000, [10], 0, demonstrated=50.0, evaluated={"": 3}).rollouts > room.rollouts
    sampled = Arithmetic(config, [("table", 200, 1.0)], 10**6, {}, Rollouts)
    assert sampled.lines()[0] == "16 prompts x 8 = 128 completions a step; 2 optimizer steps of 64"
    assert len(list(sampled.warnings())) == 1


@pytest.mark.full
def test_a_full_disk_and_an_overlap_with_the_evaluation_are_found(check: Check, tmp_path: Path) -> None:
    same = {"name": "table", "path": str(tmp_path / "rows.jsonl")}
    code, found, error = check(
        rows(),
        data={"eval": same, "max_prompt_tokens": 100},
        trainer={"steps": 10**8},
        sampler={"max_new_tokens": 100},
        learner={"tokens_per_microbatch": 128},
    )
    assert code == 5 and "The run may write" in error
    assert "data.eval: 20 of 20 rows ask and show the same as a row of data.train" in found["warnings"]
    assert any("more than learner.tokens_per_microbatch" in warning for warning in found["warnings"])
    assert found["eval_references"][0]["graded"] == 20


@pytest.mark.full
def test_adapters_take_the_room_that_they_take_and_their_targets_are_looked_for(check: Check) -> None:
    _, whole, _ = check(rows())
    code, found, _ = check(rows(), model={"lora": {"rank": 4, "targets": ["vision"]}})
    assert code == 0 and 0 < found["disk"]["checkpoints"] < whole["disk"]["checkpoints"] / 20
    code, _, error = check(rows(), model={"lora": {"targets": ["eyes"]}})
    assert code == 2 and "no linear layer of the model is meant by 'eyes'" in error


@pytest.mark.full
def test_weights_in_4_bits_are_told_of_and_refused_where_they_cannot_be(
    check: Check, models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = {"lora": {"rank": 4}, "quantize": "nf4"}
    code, found, _ = check(rows(), model=quantized)
    assert code == 0 and found["disk"]["checkpoints"] > 0
    with monkeypatch.context() as patched:
        patched.setattr("mmrl.engine.network.quantization.find_spec", lambda name: None)
        code, _, error = check(rows(), model=quantized)
        assert code == 5 and "bitsandbytes is not installed" in error and "pip install" in error
    folder = tmp_path / "awq"
    shutil.copytree(models("qwen2_5_vl"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    code, _, error = check(rows(), model={"path": str(folder)})
    assert code == 2 and "stored quantised (awq), and such weights cannot be trained" in error
    assert "name the model that it was quantised from" in error


def test_what_train_would_refuse_is_refused_before_it(check: Check, tmp_path: Path) -> None:
    sampler = {"engine": {"max_num_seq": 4, "enforce_eager": True}}
    code, _, error = check(rows(), sampler=sampler)
    assert code == 2 and "vLLM has no argument max_num_seq" in error and "did you mean max_num_seqs?" in error
    (tmp_path / "file").write_text("")
    code, _, error = check(rows(), trainer={"run_dir": str(tmp_path / "file" / "run")})
    assert code == 2 and f"run cannot be made: {tmp_path / 'file'} is not a folder" in error
    code, _, error = check(rows(), trainer={"run_dir": str(tmp_path)})  # it has the config and the rows
    assert code == 2 and "holds other files, and no run" in error


@pytest.mark.parametrize("device", ["cpu", None])
def test_a_feature_that_the_models_family_lacks_is_a_warning_on_one_device_and_refused_on_all(
    device: Literal["cpu"] | None, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = replace(FAMILIES["qwen2_5_vl"], limits={"vllm": Limit("refused", "not built for it", device)})
    monkeypatch.setattr(family, "FAMILIES", FAMILIES | {"qwen2_5_vl": limited})
    code, found, error = check(rows())
    told = "models of type qwen2_5_vl have no sampler `vllm`: not built for it"
    if device is None:
        assert code == 2 and told in error and limited.line in error
    else:
        refused = "a run on a device like this machine's is refused"
        assert code == 0 and found["warnings"] == [f"sampler.name: vllm: {told}; {refused}"]


def test_training_rows_without_pictures_are_told_where_some_are_expected(check: Check, tmp_path: Path) -> None:
    table = [row | {"problem": row["problem"].removeprefix("<image>"), "context": "c"} for row in rows()]
    train = {"name": "table", "path": str(tmp_path / "rows.jsonl"), "images": ""}
    _, found, _ = check(table, data={"train": train})
    context, blind = found["warnings"]
    assert context.startswith("data.train: column 'context' (row 0) looks like a part of the question")
    assert blind.startswith("data.train: no row has an image, and the model (qwen2_5_vl) reads images: ")
    _, found, _ = check(table, data={"train": train, "eval": train | {"images": "images"}})
    assert "data.train: no row has an image, and rows of data.eval have: " in str(found["warnings"])


def test_epochs_are_told_in_steps(check: Check) -> None:
    code, found, _ = check(rows(), trainer={"steps": None, "epochs": 1.5})
    assert code == 0 and (found["batches"]["steps"], found["batches"]["epochs_of_data"]) == (8, 1.6)


@pytest.mark.full
def test_rows_that_a_run_does_not_read_at_its_start_are_all_counted(check: Check) -> None:
    table = rows()
    for row in table[:12]:
        row["problem"] += " and then some more" * 40
    data, trainer = {"max_prompt_tokens": 100, "scan_rows": 19}, {"steps": None, "epochs": 1}
    code, found, error = check(table, data=data, trainer=trainer)
    assert code == 2 and "data.max_images is not set" in error
    code, found, _ = check(table, data=data | {"max_images": 1}, trainer=trainer)
    assert code == 0 and found["train"]["prompts"] == 8 and found["batches"]["steps"] == 5


@pytest.mark.full
def test_rows_without_an_image_among_others_that_have_one_are_named(check: Check, tmp_path: Path) -> None:
    def without(*places: int) -> list[str]:
        table = [
            {"problem": f"What is x in figure {index}?", "image": None if index in places else f"{index}.png"}
            for index in range(20)
        ]
        lines = "".join(json.dumps(row | {"answer": "7"}) + "\n" for row in table)
        (tmp_path / "some.jsonl").write_text(lines)
        code, found, error = check(rows(), data={"train": {"name": "table", "path": str(tmp_path / "some.jsonl")}})
        assert code == 0, error
        return [warning for warning in found["warnings"] if "image" in warning]

    assert without(3) == ["data.train: 1 of 20 rows has no image, as the others have: some/3"]
    assert without(3, 7) == ["data.train: 2 of 20 rows have no image, as the others have: some/3, some/7"]
    assert without(*range(10)) == [], "rows of text are meant"


@pytest.mark.full
def test_rows_that_spell_an_image_and_have_none_are_text_and_counted_and_others_stay_bad(check: Check) -> None:
    table = rows()
    for place in (2, 5, 7):
        table[place] |= {"problem": f"What is <image> in row {place}?", "images": []}
    table[9]["problem"] = "<image><image> What is x?"
    code, found, error = check(table, data={"max_bad_rows": 1.0})
    assert code == 0, error
    (told,) = [warning for warning in found["warnings"] if "spell" in warning]
    assert "3 of 19 rows spell <image> or the like and have no image, so it is read as text: rows/2, " in told
    assert found["train"]["dropped"] == 1 and "The row has … <image> and … images" in found["train"]["dropped_by_cause"]


@pytest.mark.full
def test_damaged_pixels_are_treated_as_a_run_does_and_all_rows_are_named(check: Check, tmp_path: Path) -> None:
    table = rows()
    for place in (2, 5):
        whole = base64.b64decode(table[place]["images"][0])
        table[place]["images"] = [base64.b64encode(whole[: len(whole) // 2]).decode()]
    code, found, error = check(table, data={"max_bad_rows": 1.0})
    assert code == 0, error
    assert found["train_decoded"]["rows"] == 20
    assert [line.partition(":")[0] for line in found["train_decoded"]["damaged"]] == ["rows/2", "rows/5"]
    assert "data.train: 2 rows cannot be used, and a run takes others instead" in found["warnings"]
    code, _, error = check(table)
    assert code == 3 and "2 of 20 rows cannot be used, more than data.max_bad_rows" in error
    assert "row 2" in error and "row 5" in error
    code, _, error = check(table, data={"on_bad_row": "fail"})
    assert code == 3 and "row 2" in error and "row 5" in error


def test_boxes_are_graded_in_the_scale_of_answers_and_one_that_is_not_said_is_told(check: Check) -> None:
    table = [
        {"problem": f"<image>Where is it in figure {k}?", "images": [picture("RGB", k)], "answer": [20, 14, 60, 42]}
        for k in range(4)
    ]
    limits = {"min_pixels": 784, "max_pixels": 3136}
    code, found, _ = check(table, data=limits, rewards=[{"name": "iou"}])
    (warning,) = [each for each in found["warnings"] if "resized picture" in each]
    assert code == 0 and warning.startswith("data.train, column answer, rewards.0: iou: 4 of 4 rows have boxes")
    said = {"name": "iou", "reference_scale": "file", "answer_scale": 1000}
    code, found, error = check(table, data=limits, rewards=[said])
    assert code == 0 and not error and not [each for each in found["warnings"] if "rewards.0" in each]
    assert found["train_references"][0]["graded"] == 4 and not found["train_references"][0]["rejected"]
    right = found["trials"][0]["answers"][0]
    assert right["reward"] == pytest.approx(1) and "[238.09" in right["text"]


def test_demonstrations_are_looked_at_and_their_beginning_and_end_are_told(
    check: Check, models: Callable[[str], Path], tmp_path: Path
) -> None:
    template = (models("qwen2_5_vl") / "chat_template.jinja").read_text()
    head = "<|im_start|>assistant\n"
    model = shutil.copytree(models("qwen2_5_vl"), tmp_path / "model")
    (model / "chat_template.jinja").write_text(template.replace(head, head + "{{ '<think>\n' }}"))
    thoughts = [row | {"solution": f"<think>Half.</think>{row['solution']}"} for row in rows()]
    learns = {"model": {"path": str(model)}, "algorithm": {"name": "sft"}}
    code, found, _ = check(thoughts, **learns)
    assert code == 0 and found["targets"] == "end with <|im_end|>; the prompt has <think>, and theirs is left out"
    code, _, error = check([*thoughts[1:], rows()[0]], **learns, data={"max_bad_rows": 0})
    assert code == 3 and "which has no </think>" in error and "rows/19" in error


def test_pairs_are_described_by_what_is_learned_of_them(check: Check) -> None:
    table = [{**row, "chosen": f"{i} and more" if i % 4 else "7", "rejected": "0 1"} for i, row in enumerate(rows())]
    table[2] |= {"rejected": table[2]["chosen"]}
    for row in table:
        row.pop("answer", None)
    code, found, err = check(table, algorithm={"name": "dpo"}, rewards=[])
    assert code == 0 and found["errors"] == [], (found.get("errors"), err)
    assert found["train"]["dropped"] == 1 and "best and the worst candidate are equal" in str(found["train"])
    assert found["pairs"] == {"rows": 19, "chosen_longer": 14, "chosen_shorter": 5}


def test_held_out_pairs_that_are_trained_on_are_counted_also_the_other_way_round(check: Check, tmp_path: Path) -> None:
    """Three of four held-out rows share the prompt of a training row: its answers, these swapped, and other ones."""
    plain = [{key: value for key, value in row.items() if key != "answer"} for row in rows()]
    table = [{**row, "chosen": f"yes {i}", "rejected": f"no {i}"} for i, row in enumerate(plain)]
    changes = [{}, {"chosen": "no 1", "rejected": "yes 1"}, {"rejected": "other"}, {"problem": "<image>Really?"}]
    held_out = [
        row | change | {"images": [f"{i}.png"]} for i, (row, change) in enumerate(zip(table, changes, strict=False))
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    twisted = [*table, {**table[7], "chosen": "no 7", "rejected": "yes 7"}]
    data = {"eval": {"name": "table", "path": str(tmp_path / "held.jsonl"), "category": "chosen"}}
    _, found, err = check(twisted, algorithm={"name": "dpo"}, rewards=[], data=data)
    assert found["errors"] == [], err
    said = (
        "3 of 4 rows ask and show the same as a row of data.train; 1 with its two answers, 1 with these the other way"
    )
    assert f"data.eval: {said} round" in found["warnings"]
    contradicted = "2 rows of 21 whose answers another row has for the same prompt the other way round"
    assert f"data.train: {contradicted}" in found["warnings"] and found["eval_rows_in_train"] == 3


def test_candidates_are_shown_where_they_are_learned_and_not_beside_demonstrations(
    check: Check, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """``sft`` on preference data learns the chosen answers alone."""
    end = {"role": "assistant", "content": "it is 7"}
    table = [
        {
            "images": row["images"],
            "messages": [{"role": "user", "content": row["problem"]}, end],
            "rejected_response": "perhaps 1",
        }
        for row in rows()
    ]
    for algorithm, is_shown in (("dpo", True), ("sft", False)):
        code, found, err = check(table, algorithm={"name": algorithm}, rewards=[])
        assert code == 0 and found["errors"] == [], err
        assert main(["check", str(tmp_path / "config.yaml")]) == 0
        out = capsys.readouterr().out
        assert ("candidate of score 1" in out, "perhaps 1" in out) == (is_shown, is_shown)
        assert ("pairs" in found) == is_shown
