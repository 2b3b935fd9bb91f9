"""Every family from a folder as on the hub: trained, saved and evaluated by the commands, on vLLM and DeepSpeed."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from mmrl.commands.cli import main
from mmrl.engine.network.family import FAMILIES
from mmrl.rollout.records import read_rollouts, read_step, recorded_steps
from mmrl.types import ImageRef
from tests.as_on_hub import NEW, TIED
from tests.faults.runs import rollouts
from tests.proofs import families, has

pytestmark = pytest.mark.full

REWARD = """\
def fingerprint(rollouts):
    return [sum(place * token for place, token in enumerate(r.token_ids.tolist(), 1)) / 1000 for r in rollouts]
"""
TOKENS = 8
ENVIRONMENT = """\
import hashlib

import numpy as np

from mmrl import Environment, Observation


class Shown(Environment):
    def reset(self, prompt, seed):
        self._seed = seed

    def step(self, turn):
        drawn = hashlib.sha256(f"{self._seed} {turn.text}".encode("utf-8", "replace")).digest()
        random = np.random.default_rng(list(drawn))
        images = [random.integers(0, 256, (*random.integers(40, 110, 2), 3), np.uint8) for _ in range(drawn[0] % 3)]
        done = drawn[1] < 40
        return Observation([f"turn {turn.index}", *images, "so?"], drawn[2] / 256, done, role="user")
"""


@dataclass
class Run:
    """Two steps of a family, and an evaluation of what they left in a second process."""

    start: Path
    path: Path
    processes: tuple[subprocess.CompletedProcess[str], ...]

    def checkpoint(self, step: int) -> Path:
        return self.path / "checkpoints" / f"step-{step:06d}" / "model"

    @property
    def exported(self) -> Path:
        """What ``mmrl export`` makes of the newest checkpoint."""
        return self.path.with_name(f"{self.path.name}-exported")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        return rollouts(self.path, step)

    def images(self, record: dict[str, Any]) -> list[Image.Image]:
        return [Image.open(self.path / "media" / f"{image['hash']}.png") for image in record["images"]]

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, picture: Callable[..., Any]) -> Path:
    """Text rows; rows of which one has an image, one three and one none; and a reward that tells completions apart."""
    folder = tmp_path_factory.mktemp("families")
    (folder / "reward.py").write_text(REWARD)
    for index, (width, height) in enumerate([(64, 64), (100, 60), (60, 130)]):
        (folder / f"{index}.png").write_bytes(picture(width, height).data)
    several = [{"problem": "<image>What digit is this?", "images": ["0.png"], "answer": "7"}]
    three = "<image> and <image> and <image>, what is the sum?"
    several.append({"problem": three, "images": ["1.png", "2.png", "0.png"], "answer": "7"})
    several.append({"problem": "what is 3+4?", "images": [], "answer": "7"})
    sums = [{"problem": f"what is {i}+{i}{' and 1' * 20 * i}?", "answer": str(2 * i)} for i in range(3)]
    for name, content in {"images": several, "text": sums}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


@pytest.fixture(scope="module")
def runs(rows: Path, models: Callable[..., Path], warm_mmrl: Callable[..., Any]) -> Callable[[str], Run]:
    """A family's run, carried out when it is first asked for."""

    @functools.cache
    def carry_out(family: str) -> Run:
        start, path = models(family, True), rows / family
        source = {"name": "table", "path": str(rows / ("images" if FAMILIES[family].vision else "text")) + ".jsonl"}
        config = {
            "model": {"path": str(start), "dtype": "float32"},
            "data": {"train": source, "eval": source, "max_prompt_tokens": 300},
            "rewards": [{"name": f"{rows / 'reward.py'}:fingerprint"}],
            "algorithm": {"name": "grpo"},
            "sampler": {"group_size": 3, "max_new_tokens": TOKENS} | sampler_of(family),
            "learner": {"lr": 2e-3, "tokens_per_microbatch": 300},
            "trainer": {"steps": 2, "prompts_per_step": 3, "eval_every": 2, "save_every": 1, "run_dir": str(path)},
        }
        written = rows / f"{family}.yaml"
        written.write_text(json.dumps(config))
        run = Run(start, path, ())
        trained = warm_mmrl("train", written)
        if trained.returncode == 0:
            assert main(["export", str(path), str(run.exported)]) == 0
        run.processes = (trained, warm_mmrl("eval", written, "--model", run.exported, "--json"))
        return run

    return carry_out


@pytest.fixture(scope="module")
def episodes(rows: Path, models: Callable[..., Path], warm_mmrl: Callable[..., Any]) -> Callable[[str], Run]:
    """A family's run of two steps with an environment that shows images, carried out when it is first asked for."""

    @functools.cache
    def carry_out(family: str) -> Run:
        start, path = models(family, True), rows / f"{family}-episodes"
        (rows / f"{family}.py").write_text(ENVIRONMENT)
        limits = {"max_turns": 3, "max_turn_tokens": 5, "max_observation_tokens": 300, "max_images": 4, "workers": 1}
        config = {
            "model": {"path": str(start), "dtype": "float32"},
            "data": {"train": {"name": "table", "path": f"{rows / 'images'}.jsonl"}, "max_prompt_tokens": 300},
            "environment": {"name": f"{rows / family}.py:Shown"} | limits,
            "algorithm": {"name": "grpo"},
            "sampler": {"group_size": 3, "max_new_tokens": 20, "engine": {"kv_cache_memory_bytes": 2**26}},
            "learner": {"lr": 2e-3, "tokens_per_microbatch": 300},
            "trainer": {"steps": 2, "prompts_per_step": 3, "save_every": 1, "run_dir": str(path)},
        }
        written = rows / f"{family}-episodes.yaml"
        written.write_text(json.dumps(config))
        return Run(start, path, (warm_mmrl("train", written),))

    return carry_out


def sampler_of(family: str) -> dict[str, Any]:
    """vLLM, unless it does not serve the family on a CPU."""
    return {"engine": {"kv_cache_memory_bytes": 2**26}} if has(family, "vllm") else {"name": "hf"}


@pytest.fixture(params=families(sweep=pytest.mark.slow))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def run(family: str, runs: Callable[[str], Run]) -> Run:
    """The family's run, which ended well."""
    found = runs(family)
    for process in found.processes:
        assert process.returncode == 0, process.stderr
    return found


def keys(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as weights:
            yield from weights.keys()


def logprobs(reference: Any, run: Run, record: dict[str, Any]) -> np.ndarray[Any, Any]:
    """(T,) log-probs of a recorded completion in plain transformers."""
    table = reference.distribution(record["prompt"], run.images(record), record["token_ids"], temperature=1.0)
    assert reference.prompt_ids == record["prompt_token_ids"]
    return table[np.arange(len(record["token_ids"])), record["token_ids"]].detach().numpy()


def test_a_start_folder_is_as_on_the_hub(run):
    config = json.loads((run.start / "config.json").read_text())
    text = config.get("text_config", config)
    new = config["model_type"] in NEW
    assert ("rope_parameters" in text) == new and ("rope_theta" in text) != new
    assert config["dtype" if new else "torch_dtype"] == "bfloat16"
    assert (run.start / "model.safetensors.index.json").is_file()
    assert not config["tie_word_embeddings"] or config["model_type"] in TIED
    if config["model_type"] in TIED:
        return
    tiles = config["model_type"] == "internvl"
    assert ("language_model.lm_head.weight" if tiles else "lm_head.weight") in set(keys(run.start))
    if tiles:
        assert text["model_type"] == "qwen3"
        assert {name.partition(".")[0] for name in keys(run.start)} == {
            "language_model", "vision_tower", "multi_modal_projector"
        }  # fmt: skip
    if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        assert text is config and text["rope_scaling"]["type"] == "mrope"
        assert {name.partition(".")[0] for name in keys(run.start)} == {"visual", "model", "lm_head"}
        assert "model.embed_tokens.weight" in set(keys(run.start))


@pytest.mark.proves("vllm")
def test_after_an_optimizer_step_sampler_learner_and_plain_transformers_agree(run, plain):
    records = run.rollouts(2)
    assert len(records) == 9 and {record["weight_version"] for record in records} == {1}
    assert all(step["mismatch/logprob_abs_max"] <= 1e-4 for step in run.metrics[1:])
    old, new = plain(run.start), plain(run.checkpoint(1))
    moved = 0.0
    for record in records:
        expected = logprobs(new, run, record)
        np.testing.assert_allclose(record["sampler_logprobs"], expected, atol=1e-4, rtol=0)
        np.testing.assert_allclose(record["learner_logprobs"], expected, atol=2e-5, rtol=0)
        moved = max(moved, float(np.abs(logprobs(old, run, record) - expected).max()))
    assert moved > 1e-2  # stale weights in the sampler would have been noticed


def test_images_one_three_and_none_were_in_the_step(run):
    vision = any((run.start / f"{name}.json").is_file() for name in ("preprocessor_config", "processor_config"))
    assert {len(record["images"]) for record in run.rollouts(2)} == ({0, 1, 3} if vision else {0})


@pytest.mark.proves("checkpoint")
def test_a_checkpoint_is_the_folder_it_came_from_with_other_weights(run):
    import torch
    import transformers

    folder = run.checkpoint(2)
    assert sorted(keys(folder)) == sorted(keys(run.start))
    read = {name: [json.loads((f / f"{name}.json").read_text()) for f in (run.start, folder)]
            for name in ("config", "generation_config")}  # fmt: skip
    assert read["generation_config"][0].items() <= read["generation_config"][1].items()
    assert read["config"][0]["architectures"] == read["config"][1]["architectures"]
    vision = "vision_config" in read["config"][1]
    auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    models = []
    for path in (run.start, folder):
        model, found = auto.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(found.values()), found
        models.append(model)
    before, after = (dict(model.named_parameters()) for model in models)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert not unchanged
    if read["config"][0]["model_type"] not in TIED:
        assert not torch.equal(after["lm_head.weight"], models[1].get_input_embeddings().weight)
    rope, again = (model.config.get_text_config().rope_parameters for model in models)
    assert rope == again
    tokenizer, same = (transformers.AutoTokenizer.from_pretrained(path) for path in (run.start, folder))
    assert type(tokenizer) is type(same) and tokenizer.get_vocab() == same.get_vocab()
    assert tokenizer.chat_template == same.chat_template
    assert tokenizer("what is 3+4?").input_ids == same("what is 3+4?").input_ids


@pytest.mark.proves("checkpoint")
def test_the_sampler_answers_from_an_export_as_it_did_in_the_run_and_as_transformers_does(run, plain):
    evaluated = json.loads(run.processes[1].stdout)
    assert evaluated["counts"]["prompts"] == 3
    assert evaluated["metrics"]["eval/reward_mean"]["value"] == pytest.approx(run.metrics[-1]["eval/reward_mean"])
    reference = plain(run.exported)
    scores = []
    for record in {record["prompt_id"]: record for record in run.rollouts(2)}.values():
        images, ids = run.images(record), []
        while len(ids) < TOKENS and not (ids and ids[-1] in reference.model.generation_config.eos_token_id):
            ids.append(int(reference.distribution(record["prompt"], images, ids)[-1].argmax()))
        scores.append(sum(place * token for place, token in enumerate(ids, 1)) / 1000)
    assert evaluated["metrics"]["eval/reward_mean"]["value"] == pytest.approx(np.mean(scores))


PLAYED = pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "qwen2_5_vl" else pytest.mark.slow)
        for name, family in FAMILIES.items()
        if family.vision and has(name, "vllm")
    ],
)


@pytest.fixture
def looking(family: str, episodes: Callable[[str], Run]) -> Run:
    """The family's run with images in observations, which ended well."""
    run = episodes(family)
    assert run.processes[0].returncode == 0, run.processes[0].stderr
    return run


@PLAYED
@pytest.mark.proves("turns")
def test_after_an_optimizer_step_all_agree_on_every_turn_of_episodes_with_images(looking, plain):
    assert all(step["mismatch/logprob_abs_max"] <= 1e-4 for step in looking.metrics[1:])
    recorded = read_step(recorded_steps(looking.path)[2]).groups
    old, new, moved, shown, turns = plain(looking.start), plain(looking.checkpoint(1)), 0.0, set(), set()
    media = SimpleNamespace(load=lambda ref: Image.open(looking.path / "media" / f"{ref.hash}.png"))
    for credited in (each.credited for each in recorded):
        for rollout, learned in zip(credited.scored.group.rollouts, credited.logprobs, strict=True):
            assert rollout.weight_version == 1 and not rollout.failure and len(learned) == len(rollout.token_ids)
            expected = new.logprobs(rollout, media, 1.0).detach().numpy()  # compares the prompt's ids too
            own = rollout.mask
            np.testing.assert_allclose(rollout.sampler_logprobs, expected, atol=1e-4, rtol=0)
            np.testing.assert_allclose(learned[own], expected[own], atol=2e-5, rtol=0)
            moved = max(moved, float(np.abs(old.logprobs(rollout, media, 1.0).detach().numpy() - expected).max()))
            shown |= {len(segment.images) for segment in rollout.segments if not segment.by_policy}
            turns.add(len(rollout.episode))
    assert len(recorded) == 3 and moved > 1e-2
    assert shown == {0, 1, 2} and max(turns) == 3


@PLAYED
def test_replay_shows_the_same_images_again_and_names_the_turn_that_differs(looking, capsys):
    def replayed() -> tuple[int, list[dict[str, Any]], int]:
        capsys.readouterr()
        code = main(["replay", str(looking.path), "--step", "1-2", "--json"])
        parts = [step["parts"] for step in json.loads(capsys.readouterr().out)["steps"]]
        found = [difference for part in parts for each in part.values() for difference in each["differences"]]
        return code, found, sum(part["environment"]["compared"] for part in parts)

    episodes = [each.rollout for each in read_rollouts(looking.path)]
    assert replayed() == (0, [], sum(len(each.episode) for each in episodes))
    written = looking.path.parent / f"{looking.path.name.removesuffix('-episodes')}.py"
    other = "images = [255 - image if turn.index == 1 else image for image in images]\n        done ="
    try:
        written.write_text(ENVIRONMENT.replace("done =", other))
        code, found, _ = replayed()
    finally:
        written.write_text(ENVIRONMENT)
    changed = {
        (each.prompt.epoch, each.prompt.id, each.index)
        for each in episodes
        for played in each.episode[1:2]
        if any(isinstance(part, ImageRef) for part in played.content or ())
    }
    assert code == 6 and changed
    assert {each["what"] for each in found} == {"observation of turn 1"} and len(found) == len(changed)
