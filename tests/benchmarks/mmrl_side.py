"""mmrl's side, in a process of its own: a whole run as `mmrl train`, updates alone, one update on TRL's batch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from stopwatch import Report, Stopwatch, peak_memory


def time_engine(watch: Stopwatch) -> None:
    """Clocks around the parts of an update."""
    import deepspeed

    from mmrl.engine.learner.collation import Collator

    for method, name in (("forward", "forward"), ("backward", "backward"), ("step", "optimizer")):
        watch.time(deepspeed.DeepSpeedEngine, method, name)
    watch.time(Collator, "__call__", "collate")


def time_run(watch: Stopwatch) -> None:
    """Clocks around the other parts of a step."""
    import transformers

    from mmrl.data.images import MediaStore
    from mmrl.engine.text.encoding import Encoder
    from mmrl.runs.recorder import RunRecorder
    from mmrl.system.clock import Clock

    watch.time(Encoder, "encode", "data")
    watch.time(MediaStore, "add", "images")
    watch.time(MediaStore, "load", "images")
    watch.time(transformers.Qwen2VLImageProcessor, "preprocess", "images")
    watch.time(RunRecorder, "rollouts", "records")
    watch.time(RunRecorder, "log", "records")
    phase = Clock.phase

    @contextmanager
    def watched(self: Clock, name: str) -> Iterator[None]:
        with phase(self, name), watch.phase(name):
            yield

    Clock.phase = watched  # type: ignore[method-assign]


def run(job: dict[str, Any], watch: Stopwatch, report: Report) -> None:
    """Train; a line after each step."""
    from mmrl.commands.train import train
    from mmrl.config.load import load_config
    from mmrl.plugin_host import registry
    from mmrl.step.loop import Trainer

    loaded = load_config([Path(job["config"])], job["overrides"], options_class=registry.options_class)
    time_engine(watch)
    time_run(watch)
    train_step, learn = Trainer.train_step, Trainer._learn
    memory: dict[str, int] = {}
    place = {"step": 0, "tokens": 0}

    def one_step(self: Trainer, step: int) -> dict[str, float]:
        place["step"] = step
        values = train_step(self, step)
        report(tokens=place["tokens"], phases=watch.take(), memory=memory or None)
        return values

    def measured(self: Trainer, found: Any, *arguments: Any) -> Any:
        place["tokens"] = sum(len(rollout.token_ids) for group in found.learned for rollout in group.rollouts)
        with peak_memory(memory) if place["step"] == job["steps"] else nullcontext():  # the last step is for memory
            return learn(self, found, *arguments)

    Trainer.train_step, Trainer._learn = one_step, measured  # type: ignore[method-assign]
    train(loaded)


def updates(job: dict[str, Any], watch: Stopwatch, report: Report) -> None:
    """Updates on random completions, or episodes; a line after each, and at the end one of the work in an update."""
    import numpy as np
    from matmuls import Matmuls

    from mmrl.engine_api import Engine
    from mmrl.types import Sample, Segment

    def random_samples(plan: Any) -> list[Any]:
        rng = np.random.default_rng(0)
        samples = []
        prompts = plan.training.each(plan.encoder.encode, job["prompts"])
        for prompt in prompts:
            for _ in range(job["group"]):
                length = int(rng.integers(job["least"], job["completion"] + 1))
                ids = rng.integers(300, plan.folder.vocabulary.size, length).astype(np.int32)
                samples.append(Sample(prompt, (Segment(ids, True, np.zeros(length, np.float32)),)))
        return samples

    engine: Engine
    with _engine(job) as (engine, plan):
        samples = random_episodes(plan, job) if job.get("turns") else random_samples(plan)
        advantages = [np.full(len(s.token_ids), (-1.0) ** i) for i, s in enumerate(samples)]
        rows = list(_rows(plan.algorithm, samples, advantages, job["group"]).values())
        tokens = sum(len(sample.token_ids) for sample in samples)
        time_engine(watch)
        for step in range(1, job["steps"] + 1):
            memory: dict[str, int] = {}
            last = step == job["steps"]
            with engine.learning() as learner, peak_memory(memory) if last else nullcontext():
                metrics = learner.network("policy").update(rows).metrics
            report(tokens=tokens, phases=watch.take(), memory=memory or None, grad_norm=metrics["policy/grad_norm"])
        if job["count"]:
            with engine.learning() as learner, Matmuls() as matmuls:
                learner.network("policy").update(rows)
            report(work=matmuls.flops, alone_s=matmuls.seconds_alone(), attention=matmuls.attention_flops)


def random_episodes(plan: Any, job: dict[str, Any]) -> list[Any]:
    """Episodes of 1 to ``turns`` turns of random tokens, between which one of the prompt's four further images is
    shown; the tokens of an episode's turns are those of a completion."""
    import io

    import numpy as np
    from workloads import draw

    from mmrl.types import Message, Prompt, RawImage, Sample, Segment

    def shown(seed: int) -> Segment:
        file = io.BytesIO()
        draw(seed, job["shown"]).save(file, "PNG")
        image = RawImage(file.getvalue(), f"crop {seed}")
        seen = plan.encoder.encode(Prompt(image.label, (Message("user", "<image>Look again."),), (image,)))
        return Segment(seen.token_ids, False, np.zeros(len(seen.token_ids), np.float32), images=seen.images)

    rng, samples = np.random.default_rng(0), []
    for place, prompt in enumerate(plan.training.each(plan.encoder.encode, job["prompts"])):
        crops = [shown(10_000 + 4 * place + number) for number in range(4)]
        for _ in range(job["group"]):
            turns = int(rng.integers(1, job["turns"] + 1))
            segments = []
            for turn in range(turns):
                length = int(rng.integers(job["least"], job["completion"] + 1)) // turns
                ids = rng.integers(300, plan.folder.vocabulary.size, length).astype(np.int32)
                segments.append(Segment(ids, True, np.zeros(length, np.float32)))
                segments += [crops[int(rng.integers(4))]] if turn < turns - 1 else []
            samples.append(Sample(prompt, tuple(segments)))
    return samples


def gate(job: dict[str, Any], report: Report) -> None:
    """One update on TRL's batch; a line of how far the numbers are apart."""
    import numpy as np

    from mmrl.types import Sample, Segment

    theirs = np.load(job["batch"])
    with _engine(job) as (engine, plan):
        prompts = {tuple(p.token_ids.tolist()): p for p in plan.training.each(plan.encoder.encode)}
        samples, advantages, old, logprobs = [], [], [], []
        for row in range(len(theirs["advantages"])):
            prompt_ids = theirs["prompt_ids"][row][theirs["prompt_mask"][row] > 0]
            found = prompts.get(tuple(int(i) for i in prompt_ids))
            if found is None:
                report(fault="TRL's prompt has other tokens than mmrl's")
                return
            written = theirs["completion_mask"][row] > 0
            ids = theirs["completion_ids"][row][written].astype(np.int32)
            samples.append(Sample(found, (Segment(ids, True, np.zeros(len(ids), np.float32)),)))
            advantages.append(np.full(len(ids), theirs["advantages"][row], np.float64))
            old.append(theirs["old_per_token_logps"][row][written])
            logprobs.append(theirs["logprobs"][row][written])
        rows = list(_rows(plan.algorithm, samples, advantages, job["group"], old).values())
        with engine.learning() as learner:
            result = learner.network("policy").update(rows)
        gaps = [np.abs(a - b).max() for a, b in zip(result.logprobs, logprobs, strict=True)]
        report(
            loss=[float(theirs["loss"]), result.metrics["loss/total"]],
            grad_norm=[float(theirs["grad_norm"]), result.metrics["policy/grad_norm"]],
            logprob_gap=float(max(gaps)),
        )


def pair_gate(job: dict[str, Any], report: Report) -> None:
    """One update on TRL's batch of pairs with the weights that TRL had come to; a line with both sides' numbers."""
    import numpy as np
    from safetensors.torch import load_file

    from mmrl.step.learn import LearnSettings, finished, learn

    theirs = np.load(job["batch"])
    with _engine(job) as (engine, plan):
        needs = plan.algorithm.needs()
        prompts = plan.training.each(plan.encoder.encode)
        groups = [plan.step_source.group(prompt, needs, plan.encoder) for prompt in prompts]
        known = {_pair_ids(group): group for group in groups}
        half = len(theirs["input_ids"]) // 2
        rows = [ids[mask > 0] for ids, mask in zip(theirs["input_ids"], theirs["attention_mask"], strict=True)]
        found = [known.get(tuple(map(bytes, pair))) for pair in zip(rows[:half], rows[half:], strict=True)]
        if None in found:
            report(fault="TRL's pairs have other tokens than mmrl's")
            return
        lengths = [len(rollout.token_ids) for group in found for rollout in group.rollouts]
        of_theirs = theirs["completion_mask"].sum(1).astype(int)
        if lengths != np.stack([of_theirs[:half], of_theirs[half:]], 1).ravel().tolist():
            report(fault="TRL's loss is of other tokens than mmrl's")
            return
        with engine.learning() as learner:
            weights = learner.network("policy").policy.model.state_dict()
            for name, moved in load_file(job["moved"]).items():
                weights[name].copy_(moved)
            settings = LearnSettings.of(plan.config, frozenset(), 1)
            result = finished(learn(found, plan.algorithm, learner, settings))
    both = {"logprobs": [], "reference": []}
    for group in result.groups:
        for place in range(2):
            both["logprobs"].append(float(np.sum(group.logprobs[place], dtype=np.float64)))
            both["reference"].append(float(np.sum(group.reference_logprobs[place], dtype=np.float64)))
    report(
        loss=[float(theirs["loss"]), result.metrics["loss/total"]],
        grad_norm=[float(theirs["grad_norm"]), result.metrics["policy/grad_norm"]],
        **{
            f"{name}_gap": float(np.abs(np.reshape(values, (-1, 2)).T.ravel() - theirs[name]).max())
            for name, values in both.items()
        },
        moved=float(np.abs(theirs["logprobs"] - theirs["reference"]).max()),
    )


def _pair_ids(group: Any) -> tuple[bytes, ...]:
    """The tokens of chosen and rejected, the prompt's before them."""
    import numpy as np

    prompt = group.group.prompt.token_ids
    return tuple(bytes(np.concatenate([prompt, each.token_ids]).astype(np.int64)) for each in group.rollouts)


def _rows(
    algorithm: Any, samples: Sequence[Any], advantages: Sequence[Any], group: int, old: Sequence[Any] | None = None
) -> dict[int, Any]:
    import numpy as np

    from mmrl.ops.objective import training_rows

    masks = [sample.mask for sample in samples]
    groups = np.arange(len(samples)) // group
    indices = range(len(samples))
    columns = {"advantages": advantages, **({} if old is None else {"old_logprobs": old})}
    return training_rows(samples, masks, columns, groups, algorithm.aggregation, indices)


@contextmanager
def _engine(job: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """An engine that does not sample, and the plan of the config's run."""
    from mmrl.cluster.launch import start_engine
    from mmrl.cluster.process import prepare_process
    from mmrl.config.load import load_config
    from mmrl.plugin_host import registry
    from mmrl.runs.setup import RunSetup

    loaded = load_config([Path(job["config"])], job["overrides"], options_class=registry.options_class)
    prepare_process()
    setup = RunSetup(loaded.config, Path(loaded.config.trainer.run_dir) / "media")
    engine = start_engine(replace(setup.engine_spec(setup.algorithm), with_sampler=False))
    try:
        yield engine, setup
    finally:
        engine.close()


def main() -> None:
    job = json.loads(sys.argv[1])
    watch = Stopwatch()
    report = Report(job["report"], watch)
    if job["kind"] == "run":
        run(job, watch, report)
    elif job["kind"] == "updates":
        updates(job, watch, report)
    elif job["kind"] == "pair gate":
        pair_gate(job, report)
    else:
        gate(job, report)


if __name__ == "__main__":
    main()
