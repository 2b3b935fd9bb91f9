"""Reading, merging, checking and writing configs."""

import pickle
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, create_model

from mmrl.config.keys import is_section
from mmrl.config.load import from_mapping, load_config, to_yaml
from mmrl.config.plugin_specs import Kind, PluginSpec
from mmrl.config.sections import Config, SamplerConfig
from mmrl.config.starter import starter
from mmrl.config.yaml_tree import MAX_BYTES, MAX_DEPTH, Located, read_tree
from mmrl.errors import ConfigError, MMRLError, PluginError
from mmrl.interfaces import PluginConfig

BASE = """\
model:
  path: some/model
data:
  train: {name: rows, path: train.json}
  eval: {name: rows, path: eval.json}
rewards:
  - {name: right, weight: 2.0}
  - name: tidy
algorithm: {name: learn, clip: 0.2}
learner:
  lr: 1e-6
trainer: {steps: 10}
"""


@pytest.fixture
def write(tmp_path: Path):
    def write_config(text: str, name: str = "a.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def load(path: Path, *overrides: str) -> Config:
    return load_config([path], overrides).config


def failure(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([path], overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_small_config_gets_its_values_and_the_defaults(write) -> None:
    config = load(write(BASE))
    assert config.learner.lr == 1e-6
    assert config.algorithm.name == "learn"
    assert config.algorithm.options == {"clip": 0.2}
    assert config.rewards[0].weight == 2.0
    assert config.rewards[1].timeout_s == 30.0
    assert config.sampler.group_size == 8
    assert config.trainer.on_mismatch == "stop"


def test_every_value_knows_where_it_was_written(write) -> None:
    path = write(BASE)
    origins = load_config([path], ["--learner.lr", "2e-5", "rewards.1.weight=3"]).origins
    assert origins["model.path"] == f"{path}:2"
    assert origins["rewards.1.name"] == f"{path}:8"
    assert origins["rewards.1.weight"] == "override rewards.1.weight=3"
    assert origins["learner.lr"] == "override --learner.lr 2e-5"
    assert origins["sampler.group_size"] == "default"


@pytest.mark.parametrize("number", ["1e-6", "1E-6", "1.0e-6", ".000001"])
def test_scientific_notation_is_a_number(write, number: str) -> None:
    assert load(write(BASE), f"learner.lr={number}").learner.lr == 1e-6


def test_words_that_older_yaml_converts_stay_text(write) -> None:
    options = load(
        write(BASE), "algorithm={name: x, a: no, b: 2020-01-01, c: 1:30, d: 1_000, e: 0x10}"
    ).algorithm.options
    assert options == {"a": "no", "b": "2020-01-01", "c": "1:30", "d": "1_000", "e": "0x10"}


def test_all_spellings_of_an_override_mean_the_same(write) -> None:
    path = write(BASE)
    configs = [load(path, *words) for words in (["trainer.seed=3"], ["--trainer.seed=3"], ["--trainer.seed", "3"])]
    assert [config.trainer.seed for config in configs] == [3, 3, 3]


def test_an_override_wins_over_files_and_earlier_ones_and_its_value_is_yaml(write) -> None:
    words = ("trainer.seed=3", "trainer.seed=4", "trainer.steps=7", "model.freeze=[vision]", "sampler.engine={a: null}")
    config = load(write(BASE), *words)
    assert (config.trainer.seed, config.trainer.steps) == (4, 7)
    assert config.model.freeze == ("vision",)
    assert config.sampler.engine == {"a": None}


def test_a_negative_number_can_follow_an_override(write) -> None:
    assert load(write(BASE), "--sampler.top_k", "-1").sampler.top_k == -1


def test_later_files_win_mappings_merge_and_lists_are_replaced(write) -> None:
    first = write(BASE)
    second = write("learner: {weight_decay: 0.1}\nrewards: [{name: only}]\ntrainer:\n", "b.yaml")
    loaded = load_config([first, second])
    assert loaded.config.learner.lr == 1e-6
    assert loaded.config.learner.weight_decay == 0.1
    assert [reward.name for reward in loaded.config.rewards] == ["only"]
    assert loaded.config.trainer.steps == 10, "an empty section leaves the earlier one"
    assert loaded.origins["learner.weight_decay"] == f"{second}:1"


NEAR = """
model: {path: policy, chat_template: ask.jinja}
data:
  train: {name: rows, path: a.jsonl, image_root: pictures, split: train, paths: [a.jsonl, elsewhere.jsonl],
    prompt_template: ask.jinja}
  mix: [{name: "rows.py:Rows", label: other, path: "part-*.csv"}, {name: more, path: owner/name}]
  eval: {name: rows, path: ../outside.jsonl}
  prompt_template: ask.jinja
rewards: [{name: "mine.py:score", judge_file: notes.txt, label: a.jsonl}, {name: "gone.py:score"}]
algorithm: {name: "mine.py:Rule"}
environment: {tools: ["mine.py:look", "gone.py:see"], command: [python, rows.py, train], max_turns: 2}
trackers: [{name: log, path: notes.txt}]
trainer: {run_dir: runs}
"""
NAMED = {
    "model.path": "sub/policy",
    "model.chat_template": "sub/ask.jinja",
    "data.train.path": "sub/a.jsonl",
    "data.train.image_root": "sub/pictures",
    "data.train.split": "train",  # there is a folder of that name, and it is no path
    "data.train.paths": ["sub/a.jsonl", "elsewhere.jsonl"],
    "data.train.prompt_template": "sub/ask.jinja",
    "data.mix.0.name": "sub/rows.py:Rows",
    "data.mix.0.path": "sub/part-*.csv",
    "data.mix.1.path": "owner/name",
    "data.eval.path": "sub/../outside.jsonl",
    "data.prompt_template": "sub/ask.jinja",
    "rewards.0.name": "sub/mine.py:score",
    "rewards.0.judge_file": "sub/notes.txt",
    "rewards.0.label": "a.jsonl",
    "rewards.1.name": "gone.py:score",
    "algorithm.name": "sub/mine.py:Rule",
    "environment.tools": ["sub/mine.py:look", "gone.py:see"],
    "environment.command": ["python", "sub/rows.py", "train"],
    "trackers.0.path": "sub/notes.txt",
    "trainer.run_dir": "runs",
}


@pytest.fixture
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside whose files a config lies; some of the same names are in the working folder too."""
    monkeypatch.chdir(tmp_path)
    for name in ("policy", "pictures", "train", "runs"):
        Path("sub", name).mkdir(parents=True)
    for name in ("sub/a.jsonl", "a.jsonl", "sub/part-1.csv", "sub/rows.py", "sub/mine.py", "mine.py", "outside.jsonl"):
        Path(name).touch()
    for name in ("sub/ask.jinja", "sub/notes.txt", "gone.py", "elsewhere.jsonl"):
        Path(name).touch()
    Path("sub/mine.yaml").write_text(NEAR)
    return Path("sub/mine.yaml")


def value_at(config: Config, key: str) -> Any:
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        found = found[int(part) if part.isdecimal() else part]
    return found


@pytest.mark.parametrize("key", NAMED)
def test_a_path_counts_from_the_file_that_names_it_and_then_from_the_working_folder(near: Path, key: str) -> None:
    assert value_at(load(near), key) == NAMED[key]
    assert value_at(load(near.absolute()), key) == NAMED[key]


def test_a_config_from_elsewhere_names_its_files_from_there(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = near.absolute().parent
    (folder.parent / "other").mkdir()
    monkeypatch.chdir(folder.parent / "other")
    for config in (folder / "mine.yaml", Path("../sub/mine.yaml")):
        found = load(config)
        assert found.data.train.options["path"] == f"{config.parent}/a.jsonl"
        assert found.rewards[1].name == "gone.py:score"


def test_a_config_in_the_working_folder_keeps_its_paths(near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(near.parent)
    for config in (Path("mine.yaml"), Path("mine.yaml").absolute()):
        assert load(config).rewards[0].name == "mine.py:score" and load(config).model.path == "policy"


def test_other_paths_count_from_the_working_folder(near: Path) -> None:
    assert load(near, "data.train.path=a.jsonl", "model.path=policy").data.train.options["path"] == "a.jsonl"
    assert from_mapping({**yaml.safe_load(NEAR)}).model.path == "policy"
    for path in ("~/policy", "/policy", "", "owner/policy"):
        near.write_text(
            NEAR.replace("path: policy", f"path: '{path}'") if path else NEAR.replace("path: policy", "path: x")
        )
        assert load(near).model.path == (path or "x")


def test_the_config_of_a_run_is_read_as_it_was_written(near: Path) -> None:
    written = to_yaml(load(near))
    run = Path("runs/first")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(written)
    (run / "attempts.jsonl").touch()
    (run / "sub/policy").mkdir(parents=True)  # which the run has not read
    assert to_yaml(load(run / "config.yaml")) == written
    (run / "attempts.jsonl").unlink()
    assert load(run / "config.yaml").model.path == "runs/first/sub/policy"


@pytest.mark.parametrize(
    ("words", "key", "expected"),
    [
        (["sampler.engine={}"], "sampler.engine", {}),
        (["sampler.engine=null"], "sampler.engine", {}),
        (["sampler.engine={}", "sampler.engine.c=3"], "sampler.engine", {"c": 3}),
        (["sampler.engine.c=3", "sampler.engine={}"], "sampler.engine", {}),
        (["sampler.engine={c: 3}"], "sampler.engine", {"a": 1, "b": {"x": 2}, "c": 3}),
        (["sampler.engine.b={}"], "sampler.engine", {"a": 1, "b": {}}),
        (["sampler={}"], "sampler.group_size", 8),
        (["sampler="], "sampler.group_size", 4),
        (["learner.deepspeed={}"], "learner.deepspeed", {}),
        (["learner.deepspeed=null"], "learner.deepspeed", {}),
        (["model.lora={}"], "model.lora.rank", 16),
        (["model.lora=null"], "model.lora", None),
        (["algorithm.kl={}"], "algorithm.kl", {}),
    ],
)
@pytest.mark.parametrize("form", ["override", "file", "mapping"])
def test_an_empty_mapping_takes_back_what_was_written_before(write, words, key, expected, form) -> None:
    text = "sampler: {group_size: 4, engine: {a: 1, b: {x: 2}}}\nlearner: {deepspeed: {zero_optimization: {a: 1}}}\n"
    text += "model: {path: m, lora: {rank: 4}}\nalgorithm: {name: a, kl: {coef: 0.1}}\ndata: {train: {name: t}}\n"
    paths: list[Any] = [write(text)]
    if form == "file":
        paths += [read_tree([], [word])[0] for word in words]
    elif form == "mapping":
        pairs = (word.split("=", 1) for word in words)
        paths += [Located.of_dotted({key: yaml.safe_load(value)}, "given") for key, value in pairs]
    found = load_config(paths, words if form == "override" else ()).config.model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    assert found == expected


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("model=foo", "model.path=foo"),
        ("data=x.jsonl", "data.train={name: table, path: x.jsonl}"),
        ("data.train=x.jsonl", "data.train={name: table, path: x.jsonl}"),
        ("data.train=folder/rows", "data.train={name: table, path: folder/rows}"),
        ("data.train=geometry3k", "data.train={name: geometry3k}"),
        ("data.eval=x.parquet", "data.eval={name: table, path: x.parquet}"),
        ("data.mix=x.csv", "data.mix=[{name: table, path: x.csv}]"),
        ("rewards=math", "rewards=[{name: math}]"),
        ("rewards=my.py:score", "rewards=[{name: 'my.py:score'}]"),
        ("trackers=wandb", "trackers=[{name: wandb}]"),
        ("monitors=dead_groups", "monitors=[{name: dead_groups}]"),
        ("algorithm=grpo", "algorithm={name: grpo}"),
        ("environment=zoom", "environment={name: zoom}"),
        ("sampler=hf", "sampler.name=hf"),
        ("sampler=16", "sampler.group_size=16"),
        ("learner=1e-5", "learner.lr=1.0e-05"),
        ("learner=cosine", "learner.schedule=cosine"),
        ("trainer=5", "trainer.steps=5"),
        ("cluster=ray", "cluster.name=ray"),
        ("cluster=1", "cluster.ranks=1"),
        ("model.freeze=vision", "model.freeze=[vision]"),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_a_plain_word_is_answered_with_the_form_that_loads(write, word: str, typed: str, in_file: bool) -> None:
    key, _, value = word.partition("=")
    paths, words = [write(BASE)], [word]
    if in_file:
        inner = value
        for part in reversed(key.split(".")[1:]):
            inner = f"{{{part}: {inner}}}"
        paths, words = [*paths, write(f"{key.split('.')[0]}: {inner}\n", "b.yaml")], []
    with pytest.raises(ConfigError) as caught:
        load_config(paths, words, options_class=options_class)
    told = str(caught.value).partition("  do:       write ")[2]
    assert told, "the answer says what to write"
    if not in_file:
        assert shlex.split(told) == [typed]
        load_config(paths[:1], [typed], options_class=options_class)
        return
    last, *_ = reversed(key.split("."))
    wanted = {last: yaml.safe_load(typed.partition("=")[2])}
    if (below := typed.partition("=")[0].removeprefix(key)) and below != typed:
        wanted = {last: {below.lstrip("."): wanted[last]}}
    assert yaml.safe_load(told) == wanted


def options_class(kind: Kind, spec: PluginSpec) -> type[BaseModel]:
    """Every plugin takes everything; the dataset called ``table`` needs a path and names its columns."""
    fields: Any = {"path": (str, ...), "prompt": (str, "prompt")} if spec.name == "table" else {}
    return create_model("Anything", __config__={"extra": "allow"}, **fields)


def test_another_plugin_does_not_inherit_the_options_of_the_one_it_replaces(write) -> None:
    first, second = write(BASE), write("algorithm: {name: other}\nsampler: {name: hf}\n", "b.yaml")
    assert load_config([first, second]).config.algorithm.options == {}
    assert load(first, "algorithm.clip=0.3", "algorithm.name=other").algorithm.options == {"clip": 0.3}
    assert load(first, "algorithm.name=learn", "algorithm.more=1").algorithm.options == {"clip": 0.2, "more": 1}


def test_a_plugin_written_with_its_name_replaces_the_one_of_the_file(write) -> None:
    first = write(BASE.replace("path: train.json", "path: train.json, split: odd"))
    assert load(first, "data.train={name: rows, path: x}").data.train.options == {"path": "x"}
    assert load(first, "data.train={path: x}").data.train.options == {"path": "x", "split": "odd"}
    assert load(first, "data.train.path=x").data.train.options == {"path": "x", "split": "odd"}
    assert load(first, "data.train.name=rows").data.train.options == {"path": "train.json", "split": "odd"}
    whole, part = "data.train={name: rows, path: x}", "data.train.split=even"
    assert load(first, whole, part).data.train.options == {"path": "x", "split": "even"}
    assert load(first, part, whole).data.train.options == {"path": "x"}
    assert load(first, "rewards.0={name: right}").rewards[0].weight == 1.0
    played = load(write(BASE + "environment: {tools: [a.py:f], max_turns: 3}\n", "e.yaml"), "environment={name: game}")
    assert played.environment.options == {} and played.environment.max_turns == 8
    second = write("algorithm: {name: learn, other: 1}\n", "b.yaml")
    assert load_config([first, second]).config.algorithm.options == {"other": 1}
    third = write("algorithm: {other: 1}\n", "c.yaml")
    assert load_config([first, third]).config.algorithm.options == {"clip": 0.2, "other": 1}


def test_an_environment_without_a_name_is_named_by_its_option_wherever_that_stands(write) -> None:
    for options, name in {"{max_turn: 3, tools: [a.py:f]}": "tools", "{reward: score, class: g.py:G}": "class"}.items():
        assert load(write(BASE), f"environment={options}").environment.name == name


def test_a_plugin_of_a_mix_is_replaced_by_its_place(write) -> None:
    path = write(BASE.replace("data:\n", "data:\n  mix: [{name: more, a: 1}]\n"))
    assert load(path, "data.mix.0={name: more, b: 2}").data.mix[0].options == {"b": 2}
    assert load(path, "data.mix.0.b=2").data.mix[0].options == {"a": 1, "b": 2}


def test_changing_the_name_of_a_section_keeps_its_other_keys(write) -> None:
    first, second = write(BASE + "sampler: {group_size: 3}\n"), write("sampler: {name: hf}\n", "b.yaml")
    assert load_config([first, second]).config.sampler.group_size == 3


def test_the_written_config_loads_again_unchanged(write) -> None:
    odd = {
        "text": "1e-6",
        "none": "null",
        "lines": "a\nb\x85\n",
        "list": [1, {"x": []}, ""],
        "tiny": 1e-300,
        "é": "😀 # no",
    }
    config = from_mapping(
        {
            "model": {"path": "a: b", "freeze": ["vision"]},
            "data": {"train": {"name": "rows", **odd}, "system_prompt": "Answer:\n  'yes' or \"no\""},
            "algorithm": {"name": "learn", "nested": {"deep": {"er": None}}},
            "trackers": [{"name": "t", "options": [{"a": 1}, {"b": True}]}],
        }
    )
    text = to_yaml(config)
    again = load(write(text))
    assert again == config
    assert to_yaml(again) == text
    assert again.data.train.options == odd


def test_a_config_of_epochs_is_written_without_the_steps_that_it_has_not(write) -> None:
    config = load(write(BASE), "trainer.steps=null", "trainer.epochs=1.5")
    assert config.trainer.epochs == 1.5
    assert "steps" not in to_yaml(config).partition("trainer:")[2].replace("warmup_steps", "")
    assert load(write(to_yaml(config), "b.yaml")) == config


def test_comments_of_origins_do_not_change_the_config(write) -> None:
    loaded = load_config([write(BASE)])
    text = to_yaml(loaded.config, loaded.origins)
    assert f"lr: 1.0e-06  # {loaded.origins['learner.lr']}" in text
    assert load(write(text, "b.yaml")) == loaded.config


def test_a_config_can_be_pickled_and_dumped_and_not_changed(write) -> None:
    config = load(write(BASE))
    assert pickle.loads(pickle.dumps(config)) == config
    assert Config.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValueError, match="frozen"):
        config.learner.lr = 1.0  # type: ignore[misc]


def test_every_section_and_every_key_has_help() -> None:
    silent = []
    for name, field in Config.model_fields.items():
        if is_section(field.annotation):
            silent += [name] * (not field.annotation.__doc__)
            silent += [f"{name}.{key}" for key, inner in field.annotation.model_fields.items() if not inner.description]
        else:
            silent += [name] * (not field.description)
    assert silent == []


def test_the_starter_config_loads_with_every_default(write) -> None:
    values = {"model": {"path": "m"}, "data": {"train": {"name": "rows"}}, "algorithm": {"name": "learn"}}
    text = starter(values)
    assert load(write(text)) == from_mapping(values)
    assert "  # Completions per prompt.\n  # group_size: 8\n" in text


def test_a_starter_configs_environment_loads_with_its_comments_taken_away(write) -> None:
    values = {"model": {"path": "m"}, "data": {"train": {"name": "rows"}}, "algorithm": {"name": "learn"}}
    lines = starter(values).splitlines()
    first = lines.index("# environment:")
    length = lines[first:].index("")
    lines[first : first + length] = [line.removeprefix("# ") for line in lines[first : first + length]]
    text = "\n".join(lines).replace("<environment>", "game")
    assert load(write(text)) == from_mapping({**values, "environment": {"name": "game"}})
    assert "#   # Turns that the policy may take; an episode ends with its last one.\n#   max_turns: 8\n" in starter(
        values
    )


def test_all_errors_are_reported_at_once_with_their_lines(write) -> None:
    path = write(
        "model: {dtype: float16}\n"
        "data: {train: {name: rows}}\n"
        "algorithm: learn\n"
        "learner:\n  lr: -1\n  lrr: 2\n  warmup_steps: 300\n"
        "sampler: {temperature: 0, top_p: 0.9}\n"
        "trainer:\n  steps: 5\n  steps: 6\n"
        "lr: 1\n"
    )
    text = failure(path, "trainer.seed=x")
    for expected in (
        f"steps is written twice\n  where:    {path}:10 and {path}:11",
        f"model.path is required\n  where:    {path}:1",
        f"model.dtype cannot be 'float16'\n  where:    {path}:1\n  possible: auto, float32, bfloat16",
        f"algorithm should be a mapping such as {{name: ...}}, not 'learn'\n  where:    {path}:3",
        f"learner.lr should be greater than 0, not -1\n  where:    {path}:5",
        f"unknown key learner.lrr\n  where:    {path}:6",
        "did you mean lr?",
        "sampler.temperature should be greater than or equal to 0.01",
        "sampler.top_p must be 1.0",
        "set top_p: 1.0, top_k: -1",
        "trainer.seed should be a whole number, not 'x'\n  where:    override trainer.seed=x",
        f"unknown key lr\n  where:    {path}:12",
        "did you mean learner.lr?",
        f"learner.warmup_steps is 300, but the run has only 5 optimizer steps\n  where:    {path}:7, {path}:10",
    ):
        assert expected in text
    assert text.startswith("11 errors")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampler.top_k=5", "learner cannot reproduce"),
        ("sampler.top_p=1.5", "sampler.top_p must be 1.0"),
        ("sampler.temperature=.nan", "sampler.temperature"),
        ("sampler.engine={a: .inf}", "sampler.engine.a should be a finite number"),
        ("sampler.engine={a: 1}", ""),
        ("sampler.group_size=0", "greater than or equal to 1"),
        ("sampler.group_size=true", "should be a whole number, not True"),
        ("sampler.group_size=8.5", "sampler.group_size should be a whole number, not 8.5"),
        ("sampler.name=vlm", "did you mean vllm?"),
        ("sampler.tensor_parallel_size=2", "does not divide 1 (cluster.ranks)"),
        ("sampler.pipeline_parallel_size=2", "sampler.pipeline_parallel_size is 2, which does not divide 1"),
        ("sampler={tensor_parallel_size: 2, pipeline_parallel_size: 2}", "sampler.pipeline_parallel_size is 4, which"),
        ("sampler.gpu_memory_utilization=0", "greater than 0"),
        ("learner.sequence_parallel_size=2", "is 2, which does not divide 1 (cluster.ranks)"),
        ("learner.sequence_parallel_size=0", "greater than or equal to 1"),
        ("cluster.name=ray", ""),
        ("cluster.ranks=2", "cluster.name: local is one rank"),
        ("cluster={name: ray, sampler_ranks: 2, learner_ranks: 1}", ""),
        ("cluster={name: ray, sampler_ranks: 2}", "cluster.learner_ranks is not"),
        ("cluster={sampler_ranks: 1, learner_ranks: 1}", "cluster.sampler_ranks is for ray"),
        ("cluster={name: ray, ranks: 2, sampler_ranks: 1, learner_ranks: 1}", "remove cluster.ranks"),
        ("trainer.staleness=1", "ranks that sample and learn in turns have the newest weights"),
        ("trainer.staleness=5", "less than or equal to 4"),
        ("sampler.partial={engine_steps: 15}", "greater than or equal to 16"),
        ("sampler.partial={engine_steps: 16, in_flight: 0.5}", "greater than or equal to 1"),
        ("sampler.partial={engine_steps: 16}", ""),
        ("sampler.partial=true", "a mapping such as {engine_steps: ...}, not True"),
        ("sampler={name: hf, partial: {engine_steps: 16}}", "sampler.name is hf"),
        ("learner.offload=cpu", "possible: none, optimizer, parameters"),
        ("learner.offload=optimizer", ""),
        ("learner={offload: optimizer, zero_stage: 0}", "learner.zero_stage is 0"),
        ("learner={offload: parameters, zero_stage: 2}", "at ZeRO's stage 3 alone"),
        ("learner.zero_stage=4", "less than or equal to 3"),
        ("learner.schedule=cosin", "did you mean cosine?"),
        ("learner.lr=fast", "learner.lr should be a number, not 'fast'"),
        ("learner.minibatches=99999", "a step has fewer completions"),
        ("learner.warmup_steps=10", "but the run has only 10 optimizer steps"),
        ("model.lora={rank: 8}", ""),
        ("model.lora={rank: 0}", "greater than or equal to 1"),
        ("model.lora={targets: []}", "1 value at least, and has none"),
        ("model.lora={r: 8}", "possible: rank, alpha, targets"),
        (
            "model.lora=true",
            "model.lora should be a mapping such as {rank: 16, alpha: 32, targets: [language]}, not True",
        ),
        ("data.eval=rows", "data.eval should be a mapping such as {name: ...}, not 'rows'"),
        ("model={lora: {rank: 8}, freeze: [vision]}", "nothing to freeze"),
        ("model={lora: {rank: 8}, quantize: nf4}", ""),
        ("model.quantize=nf4", "model.lora is null, so there is nothing to train"),
        ("model={lora: {rank: 8}, quantize: int8}", "model.quantize cannot be 'int8'"),
        ("model.gradient_checkpointing=yes", "should be true or false, not 'yes'"),
        ("model.freeze=[vision, projector, language]", "nothing to train"),
        ("model.freeze=[eyes]", "model.freeze.0 cannot be 'eyes'"),
        ("model.path=", "model.path should be text, not None"),
        ("data.min_pixels=9999999", "data.min_pixels is more than data.max_pixels"),
        ("data.eval=null", ""),
        ("data.overlong=cut", "possible: drop, fail"),
        ("data.train=[{name: rows}, {name: others}]", "those to mix with it in data.mix: [{name: ...}, ...]"),
        ("data.train.name=null", "data.train.name should be text, not None"),
        ("rewards=[{name: a}, {name: a}]", "two rewards are called 'a'"),
        ("rewards=[{name: a, sources: [x]}, {name: a, sources: [y], weight: 2}]", "'a' have different weights"),
        ("rewards=right", "rewards should be a list, not 'right'"),
        ("rewards=[right]", "rewards.0 should be a mapping such as {name: ...}"),
        ("rewards=[{weight: 1}]", "rewards.0.name is required"),
        ("rewards.0.weight=.inf", "rewards.0.weight should be a finite number"),
        ("rewards.2.weight=1", "rewards has no entry 2"),
        ("trainer.eval_metric=speed", "trainer.eval_metric is 'speed', which is no reward"),
        ("trainer.eval_every=0", ""),
        ("trainer.save_every=0", ""),
        ("trainer.save_every=-1", "greater than or equal to 0"),
        ("trainer.epochs=2", "trainer.steps and trainer.epochs are both set"),
        ("trainer={steps: null, epochs: 0.5}", ""),
        ("trainer={steps: null, epochs: 0}", "greater than 0"),
        ("trainer.stop_when=eval/accuracy >= 0.9", ""),
        ("trainer={stop_when: eval/accuracy >= 0.9, eval_every: 0}", "and nothing is evaluated"),
        ("trainer.stop_when=loss", "should be a metric, one of >=, <=, >, <, and a number, not 'loss'"),
        ("trainer.stop_when=__import__('os') > 1", ""),
        ("trainer.stop_when=a > 1 or b > 2", "not 'a > 1 or b > 2'"),
        ("trainer.on_mismatch=ignore", "possible: stop, warn"),
        ("trainer=5", "trainer should be a mapping"),
        ("trainer.seed=", "trainer.seed should be a whole number, not None"),
        ("trainer.seed=[1", "not valid YAML"),
        ("trainer..seed=1", "not an override"),
        ("trainer.seed", "not an override"),
        ("--trainer.seed", "--trainer.seed needs a value"),
        ("environment={name: game}", ""),
        ("environment={tools: ['my.py:crop']}", ""),
        ("environment=game", "environment should be a mapping such as {name: ...}, not 'game'"),
        ("environment={max_turns: 3}", "environment.name is required"),
        ("environment={max_turn: 3}", "environment has no name; max_turn: no such environment"),
        ("environment={max_turn: 3}", "did you mean max_turns?"),
        ("environment={tool: ['my.py:crop']}", "did you mean tools?"),
        ("environment={zoom: 1, tools: ['my.py:crop']}", "environment has no name; zoom, tools are all environments"),
        ("environment={name: game, max_turns: 0}", "environment.max_turns should be greater than or equal to 1"),
        ("environment={name: game, max_images: -1}", "environment.max_images should be greater than or equal to 0"),
        ("environment={name: game, scheduling: fast}", "possible: reproducible, eager"),
        ("environment={name: game, observation_role: system}", "possible: auto, tool, user"),
        ("environment={name: game, weights: {won: much}}", "environment.weights.won should be a number"),
        ("environment={name: game, max_tokens: 99}", "less than one turn: sampler.max_new_tokens is 1024"),
        (
            "environment={name: game, max_tokens: 99, max_turn_tokens: 100}",
            "environment.max_tokens is 99, less than one turn: environment.max_turn_tokens is 100",
        ),
        ("environment={name: game, max_tokens: 100, max_turn_tokens: 100}", ""),
        ("environment={name: game, scheduling: eager}", ""),
        ("group_sise=4", "did you mean sampler.group_size?"),
        ("sampler.memory_fraction={a: 1}", "sampler.gpu_memory_utilization should be a number, not a mapping"),
    ],
)
def test_an_impossible_value_is_refused_with_its_reason(write, override: str, message: str) -> None:
    path = write(BASE)
    if message:
        text = failure(path, override)
        assert message in text
        assert "where:" in text
        assert "errors in the config" not in text, "one mistake is one error"
    else:
        load(path, override)


def test_settings_of_an_evaluation_that_does_not_happen_are_refused(write) -> None:
    text = failure(write(BASE), "data.eval=null", "trainer.eval_every=5")
    assert "trainer.eval_every is set, but data.eval is null" in text


@pytest.mark.parametrize(
    ("cluster", "sizes", "key"),
    [
        ("ranks: 6", (1, 2, 3, 6), "cluster.ranks"),
        ("sampler_ranks: 4, learner_ranks: 6", (1, 2, 3, 6), "learner_ranks"),
    ],
)
def test_ranks_that_share_a_row_divide_those_that_learn(write, cluster, sizes, key) -> None:
    path, ranks = write(BASE), f"cluster={{name: ray, {cluster}}}"
    for size in (1, 2, 3, 4, 5, 6, 12):
        change = f"learner.sequence_parallel_size={size}"
        if size in sizes:
            assert load(path, ranks, change).learner.sequence_parallel_size == size
        else:
            said = failure(path, ranks, change)
            assert f"sequence_parallel_size is {size}, which does not divide 6" in said and f"{key})" in said
            assert "set it to one of 1, 2, 3, 6, or" in said


def test_ranks_of_their_own_that_sample_are_divided_into_copies(write) -> None:
    path, split = write(BASE), "cluster={name: ray, sampler_ranks: 3, learner_ranks: 2}"
    assert "does not divide 3 (cluster.sampler_ranks)" in failure(path, split, "sampler.tensor_parallel_size=2")
    config = load(path, split, "sampler.tensor_parallel_size=3", "trainer.staleness=2")
    counts = (config.cluster.num_sampler_ranks, config.cluster.num_learner_ranks, config.cluster.num_ranks)
    assert counts == (3, 2, 5)
    assert config.cluster.is_split
    together = load(path, "cluster={name: ray, ranks: 3}").cluster
    assert (together.num_sampler_ranks, together.num_learner_ranks, together.num_ranks) == (3, 3, 3)
    assert not together.is_split


def test_partial_rollouts_are_cut_at_steps_that_repeat_and_know_no_experts(write) -> None:
    path, partial = write(BASE), "sampler.partial={engine_steps: 16}"
    assert "experts of the last alone" in failure(path, partial, "learner.routing=replayed")
    load(path, partial, "environment={name: game}")
    text = failure(path, partial, "environment={name: game, scheduling: eager}")
    assert "set environment.scheduling: reproducible, or sampler.partial: null" in " ".join(text.split())
    load(path, partial, "sampler.engine={async_scheduling: false, stream_interval: 1}")
    for key, value in (("async_scheduling", "true"), ("stream_interval", "4")):
        text = failure(path, partial, f"sampler.engine={{{key}: {value}}}")
        assert f"remove sampler.engine.{key}" in " ".join(text.split())


def test_ranks_that_sample_together_count_their_steps(write) -> None:
    path = write(BASE)
    ranks = ("cluster={name: ray, ranks: 2}", "sampler.tensor_parallel_size=2")
    load(path, *ranks, "environment={name: game}")
    text = failure(path, *ranks, "environment={name: game, scheduling: eager}")
    assert "environment.scheduling is eager, but 2 ranks sample together" in text
    assert "set environment.scheduling: reproducible" in text
    load(path, "sampler.engine={async_scheduling: true}")
    load(path, "sampler.engine={async_scheduling: false}", "environment={name: game}")
    text = failure(path, "sampler.engine={async_scheduling: true}", "environment={name: game}")
    assert "with an environment the sampler's steps are counted" in text


def test_a_section_tells_its_own_contradictions_and_the_config_where_they_are_written(write) -> None:
    [found] = SamplerConfig(name="hf", engine={"dtype": "half"}).contradictions()
    assert found.keys == ("engine", "name")
    [found] = SamplerConfig(name="hf", pipeline_parallel_size=2).contradictions()
    assert found.keys == ("pipeline_parallel_size", "name")
    text = failure(write(BASE), "cluster.ranks=2")
    assert text.splitlines()[1].split() == ["where:", "override", "cluster.ranks=2"]


def test_engine_arguments_need_the_engine_that_they_are_for(write) -> None:
    text = failure(write(BASE), "sampler.name=hf", "sampler.engine={max_num_seqs: 4}")
    assert "sampler.engine is for vllm, but sampler.name is hf" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x 1\nb: *x\n", "anchors and aliases are refused"),
        ("a: !!python/object:os.system {}\n", "is refused"),
        ("- 1\n", "a config is a mapping of sections"),
        ("a: [\n", "not valid YAML"),
        ("a: \x01\n", "not valid YAML"),
        ("a: 1\n---\nb: 1\n", "another document"),
        ('a: "\\ud800"\n', "lone surrogate"),
        ("a: " + "[" * 5000 + "\n", f"deeper than {MAX_DEPTH} levels"),
        ("a: " + "{b: " * 5000 + "\n", f"deeper than {MAX_DEPTH} levels"),
        ("#" * (MAX_BYTES + 1), "larger than"),
    ],
)
def test_a_file_that_is_no_plain_yaml_is_refused(write, text: str, message: str) -> None:
    path = write(text)
    complaint = failure(path)
    assert message in complaint
    assert str(path) in complaint


def test_keys_that_are_not_text_are_refused(write) -> None:
    path = write(BASE + "3: x\n? [a]\n: y\n")
    text = failure(path)
    assert f"a key must be text, not '3'\n  where:    {path}:13" in text
    assert "a key must be text, not a list or mapping" in text


def test_files_that_cannot_be_read_are_all_named(tmp_path: Path, write) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "absent.yaml", tmp_path, binary, write("a: [")])
    text = str(caught.value)
    assert "No such file" in text
    assert "directory" in text
    assert "not UTF-8" in text
    assert "not valid YAML" in text


def test_placeholders_are_one_error_beside_the_others(write) -> None:
    path = write(BASE.replace("some/model", "<model>").replace("name: right", "name: <reward>"))
    with pytest.raises(ConfigError) as caught:
        load_config([path], ["learner.lr=-1", "rewards.1.path=<path>"], options_class=options_of)
    text = str(caught.value)
    assert text.startswith("2 errors in the config")
    assert "    model.path: <model>\n    rewards.0.name: <reward>\n    rewards.1.path: <path>\n" in text
    assert f"where:    {path}:2, {path}:7, override rewards.1.path=<path>\n" in text


def test_a_template_with_angle_brackets_is_no_placeholder(write) -> None:
    assert load(write(BASE), "data.system_prompt=<think>", "algorithm.end=<eos>").data.system_prompt == "<think>"


class Rules(PluginConfig):
    class Clip(PluginConfig):
        low: float = 0.1

    clip: float | None = None
    ranges: Clip = Clip()


class Anything(PluginConfig):
    model_config = ConfigDict(extra="allow")


def options_of(kind: str, plugin: PluginSpec) -> type[BaseModel]:
    name = plugin.name
    if name == "missing":
        raise PluginError(f"no {kind} plugin is called {name!r}", remedy="install it")
    return {"learn": Rules}.get(name, Anything)


PLUGINS = {
    "model": {"path": "m"},
    "data": {"train": {"name": "rows"}},
    "algorithm": {"name": "learn", "clip": 0.2},
}


def test_plugin_defaults_are_filled_in() -> None:
    config = from_mapping(PLUGINS, options_class=options_of)
    assert config.algorithm.options == {"clip": 0.2, "ranges": {"low": 0.1}}
    assert from_mapping(config.model_dump(), options_class=options_of) == config


def test_wrong_options_of_plugins_are_reported_with_everything_else(write) -> None:
    path = write("model: {path: m}\ndata: {train: {name: rows}}\nalgorithm:\n  name: learn\n  ranges:\n    lov: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path], ["learner.lr=0", "rewards=[{name: missing}]"], options_class=options_of)
    text = str(caught.value)
    assert (
        f"unknown key algorithm.ranges.lov\n  where:    {path}:6\n  possible: low\n  do:       did you mean low?"
        in text
    )
    assert "learner.lr should be greater than 0" in text
    assert "no reward plugin is called 'missing'\n  where:    override rewards=" in text


def test_an_unknown_option_is_compared_with_the_frameworks_own_keys_too(write) -> None:
    class Strict(PluginConfig):
        bonus: float = 0.0

    def options(kind: str, plugin: PluginSpec) -> type[BaseModel]:
        return Strict if kind in ("reward", "dataset") else Anything

    path = write("model: {path: m}\ndata: {train: {name: rows, wieght: 2}}\nalgorithm: {name: x}\n")
    with pytest.raises(ConfigError) as caught:
        load_config([path], ["rewards=[{name: right, labl: a}]"], options_class=options)
    text = str(caught.value)
    assert "possible: bonus, label, weight\n  do:       did you mean weight?" in text
    assert (
        "possible: bonus, weight, timeout_s, sources, on_error, workers, style, weights, label\n"
        "  do:       did you mean label?" in text
    )


def test_plugins_alone_at_fault_are_a_plugin_error() -> None:
    with pytest.raises(PluginError, match="no algorithm plugin is called 'missing'"):
        from_mapping({**PLUGINS, "algorithm": {"name": "missing"}}, options_class=options_of)


def test_values_that_yaml_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.clip"):
        from_mapping({**PLUGINS, "algorithm": {"name": "learn", "clip": object()}})


VALUES = ["", "null", "true", "-1", "0", "1e400", ".nan", "x" * 99, "[]", "{}", "[[1]]", "{a: {b: c}}"]
VALUES += ["'", "&a", "*a", "!!set {a}", "😀", "9" * 5000, "{name: missing}"]


def mutate(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    index = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            lines[index] = lines[index].split(":")[0] + ": " + rng.choice(VALUES)
        case 1:
            lines.insert(index, rng.choice(lines))
        case 2:
            del lines[index]
        case 3:
            lines[index] = "  " * rng.randrange(3) + lines[index].strip()
        case 4:
            lines[index] = lines[index].replace(rng.choice("aelmnr{}[]:,"), rng.choice("\t{}[]:,-#?|>%@`\"'x\x00 "))
        case _:
            position = rng.randrange(len(lines[index]) + 1)
            lines[index] = lines[index][:position] + chr(rng.randrange(1, 0x3000)) + lines[index][position:]
    return "\n".join(lines) or "\n"


def exit_code(*arguments: object) -> int:
    """0 if the config loads, survives being written and read again, and means the same; else the error's code."""
    try:
        config = load_config(*arguments, options_class=options_of).config
    except MMRLError as error:
        return error.exit_code
    written = arguments[0][0].with_name("again.yaml")
    written.write_text(to_yaml(config), encoding="utf-8")
    assert load(written).model_dump_json() == config.model_dump_json()
    return 0


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_configs_load_or_say_what_is_wrong(count: int, write) -> None:
    rng = random.Random(0)
    codes = []
    for _ in range(count):
        text = BASE
        for _ in range(rng.randrange(1, 4)):
            text = mutate(text, rng)
        codes.append(exit_code([write(text)], []))
    assert set(codes) == {0, 2, 4}
    assert 0.1 * count < codes.count(0) < 0.9 * count


def test_three_hundred_damaged_overrides_load_or_say_what_is_wrong(write) -> None:
    rng = random.Random(1)
    path = write(BASE)
    keys = [*load_config([path]).origins, "data", "rewards", "rewards.0", "x", "data.train.a.b", "rewards.x"]
    codes = [exit_code([path], [f"{rng.choice(keys)}={rng.choice(VALUES)}" for _ in range(2)]) for _ in range(300)]
    assert {0, 2} <= set(codes) <= {0, 2, 4}
