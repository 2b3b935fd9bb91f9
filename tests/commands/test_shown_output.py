"""The output that the commands' page shows is what the commands print, but for numbers and names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mmrl.commands.cli import main

PAGE = (Path(__file__).parents[2] / "mmrl/commands/README.md").read_text()


@pytest.fixture
def config(models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on 40 pictures of which some cannot be used, one without a reference answer and one with a wrong one."""
    rows = []
    for number in range(40):
        Image.new("RGB", (84 + 28 * (number % 3), 84), (6 * number, 0, 0)).save(tmp_path / f"{number}.png")
        question = "<image>How many green circles are there?" + " Look again." * (
            30 if number in (17, 18) else number % 4
        )
        answer = {5: "", 6: "12"}.get(number, str(number % 7))
        demonstration = f"There are \\boxed{{{number % 7}}}."
        rows.append({"problem": question, "images": [f"{number}.png"], "answer": answer, "solution": demonstration})
    (tmp_path / "3.png").write_bytes(b"no picture")
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": {"path": str(models("qwen2_5_vl"))},
        "data": {
            "train": {"name": "table", "path": "train.jsonl"},
            "max_prompt_tokens": 200,
            "max_bad_rows": 0.1,
        },
        "rewards": [{"name": "math"}, {"name": "format", "weight": 0.1}],
        "algorithm": {"name": "grpo"},
        "sampler": {"group_size": 8, "max_new_tokens": 64},
        "trainer": {"prompts_per_step": 16, "steps": 20, "run_dir": "run"},
    }
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return Path("config.yaml")


def shown(heading: str) -> Iterator[str]:
    """Lines of the first block of output below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (block, *_) = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    yield from (line for line in block.splitlines() if line.strip() not in ("...", ""))


def masked(line: str) -> str:
    """The line without its numbers, names and bars."""
    line = re.sub(r"'(?:[^'\\]|\\.)*'", "'x'", line)
    line = re.sub(r"; ([\d.]+ \w+) free at .*", "; 1 MB free", line).replace("GB", "MB")
    line = re.sub(r"#+$", "#", re.sub(r"\d+(?:\.\d+)?%?", "1", line))
    return re.sub(r"\s+", " ", line)


@pytest.mark.parametrize(
    ("heading", "words"), [("check", ["check"]), ("plan", ["plan", "--gpus", "1", "--memory", "80"])]
)
def test_the_page_shows_what_the_command_prints(
    heading: str, words: list[str], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words, str(config)])
    out, err = capsys.readouterr()
    printed = {masked(line) for line in out.splitlines()}
    assert [line for line in shown(heading) if masked(line) not in printed] == [], out + err
