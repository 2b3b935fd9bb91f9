"""The audit of a run's own engines: no false alarm over the families, faults that it finds, and a process that dies."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mmrl.commands.doctor import audit as audit_module
from mmrl.commands.doctor.audit import audit
from mmrl.commands.doctor.audited_run import Audit, worst_of_each
from mmrl.commands.doctor.finding import Finding, exit_code, table
from mmrl.commands.doctor.text_rows import special_row, turn_rows
from mmrl.commands.doctor.verdicts import shown
from mmrl.config.load import from_mapping
from mmrl.config.sections import Config
from mmrl.engine.network.family import FAMILIES
from mmrl.errors import ConfigError
from mmrl.step.audit.probe_prompts import fitting
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.start_audit import cheap_rows
from mmrl.step.audit.tokens import prompt_row
from tests.cluster.process_ranks import ranks_forked_from, run_together
from tests.engine.teachers import write_teacher
from tests.engine.test_turns import STRIPS_ALWAYS, filled
from tests.proofs import REPRESENTATIVES, has

ENGINES, TEXTS = ["audit: engines"], ["special tokens", "tokens of prompts", "turns with text", "turns with images"]
TOWERS = ["pixels", "grids", "image tokens"]
WEIGHTS = ["weights, before an update", "update moved", "weights, after an update"]
START = "start: "
AFTER = ["learner = plain transformers, after an update", "sampler = learner, after an update"]


def config_of(model: Path, sampler: str = "hf", precision: str = "float32", /, **sections: Any) -> Config:
    engine = {"engine": {"kv_cache_memory_bytes": 2**26}} if sampler == "vllm" else {}
    values: dict[str, Any] = {
        "model": {"path": str(model), "dtype": precision},
        "data": {"train": {"name": "none-that-is-installed"}, "max_prompt_tokens": 64},
        "algorithm": {"name": "grpo"},
        "rewards": [{"name": "a-file-that-is-gone.py:score"}],
        "sampler": {"name": sampler, "group_size": 2, "max_new_tokens": 8, **engine},
        "trainer": {"steps": 1, "prompts_per_step": 2},
    }
    for key, given in sections.items():
        values[key] = {**values.get(key, {}), **given} if isinstance(given, dict) else given
    return from_mapping(values)


class Sound(Audit):
    """An audit of a run without a fault, and on its engine the rows of a start with an environment."""

    def _cheap(self) -> None:
        from mmrl.engine.text.encoding import Encoder

        folder, media = self._setup.folder, self._setup.media
        keeps = folder.family.model_type == "gemma4"  # its template removes thoughts from earlier turns
        environment = {"name": "none-that-is-asked", "max_turns": 2, "max_turn_tokens": 6, "max_observation_tokens": 99,
                       "max_images": 2, "keep_thoughts": keeps}  # fmt: skip
        config = from_mapping(self._config.model_dump(mode="json") | {"environment": environment, "rewards": []})
        for row in cheap_rows(self._engine, Encoder(folder, media, keep_thoughts=keeps), config):
            if row.probe != "prompts left out":
                self._emit(shown(row, START))
        super()._cheap()


def in_a_fork(
    worker: object, values: dict[str, Any], folder: Path, fault: Callable[[], None] | None, kind: type[Audit]
) -> list[Finding]:
    if fault is not None:
        fault()
    rows: list[Finding] = []
    kind(from_mapping(values), folder, rows.append).run()
    return rows


@pytest.fixture
def audited(warm_engines, tmp_path: Path) -> Callable[..., list[Finding]]:
    """The rows of an audit in a process that has imported the engines; a fault is put into its code before."""

    def run(config: Config, fault: Callable[[], None] | None = None, kind: type[Audit] = Audit) -> list[Finding]:
        (rows,) = run_together(1, warm_engines, in_a_fork, config.model_dump(mode="json"), tmp_path, fault, kind)
        return list(rows)

    return run


def masked(text: str) -> str:
    """The text without its numbers, and with single spaces."""
    return " ".join(re.sub(r"\d[\d.]*(e[-+]\d+)?", "1", text).split())


def shown_rows() -> list[str]:
    """The rows that the commands' page shows of an audit."""
    page = (Path(__file__).parents[3] / "mmrl/commands/README.md").read_text()
    block = page.partition("### The audit of a run")[2].split("```")[1]
    return [masked(row) for row in re.split(r"^(?=ok )", block, flags=re.MULTILINE) if row.strip()]


def bad(rows: Sequence[Finding]) -> list[str]:
    return [row.check for row in rows if row.status != "ok"]


def cases(ranks: int) -> list[Any]:
    """Each family with each sampler in each precision that it has; a few stay in the shorter tiers."""
    found = []
    for family in FAMILIES:
        for sampler, precision in ((s, p) for s in ("vllm", "hf") for p in ("float32", "bfloat16")):
            if not has(family, sampler, precision):
                continue
            short = (ranks, family, sampler, precision) == (1, "qwen2_5_vl", "vllm", "float32")
            full = family in REPRESENTATIVES and (sampler, precision) == ("vllm", "bfloat16")
            if ranks > 1:
                full = (family, precision) == ("qwen2_5_vl", "float32")
            mark = () if short else pytest.mark.full if full else pytest.mark.slow
            found.append(pytest.param(family, sampler, precision, marks=mark, id=f"{family}-{sampler}-{precision}"))
    return found


def sound(rows: Sequence[Finding], family: str) -> set[str]:
    """The names of rows of a run without a fault; all that its family has are there, and none is bad."""
    assert bad(rows) == [], [row for row in rows if row.status != "ok"]
    names, vision = {row.check for row in rows}, FAMILIES[family].vision
    expected = {*ENGINES, *TEXTS[:: 1 if vision else 2], *(TOWERS if vision else ()), *WEIGHTS, *AFTER}
    expected |= {f"{START}sampler = learner, no image"}
    if vision:
        expected |= {"sight, another image", "sampler = learner, two images", f"{START}sight, another image"}
    assert expected <= names, expected - names
    probes = [row for row in rows if row.area == "numbers"]
    assert all(row.number is not None and row.bound is not None and row.finds for row in probes)
    return names


@pytest.mark.parametrize(("family", "sampler", "precision"), cases(ranks=1))
def test_a_sound_run_has_no_bad_row(family, sampler, precision, models, audited):
    rows = audited(config_of(models(family), sampler, precision), kind=Sound)
    sound(rows, family)
    if (family, sampler, precision) == ("qwen2_5_vl", "vllm", "float32"):
        printed = masked("\n".join(table([row for row in rows if not row.check.startswith(START)])))
        assert all(row in printed for row in shown_rows()), printed


@pytest.mark.full
def test_each_teacher_has_a_row_on_probes_of_its_source(models, audited, tmp_path):
    policy = models("qwen2_5_vl")
    seeing = write_teacher(tmp_path / "seeing", policy, num_hidden_layers=3)
    teachers = [{"path": str(seeing), "sources": ["pictures"]}, {"path": str(models("qwen2")), "sources": ["texts"]}]
    config = config_of(policy, algorithm={"name": "opd"}, rewards=[], reference=teachers)
    rows = audited(config, partial(_shifted, 0.0))
    assert bad(rows) == [], [row for row in rows if row.status != "ok"]
    found = {row.check: row.found for row in rows if row.check.startswith("teacher: ")}
    assert [*found] == [f"teacher: packed = one by one, rows of {name}" for name in ("pictures", "texts")]
    assert all(float(text.split(", and ")[1].split()[0]) > 0.01 for text in found.values())
    assert "update moved" in {row.check for row in rows}
    assert bad(audited(config, partial(_shifted, 0.1))) == [*found]


def _shifted(by: float) -> None:
    """Move the teachers' log-probs in packed rows."""
    from mmrl.engine.learner.teachers import Teachers

    score = Teachers.score
    Teachers.score = lambda own, samples, *, way="packed": [  # type: ignore[method-assign]
        values + by * (way == "packed") for values in score(own, samples, way=way)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampler", ["hf", "vllm"])
def test_a_published_model_has_no_bad_row(sampler, precision, published, audited):
    sound(audited(config_of(published, sampler, precision), kind=Sound), "llama")


@pytest.mark.parametrize(("family", "sampler", "precision"), cases(ranks=2))
def test_two_ranks_have_no_bad_row(family, sampler, precision, models, warm_engines, tmp_path):
    # Two ranks cannot share the one head of keys that linear attention has in tiny models: each has a copy of its own.
    shared = sampler == "vllm" and not family.startswith("qwen3_5")
    config = config_of(
        models(family),
        sampler,
        precision,
        sampler={"tensor_parallel_size": 2} if shared else {},
        learner={"zero_stage": 3},
        cluster={"name": "ray", "ranks": 2},
        data={"train": {"name": "table", "path": "none.jsonl"}},  # all nodes must have the run's plugins
        rewards=[{"name": "math"}],
    )
    rows: list[Finding] = []
    with ranks_forked_from(warm_engines):
        Sound(config, tmp_path, rows.append).run()
    sound(rows, family)
    assert "2 ranks" in next(row.found for row in rows if row.check == "audit: engines")


KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"model": {"freeze": ["vision", "projector"]}},
    "adapters": {"model": {"lora": {"rank": 4}}, "learner": {"zero_stage": 3}},
    "demonstrations": {"algorithm": {"name": "sft"}, "rewards": []},
    "reward model": {"algorithm": {"name": "bradley_terry"}, "rewards": []},
    "greedy": {"algorithm": {"name": "remax"}},
}
SOONER = (
    ("gemma4", "frozen", "float32"),
    ("qwen2_5_vl", "adapters", "bfloat16"),
    ("qwen2_5_vl", "reward model", "float32"),
)


@pytest.mark.parametrize(
    ("family", "kind", "precision"),
    [
        pytest.param(*case, marks=pytest.mark.full if case in SOONER else pytest.mark.slow)
        for case in product(FAMILIES, KINDS, ("float32", "bfloat16"))
        if FAMILIES[case[0]].vision or case[1] != "frozen"
    ],
)
def test_runs_of_other_kinds_have_no_bad_row(family, kind, precision, models, audited):
    rows = audited(config_of(models(family), "hf", precision, **KINDS[kind]))
    assert bad(rows) == [], [row for row in rows if row.status != "ok"]
    names = {row.check for row in rows}
    assert ("weights, after an update" in names) == (kind not in ("demonstrations", "reward model"))
    assert "update moved" in names


ECHO = """
from mmrl import Environment, Observation


class Echo(Environment):
    def reset(self, prompt, seed):
        return None

    def step(self, turn):
        return Observation("seen", done=True)
"""


@pytest.fixture
def thoughtless(models: Callable[[str], Path], tmp_path: Path) -> Callable[..., Config]:
    """A config with an environment, and a template that removes thoughts from earlier turns."""
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "template.jinja").write_text(filled(STRIPS_ALWAYS))

    def build(**options: Any) -> Config:
        environment = {"name": f"{tmp_path}/echo.py:Echo", "max_turns": 2, "max_observation_tokens": 99, "workers": 1}
        model = {"chat_template": str(tmp_path / "template.jinja")}
        return config_of(models("qwen2_5_vl"), model=model, environment=environment | options, rewards=[])

    return build


@pytest.mark.full
def test_a_run_that_keeps_thoughts_has_rows_of_a_second_turn(thoughtless, audited):
    rows = audited(thoughtless(keep_thoughts=True))
    assert bad(rows) == [], [row for row in rows if row.status != "ok"]
    found = {row.check: row.found for row in rows}
    assert "keep_thoughts accepts" in found["turns with text"]
    assert "sampler = learner, a second turn" in found and "prompts left out" not in found, found


@pytest.mark.full
def test_the_probes_are_read_by_the_runs_own_encoder_and_by_one_without_tools_where_it_is_refused(
    thoughtless, tmp_path
):
    rows: list[Finding] = []
    kept, refused = (Audit(thoughtless(keep_thoughts=keeps), tmp_path, rows.append) for keeps in (True, False))
    assert kept._encoder is kept._setup.encoder
    assert kept._encoder.deviation(images=False) == "it removes thoughts from earlier turns"
    refused._open()
    assert refused._prompts
    assert not refused._attempt("texts", refused._texts)
    assert rows[-1].status == "bad" and "cannot carry an observation" in rows[-1].found


def test_an_audit_of_which_no_prompt_fits_makes_no_update(models, tmp_path):
    rows: list[Finding] = []
    found = Audit(config_of(models("qwen2")), tmp_path, rows.append)
    found._update()
    found._after()
    assert rows == []


def forgets_norms() -> None:
    """A sync leaves the weights of norms out."""
    from mmrl.engine.sampler.hf_sampler import HFSampler

    def load(self: Any, weights: Any, version: int) -> None:
        own = dict(self._model.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            if "norm.weight" not in name:
                own[name].data.copy_(weight)
        self.weight_version = version

    HFSampler.load = load  # type: ignore[method-assign]


def mirrors_images() -> None:
    """The learner reads every image the wrong way round, in a layout of the same size."""
    from PIL import ImageOps

    from mmrl.engine.network.vision import ImageInputs

    sound = ImageInputs.__init__

    def begin(self: Any, *args: Any, **options: Any) -> None:
        sound(self, *args, **options)
        self._read = lambda ref: self._form.read(ImageOps.mirror(self._media.load(ref)))
        self._ahead._read = self._read

    ImageInputs.__init__ = begin  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("sampler", "fault", "found"),
    [
        ("hf", forgets_norms, "weights, after an update"),
        pytest.param("vllm", mirrors_images, "pixels", marks=pytest.mark.full),
    ],
    ids=["weights", "pixels"],
)
def test_a_fault_has_its_row_and_the_exit_code_of_numbers(sampler, fault, found, models, audited):
    rows = audited(config_of(models("qwen2_5_vl"), sampler), fault)
    (row,) = [row for row in rows if row.check == found]
    assert row.status == "bad" and row.number is not None and row.bound is not None and row.number > row.bound
    assert exit_code(rows) == 6
    assert "weights, before an update" not in bad(rows)


@pytest.fixture
def text_rows(models, tmp_path) -> Callable[[], dict[str, ProbeRow]]:
    """The rows that need no engine, by name."""
    from mmrl.data.images import MediaStore
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.text.encoding import Encoder

    folder = ModelFolder.open(str(models("qwen2_5_vl")))
    media = MediaStore(tmp_path, folder.image_sizes(3136, 50176))

    def rows() -> dict[str, ProbeRow]:
        encoder = Encoder(folder, media)
        fit = fitting(encoder, max_tokens=256, max_images=2)
        shown = [probe.encoded for probe in fit.prompts if probe.has_images]
        found = [special_row(folder, encoder), prompt_row(shown, encoder)]
        found += turn_rows(encoder, folder, shown[0].images[0], needed=True)
        return {row.probe: row for row in found}

    return rows


def test_texts_that_become_special_tokens_are_counted(text_rows, monkeypatch):
    assert text_rows()["special tokens"].verdict == "ok"
    monkeypatch.setattr("mmrl.engine.text.chat_template.ChatTemplate.spelled", lambda self, text: text)
    found = text_rows()["special tokens"]
    assert (found.verdict, found.number) == ("bad", 14) and "<|endoftext|>" in found.found


def test_a_separator_that_is_dropped_between_turns_is_counted_with_texts_and_with_images(text_rows, monkeypatch):
    from mmrl.engine.text.turns import TurnSuffix

    sound = TurnSuffix.ids
    monkeypatch.setattr(TurnSuffix, "ids", lambda self, *args, **options: sound(self, *args, **options)[1:])
    rows = text_rows()
    assert rows["turns with text"].number > 0 and rows["turns with images"].verdict == "bad"


def test_placeholders_that_are_expanded_twice_are_counted(text_rows, monkeypatch):
    from mmrl.engine.network.image_form import OneGrid

    sound = OneGrid.tokens
    assert text_rows()["tokens of prompts"].number == 0
    monkeypatch.setattr(OneGrid, "tokens", lambda self, *size: 2 * sound(self, *size))
    assert text_rows()["tokens of prompts"].verdict == "bad"


@pytest.mark.parametrize(("needed", "verdict"), [(True, "bad"), (False, "ok")])
def test_turns_that_a_template_cannot_carry_are_bad_for_a_run_that_needs_them(needed, verdict):
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("the model's chat template cannot carry an observation with text")

    (row,) = turn_rows(cast(Any, SimpleNamespace(ways_of_observations=refuse)), cast(Any, None), None, needed=needed)
    assert row.verdict == verdict and "cannot carry" in row.found


def test_thoughts_that_a_run_lets_a_template_remove_are_told_and_are_not_bad():
    encoder = SimpleNamespace(
        ways_of_observations=lambda images: {"text": "tool"},
        deviation=lambda images: "it removes thoughts from earlier turns",
    )
    (row,) = turn_rows(cast(Any, encoder), cast(Any, None), None, needed=True)
    assert row.verdict == "ok" and "keep_thoughts accepts: it removes thoughts" in row.found


def test_a_model_that_cannot_be_opened_is_a_row_and_what_was_not_looked_at_another(tmp_path):
    rows: list[Finding] = []
    Audit(config_of(tmp_path / "none"), tmp_path, rows.append).run()
    first, left = rows
    assert (first.area, first.check, first.status) == ("engine", "audit: model", "bad")
    assert "no model folder" in first.found and "model.path" in first.remedy
    assert left.found == "texts, engines, probes, inspection, update, after the update"
    assert exit_code(rows) == 5


def test_a_vision_model_without_a_processor_is_named_with_the_file_that_it_lacks(models, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in models("qwen2_5_vl").iterdir():
        if not file.name.endswith("processor_config.json"):
            (folder / file.name).symlink_to(file)
    rows: list[Finding] = []
    Audit(config_of(folder), tmp_path, rows.append).run()
    assert rows[0].found == "a model of type qwen2_5_vl reads images, and its folder has no processor"
    assert "preprocessor_config.json" in rows[0].remedy


def test_the_worst_prompt_of_each_pair_is_shown():
    rows = [
        ProbeRow.at_most("sampler = learner, no image", 1e-6, 1e-4, "fine", ""),
        ProbeRow.at_most("sampler = learner, two images", 1e-2, 1e-4, "off", ""),
        ProbeRow.at_most("packed = one by one, no image", 0.0, 1e-4, "same", ""),
    ]
    worst, other = worst_of_each(rows)
    assert (worst.probe, worst.verdict) == ("sampler = learner, after an update", "bad")
    assert worst.found == "off, on the worst of 2 prompts (two images)"
    assert other.probe == "packed = one by one, after an update"


ROW = Finding("numbers", "pixels", "bad", "off", "stop", number=0.5, bound=1e-5, finds="an image resized")


def test_a_process_that_aborts_leaves_its_rows_and_its_last_words(models, tmp_path):
    script = tmp_path / "script.py"
    line = json.dumps(asdict(ROW))
    script.write_text(
        "import json, os, sys\n"
        f"open(sys.argv[2], 'a').write({line!r} + chr(10))\n"
        "print('path', json.load(open(sys.argv[1]))['model']['path'], flush=True)\nos.abort()"
    )
    kept, ended = audit(config_of(Path("somewhere")), command=[sys.executable, str(script)])
    assert kept == ROW and "finds: an image resized" in "\n".join(table([kept]))
    assert (ended.area, ended.check, ended.status) == ("engine", "audit: process", "bad")
    assert "SIGABRT" in ended.found and "path somewhere" in ended.found


def test_a_process_that_hangs_is_ended(tmp_path, monkeypatch):
    (ended,) = audit(config_of(tmp_path), command=[sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    assert "still running" in ended.found and audit_module.AUDIT[-1] == "mmrl.commands.doctor.audited_run"
