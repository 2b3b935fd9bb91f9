"""Plans of tiny models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from mmrl.commands.cli import main

Plan = Callable[..., tuple[int, dict[str, Any], str]]
ROWS = 6


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """A config of 6 prompts with an image of 84x56 pixels each, or of text alone."""

    def write(model: Path, **sections: Any) -> Path:
        rows = [{"problem": f"what is {i}+1?", "answer": str(i + 1)} for i in range(ROWS)]
        if "vl" in model.name:
            Image.new("RGB", (84, 56), "white").save(tmp_path / "white.png")
            rows = [{**row, "problem": "<image>" + row["problem"], "images": ["white.png"]} for row in rows]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        base: dict[str, Any] = {
            "model": {"path": str(model)},
            "data": {"train": {"name": "table", "path": str(tmp_path / "rows.jsonl")}, "max_prompt_tokens": 64},
            "rewards": [{"name": "exact"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"group_size": 4, "max_new_tokens": 10},
            "learner": {"tokens_per_microbatch": 4096, "zero_stage": 1},
            "trainer": {"prompts_per_step": 3, "steps": 2, "run_dir": str(tmp_path / "run")},
        }
        for key, value in sections.items():
            base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(base))
        return path

    return write


@pytest.fixture
def plan(config: Callable[..., Path], models: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> Plan:
    """Exit code, answer and stderr of ``mmrl plan --json``."""

    def run(*words: str, model: Path | None = None, **sections: Any) -> tuple[int, dict[str, Any], str]:
        code = main(["plan", str(config(model or models("qwen2_5_vl"), **sections)), "--json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    return run
