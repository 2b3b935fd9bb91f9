"""``mmrl help``: what users of other frameworks ask finds its passage among the first three."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from mmrl.commands.catalogue import COMMANDS, EXIT_CODES
from mmrl.commands.cli import main
from mmrl.commands.help.command import passages
from mmrl.commands.help.pages import PAGES, root, sections
from mmrl.commands.help.ranking import Index

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {
    "out of memory": "When engines do not start, or memory runs out",
    "cuda oom": "When engines do not start, or memory runs out",
    "resume": "Stop it, kill it, go on",
    "--resume": "mmrl train",
    "resume_from_checkpoint": "resume_from_checkpoint",
    "freeze vision tower": "model.freeze",
    "wandb": "tracker wandb",
    "reward function": "rewards",
    "how do I write a reward?": "Writing a plugin > A reward",
    "my own algorithm": "Writing a plugin > An algorithm",
    "multiple images": "Datasets > Images",
    "image resolution": "images",
    "kl": "algorithm.kl",
    "kl_coef": "algorithm.kl.coef",
    "lora": "model.lora",
    "qlora": "model.quantize",
    "merge lora": "export",
    "learner.lr": "learner.lr",
    "learning rate schedule": "learner.schedule",
    "num_generations": "sampler.group_size",
    "num_iterations": "learner.epochs",
    "gradient accumulation": "learner.tokens_per_microbatch",
    "save_steps": "trainer.save_every",
    "exit code 6": "exit code 6: the numbers",
    "exit code 10": "exit code 10",
    "multi node": "Many ranks, on one machine or many",
    "slurm": "Slurm",
    "tensor parallel": "sampler.tensor_parallel_size",
    "tool calling": "Give the policy a tool in five minutes",
    "custom dataset": "Datasets",
    "dataset columns": "Datasets > Columns",
    "bad rows": "data.max_bad_rows",
    "system prompt": "data.system_prompt",
    "convert an EasyR1 config": "Commands",
    "push to hub": "mmrl export",
    "evaluate a checkpoint": "mmrl eval",
    "pass@k": "Commands > eval",
    "entropy collapse": "Monitors",
    "early stopping": "trainer.stop_when",
    "sampler and learner disagree": "trainer.on_mismatch",
    "loss is zero": "mmrl > Two commands",
    "dapo": "algorithm dapo",
    "notebook": "From Python",
    "plot curves": "The viewer > What it shows",
    "reward timeout": "rewards[].timeout_s",
    "gpu memory": "sampler.gpu_memory_utilization",
}
"""Questions, and the title, or its end, of a passage that answers."""


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(list(passages()))


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_passage_that_answers_is_among_the_first_three(question: str, index: Index) -> None:
    titles = [hit.passage.title for hit in index.search(question, 3)]
    assert any(QUESTIONS[question].lower() in title.lower() for title in titles), titles


@pytest.mark.parametrize(
    "question",
    [
        *("kl", "learner.lr", "num_generations", "exit code 6", "mmrl replay", "dapo", "save_steps"),
        *("data.train.path", "data.eval.path", "data.eval.samples", "rewards.timeout_s"),
    ],
)
def test_what_is_named_comes_first(question: str, index: Index) -> None:
    (first,) = index.search(question, 1)
    assert {question, QUESTIONS.get(question)} & {first.passage.title, *first.passage.names, *first.passage.aliases}


def _kinds(annotation: object) -> tuple[object, ...]:
    """The class of a section, also of one that may be left out."""
    found = get_args(annotation)
    return found if type(None) in found else (annotation,)


def test_every_command_key_and_exit_code_is_found_by_its_name(index: Index) -> None:
    from mmrl.config.sections import Config

    keys = [
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for kind in _kinds(field.annotation)
        for key in getattr(kind, "model_fields", ())
    ]
    assert len(keys) > 60
    assert {"critic.lr", "cluster.ranks"} <= {*keys}
    wanted = {key: key for key in keys} | {f"mmrl {name}": f"mmrl {name}" for name in COMMANDS}
    wanted |= {f"exit code {code}": f"exit code {code}: {text}" for code, text in EXIT_CODES.items()}
    found = {words: index.search(words, 1)[0].passage for words in wanted}
    assert {words: each.title for words, each in found.items()} == wanted
    assert [words for words, each in found.items() if not any(each.blocks)] == []


def test_places_lead_to_the_heading(index: Index) -> None:
    hit = index.search("stop it, kill it, go on", 1)[0]
    path, line = hit.passage.place.rsplit(":", 1)
    assert Path(path).read_text().splitlines()[int(line) - 1] == "## Stop it, kill it, go on"


def test_a_page_is_cut_at_headings_outside_of_code_and_rows_of_tables_stand_alone(tmp_path: Path) -> None:
    text = "# A [b](c)\nOne\ntwo.\n\n- item\n## Below\n```\n# no heading\n```\n"
    text += "| k | v |\n|---|---|\n| `x` | a \\| b |\n# C\nend\n"
    found = list(sections(text, tmp_path / "page.md"))
    assert [(each.title, each.place.rpartition(":")[2], each.blocks) for each in found] == [
        ("A b", "1", ("One two.", "- item")),
        ("A b > Below", "6", ("    # no heading", "`x`: a | b")),
        ("C", "13", ("end",)),
    ]


def test_it_is_printed_as_wide_as_the_terminal_without_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["help", "freeze", "vision", "tower", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "model.freeze" and "Parts that are not trained" in out
    assert max(map(len, out.splitlines())) <= 60 and "\x1b" not in out
    assert main(["help", "learner.lr", "--json", "--limit", "2"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["title"] == "learner.lr" and first["score"] > second["score"]


def test_titles_are_bold_on_a_terminal_that_may_have_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    for variables, first in (({}, "\x1b[1mlearner.lr\x1b[0m"), ({"NO_COLOR": "1"}, "learner.lr")):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", stream := Terminal())
            for name, value in variables.items():
                patch.setenv(name, value)
            assert main(["help", "learner.lr", "--limit", "1"]) == 0
        head, *rest = stream.getvalue().splitlines()
        assert head == first and "\x1b" not in "".join(rest)


def test_words_that_no_page_has_are_answered_with_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "chekpoint"]) == 2
    error = capsys.readouterr().err
    assert "no page, key or command has 'chekpoint'" in error and "checkpoint" in error.partition("possible:")[2]
    assert main(["help", "qqqq"]) == 2
    assert "possible" not in capsys.readouterr().err


def test_help_alone_is_the_list_of_commands_which_tells_of_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :] and "mmrl help WORDS" in out and "exit codes: 0 done" in out


def test_plugins_of_others_are_read_and_not_imported(package: Callable[..., str]) -> None:
    package("""import nothing_of_that_name
from mmrl.interfaces import PluginConfig, Reward

class Length(Reward):
    class Config(PluginConfig):
        zebras: int = 3
        \"\"\"Number of striped animals.\"\"\"
""")
    package("no Python (", name="broken")
    (first,) = Index(list(passages())).search("striped animals", 1)
    assert (first.passage.title, first.passage.place) == ("rewards[].zebras of length", "a key of length; default 3")


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from mmrl.commands.cli import main; main(['help', 'kl']);"
        "print(*{'torch', 'transformers', 'pyarrow', 'datasets'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.startswith("algorithm.kl\n") and done.stdout.splitlines()[-1] == ""


def test_the_pages_are_those_that_the_wheel_carries() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {name: f"mmrl/pages/{name}" for name in PAGES}
    assert root() == ROOT and [name for name in PAGES if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("words", ["exit code 137", "Exit code 7", "code -9"])
def test_an_exit_code_that_there_is_not_is_told(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", words]) == 2
    told = capsys.readouterr().err
    assert f"mmrl has no exit code {words.split()[-1]}\n" in told and "5 resources" in told and "137 is a kill" in told
