"""Several evaluation sets in `data.eval`: their two forms, files and overrides over them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmrl.config.load import LoadedConfig, load_config, to_yaml
from mmrl.errors import MMRLError
from mmrl.plugin_host.registry import options_class

BASE = """
model: {{path: m}}
data:
  train: {{name: table, path: x.parquet}}
  eval: {}
rewards: [{{name: exact}}, {{name: format}}]
algorithm: {{name: grpo}}
"""
NAMED = "{geo: {name: table, path: a.parquet, samples: 4}, count: {name: table, path: b.parquet, temperature: 0.6}}"


@pytest.fixture
def load(tmp_path: Path):
    def load(evaluated: str, *overrides: str, then: str = "") -> LoadedConfig:
        files = {"one.yaml": BASE.format(evaluated), **({"two.yaml": then} if then else {})}
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        return load_config([tmp_path / name for name in files], overrides, options_class=options_class)

    return load


def ways(loaded: LoadedConfig) -> dict[str, tuple[object, ...]]:
    return {
        name: (each.spec.options["path"], each.num_samples, each.temperature, each.max_new_tokens, each.accuracy)
        for name, each in loaded.config.evaluations.items()
    }


GEO, COUNT = ("a.parquet", 4, 1.0, 1024, "exact"), ("b.parquet", 1, 0.6, 1024, "exact")


@pytest.mark.parametrize(
    ("evaluated", "overrides", "then", "expected"),
    [
        (NAMED, (), "", {"geo": GEO, "count": COUNT}),
        ("{name: table, path: y}", (), "", {"": ("y", 1, 0.0, 1024, "exact")}),
        ("{name: table, path: y}", ("trainer.eval_samples=2",), "", {"": ("y", 2, 1.0, 1024, "exact")}),
        ("null", (), "", {}),
        (
            NAMED,
            ("data.eval.geo.path=z", "data.eval.geo.max_new_tokens=2000", "data.eval.count.metric=format"),
            "",
            {"geo": ("z", 4, 1.0, 2000, "exact"), "count": (*COUNT[:4], "format")},
        ),
        (NAMED, ("data.eval.geo=null",), "", {"count": COUNT}),
        (NAMED, ("data.eval=null",), "", {}),
        (NAMED, ("data.eval.name=table", "data.eval.path=z"), "", {"": ("z", 1, 0.0, 1024, "exact")}),
        ("{name: table, path: y}", ("data.eval={a: {name: table, path: z}}",), "", {"a": ("z", 1, 0.0, 1024, "exact")}),
        (NAMED, (), "data: {eval: {geo: {limit: 5}}}", {"geo": GEO, "count": COUNT}),
        (NAMED, (), "data: {eval: {geo: {name: table, path: n}}}",
         {"geo": ("n", 1, 0.0, 1024, "exact"), "count": COUNT}),
        (NAMED, (), "data: {eval: {new: {name: table, path: n}}}",
         {"geo": GEO, "count": COUNT, "new": ("n", 1, 0.0, 1024, "exact")}),
        (NAMED, (), "data: {eval: {name: table, path: n}}", {"": ("n", 1, 0.0, 1024, "exact")}),
    ],
)  # fmt: skip
def test_sets_are_read_and_written_in_either_form(load, evaluated, overrides, then, expected, tmp_path):
    loaded = load(evaluated, *overrides, then=then)
    assert ways(loaded) == expected
    (tmp_path / "again.yaml").write_text(to_yaml(loaded.config))
    assert load_config([tmp_path / "again.yaml"], options_class=options_class).config == loaded.config


def test_an_option_that_is_a_mapping_makes_no_set(load):
    error = failure(load, "{name: table, path: y}", "data.eval.prompt={a: {b: c}}")
    assert "data.eval.prompt" in error and "set" not in error


def test_each_value_of_a_set_has_its_origin(load):
    origins = load(NAMED, "data.eval.geo.path=z").origins
    assert origins["data.eval.geo.path"] == "override data.eval.geo.path=z"
    assert origins["data.eval.count.path"].endswith("one.yaml:5") and origins["data.eval.count.samples"] == "default"


def failure(load, *words: str) -> str:
    with pytest.raises(MMRLError) as caught:
        load(*words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("{geo: {path: y}}",), "data.eval.geo.name is required"),
        (("{geo: {name: table, path: y}, limit: 3}",), "limit is no mapping"),
        (("{path: y}",), "give each a name: data.eval: {ONE: {name: ...}"),
        (("[{name: table}]",), "data.eval should be a mapping such as {name: ...}, not a list"),
        (("[{name: table}]",), "give each a name: data.eval: {ONE: {name: ...}"),
        (("{'a b': {name: table, path: y}}",), "cannot have a set that is called 'a b'"),
        (("{1a: {name: table, path: y}}",), "cannot have a set that is called '1a'"),
        ((f"{{{'a' * 65}: {{name: table, path: y}}}}",), "- and _, 64 at most"),
        (("{a.b: {name: table, path: y}}",), "cannot have a set that is called 'a.b'"),
        (("{a: {name: table, path: y}, a: {name: table, path: z}}",), "a is written twice"),
        ((NAMED, "trainer.best_metric=eval/accuracy"), "name one of: eval/geo/accuracy, eval/count/accuracy"),
        ((NAMED, "trainer.best_metric=eval_blank/coun/accuracy_gap"), "eval_blank/count/accuracy_gap"),
        ((NAMED, "trainer.stop_when=eval/g/accuracy > 0"), "trainer.stop_when waits for eval/g/accuracy"),
        ((NAMED, "data.eval.geo.temperature=0"), "data.eval.geo asks for 4 greedy completions"),
        ((NAMED, "data.eval.geo.temperature=0.001"), "data.eval.geo.temperature is 0 (greedy), or 0.01 to 10"),
        ((NAMED, "data.eval.geo.samples=0"), "data.eval.geo.samples should be greater than or equal to 1"),
        ((NAMED, "data.eval.geo.metric=iou"), "data.eval.geo.metric is 'iou', which is no reward"),
        ((NAMED, "data.eval.geo.answer_key=q"), "did you mean answer?"),
        ((NAMED, "data.eval.geo.weight=2"), "data.eval.geo.weight is set, but there is nothing to mix it with"),
        ((NAMED, "data.eval.geo.path.5=x"), "data.eval.geo.path"),
        (("{name: table, path: y, samples: 4}",), "unknown key data.eval.samples"),
    ],
)
def test_what_is_wrong_with_sets_is_said(load, words, what):
    assert what in failure(load, *words)


def test_a_set_of_episodes_has_the_limits_of_the_environment(load):
    over = ("environment={name: lake}", "data.eval.geo.max_new_tokens=5")
    assert "episodes have the limits of the environment" in failure(load, NAMED, *over)


def test_the_longest_completion_may_be_that_of_a_set(load):
    config = load(NAMED, "data.eval.geo.max_new_tokens=2000").config
    assert (config.max_completion_tokens, config.max_sampled_tokens) == (1024, 2000)
