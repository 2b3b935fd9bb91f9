"""A published model of thirty layers, whose attention is sharp, on real text: what tiny random models do not show.

Sampler, learner and plain transformers, packed rows, adapters, a run that is killed, an exported folder. The reference
is transformers in float64. The limits in nats are some twice what was measured with AVX-512: 4.2e-6 in the mean for the
learner, 1.5e-5 for vLLM's kernels for a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.data.images import MediaStore
from mmrl.rollout.records import read_lines, recorded_evaluations
from mmrl.types import Message, Prompt, Rollout, Segment
from tests.conftest import Bench, Plain
from tests.faults.comparison import metrics
from tests.faults.runs import Runs, events, outcome, rollouts, steps
from tests.runs.test_resumption import EVEN, KILLED

LICENSE = (Path(__file__).parents[1] / "LICENSE").read_text()
TEXTS = (
    (
        "Who painted the ceiling of the Sistine Chapel?",
        "It was Michelangelo, between 1508 and 1512, for Pope Julius II.",
    ),
    ("Who painted the ceiling of the Sistine Chapel?", "Raphael."),
    ("Übersetze: «Ça va?» – naïve façade, 12 µm ≥ ½ Ω.", "„Wie geht’s?“ – eine naïve Fassade; 12 µm sind ≥ ½ Ω."),
    ("「東京」は日本の首都ですか？ Да или нет? 🙂🇯🇵", "はい、そうです。 Да! 👍🏽"),
    (
        "Write a line of Python.\n\n\tprint('''a''')",
        "```python\nfor i in range(10):\n    print(f'{i:>3}', end='\\t')\n```",
    ),
    (
        f"Summarise this in one sentence.\n\n{LICENSE}",
        "It grants rights to use, change and share the work; no warranty.",
    ),
)
"""Questions and answers; the last question has more than 2,000 tokens."""
SAMPLER, LEARNER = {"mean": 3e-5, "max": 3e-4}, {"mean": 1e-5, "max": 1e-4}


def check_near(found: Sequence[Any], expected: Sequence[Any], limits: dict[str, float]) -> None:
    """Compare log-probs, sample by sample."""
    apart = np.abs(np.concatenate(found).astype(np.float64) - np.concatenate(expected))
    assert len(apart) > 10 and apart.mean() < limits["mean"] and apart.max() < limits["max"]


@pytest.fixture(scope="module")
def setting(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """The published model."""
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.text.encoding import Encoder

    folder = ModelFolder.open(str(published))
    media = MediaStore(tmp_path_factory.mktemp("media"), folder.image_sizes(3136, 50176))
    return Bench(folder, media, Encoder(folder, media), prompts=())


@pytest.mark.full
@pytest.mark.parametrize("texts", [TEXTS[:-1], pytest.param(TEXTS, marks=pytest.mark.slow)], ids=["short", "long"])
def test_packed_rows_of_real_text_are_one_by_one_and_plain_transformers(
    texts: Sequence[tuple[str, str]], setting: Bench, start: Callable[..., Any]
) -> None:
    """Two answers share their question."""
    samples = [answered(setting, question, answer) for question, answer in texts]
    engine = start(bench=setting, model={"lora": {"rank": 4}}, learner={"tokens_per_microbatch": 4096})
    with engine.learning() as learner:
        packed, single = (learner.network("policy").score(samples, way=way) for way in ("packed", "single"))
    reference = Plain(setting.folder.path, "float64")
    expected = [reference.logprobs(sample, setting.media).detach().numpy() for sample in samples]
    check_near(packed, expected, LEARNER)
    check_near(single, expected, LEARNER)


def answered(setting: Bench, question: str, answer: str) -> Rollout:
    """An answer that was written by hand, with the token that ends it."""
    (end,) = setting.folder.vocabulary.eos
    ids = np.array([*setting.folder.tokenizer.encode(answer, add_special_tokens=False), end], np.int32)
    segment = Segment(ids, True, np.zeros(len(ids), np.float32))
    prompt = setting.encoder.encode(Prompt(question[:20], (Message("user", question),)))
    return Rollout(prompt, (segment,), index=0, text=answer, finish_reason="stop", weight_version=0)


@pytest.fixture(scope="module")
def runs(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs whose rows are the short questions of TEXTS."""
    found = Runs(tmp_path_factory.mktemp("published"), published)
    (found.folder / "even.py").write_text(EVEN)
    (found.folder / "killed.py").write_text(KILLED)
    questions = list(dict.fromkeys(question for question, _ in TEXTS[:-1]))
    write_questions(found.rows, questions)
    return found


def write_questions(path: Path, questions: Sequence[str]) -> None:
    rows = [{"id": f"r{number}", "prompt": question, "answer": "7"} for number, question in enumerate(questions)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def options(runs: Runs, rows: Path, **trainer: Any) -> dict[str, Any]:
    table = {"name": "table", "path": str(rows)}
    return {
        "model": {"path": str(runs.model), "dtype": "float32", "lora": {"rank": 8, "alpha": 16}},
        "rewards": [{"name": f"{runs.folder / 'even.py'}:even"}],
        "data": {"train": table, "eval": dict(table), "max_prompt_tokens": 2400},
        "sampler": {"group_size": 3, "max_new_tokens": 16, "engine": {"kv_cache_memory_bytes": 2**29}},
        "learner": {"lr": 1e-3, "zero_stage": 0, "tokens_per_microbatch": 4096},
        "trainer": {"steps": 3, "eval_every": 3, "save_every": 1, "prompts_per_step": 4} | trainer,
    }


@pytest.fixture(scope="module")
def unbroken(runs: Runs, warm_mmrl: Callable[..., Any]) -> Path:
    """A run of three steps."""
    done = warm_mmrl("train", runs.config("unbroken", **options(runs, runs.rows)))
    assert done.returncode == 0, done.stderr
    return runs.folder / "unbroken"


@pytest.fixture(scope="module")
def exported(unbroken: Path, warm_mmrl: Callable[..., Any]) -> Callable[[int], Path]:
    """The folder that ``mmrl export`` makes of a checkpoint."""

    def export(step: int) -> Path:
        folder = unbroken.with_name(f"exported-{step}")
        done = warm_mmrl("export", unbroken / "checkpoints" / f"step-{step:06d}", folder)
        assert done.returncode == 0, done.stderr
        return folder

    return export


def check_records(records: Sequence[dict[str, Any]], model: Path) -> None:
    """Compare the recorded tokens and log-probs of a step with plain transformers on its model."""
    reference = Plain(model, "float64")
    expected = []
    for record in records:
        table = reference.distribution(record["prompt"], [], record["token_ids"], temperature=1.0)
        assert reference.prompt_ids == record["prompt_token_ids"]
        expected.append(table[np.arange(len(record["token_ids"])), record["token_ids"]].detach().numpy())
    check_near([record["sampler_logprobs"] for record in records], expected, SAMPLER)
    check_near([record["learner_logprobs"] for record in records], expected, LEARNER)


@pytest.mark.slow
def test_sampler_and_learner_are_plain_transformers_before_an_update_and_after_two(
    unbroken: Path, exported: Callable[[int], Path], published: Path
) -> None:
    check_records(rollouts(unbroken, 1), published)
    assert metrics(unbroken)[1]["policy/grad_norm"] > 0
    check_records(rollouts(unbroken, 3), exported(2))


@pytest.mark.slow
def test_prompts_of_2000_tokens_are_sampled_and_learned_as_plain_transformers_reads_them(
    runs: Runs, published: Path, warm_mmrl: Callable[..., Any]
) -> None:
    """vLLM reads a prompt in many blocks, and the prompts of a step in several parts (CPU_BATCHED_TOKENS)."""
    rows = runs.folder / "long.jsonl"
    turned = "\n\n".join(reversed(LICENSE.split("\n\n")))
    write_questions(rows, [TEXTS[0][0], TEXTS[-1][0], f"What is this about?\n\n{turned}"])
    sections = options(runs, rows, steps=1, prompts_per_step=3, eval_every=0)
    sections["sampler"]["group_size"] = 2
    done = warm_mmrl("train", runs.config("long", **sections))
    assert done.returncode == 0, done.stderr
    records = rollouts(runs.folder / "long", 1)
    assert sorted(len(record["prompt_token_ids"]) > 2048 for record in records) == [False] * 2 + [True] * 4
    check_records(records, published)


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_bits_after_a_kill(
    unbroken: Path, runs: Runs, household: Any, warm_mmrl: Callable[..., Any]
) -> None:
    config = str(runs.config(**options(runs, runs.rows)))
    killed = household.call("killed.py", "train", config, folder=runs.folder)
    assert killed.returncode == -9 and steps(runs.folder / "run")[-1] == "step-000001", killed.stderr
    done = warm_mmrl("train", config)
    assert done.returncode == 0, done.stderr
    expected, found = outcome(unbroken), outcome(runs.folder / "run")
    for part in expected:
        assert found[part] == expected[part], part
    assert [event["step"] for event in events(runs.folder / "run", "resumed")] == [1]


@pytest.mark.slow
def test_an_exported_model_gives_the_answers_of_the_last_evaluation(
    unbroken: Path, exported: Callable[[int], Path]
) -> None:
    reference = Plain(exported(3))
    records = list(read_lines(recorded_evaluations(unbroken)[3]))
    assert len(records) == 4
    for record in records:
        inputs = reference.processor(record["prompt"], add_special_tokens=False, return_tensors="pt")
        ids = reference.model.generate(**inputs, do_sample=False, max_new_tokens=16)[0]
        assert ids.tolist() == record["prompt_token_ids"] + record["token_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_is_told_its_rounding_and_not_stopped(precision: str, runs: Runs, warm_mmrl: Callable[..., Any]) -> None:
    """Measured: 2.2e-6 and 2.8e-2 nats; sampler and learner 8.5e-6 and 4.1e-2 apart."""
    sections = options(runs, runs.rows, steps=1, prompts_per_step=3, eval_every=0)
    sections["model"] |= {"dtype": precision}
    sections["sampler"] |= {"group_size": 2, "max_new_tokens": 12}
    done = warm_mmrl("train", runs.config(f"sound-{precision}", **sections))
    assert done.returncode == 0, done.stderr
    (told,) = events(runs.folder / f"sound-{precision}", "numerics")
    low, high = {"float32": (1e-7, 1e-5), "bfloat16": (5e-3, 0.1)}[precision]
    assert low < told["noise"] < high and told["gap"] < 10 * told["noise"]
    warned = events(runs.folder / f"sound-{precision}", "mismatch")
    assert not warned if precision == "float32" else all(event["verdict"] == "warn" for event in warned)
