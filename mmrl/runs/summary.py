"""The blocks that a run prints before its first step and after its last one."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.config.cluster import ClusterConfig
from mmrl.config.evaluation_names import metric_of
from mmrl.config.sections import Config, TrainerConfig
from mmrl.config.yaml_tree import to_flow
from mmrl.data.prompts import PromptSource
from mmrl.errors import plural
from mmrl.runs.budget import Arithmetic
from mmrl.runs.checkpoints import Checkpoint
from mmrl.runs.history import MET
from mmrl.runs.setup import RunSetup
from mmrl.system.report import Report, shortened
from mmrl.token_columns import POLICY

_IDLE = ("perf/idle_sampler_fraction", "perf/idle_learner_fraction", "perf/step_s")
_STALE = ("staleness/mean", "staleness/max")
_UNEVEN = 0.1
"""Share of the time that one side of the ranks has to wait more than the other before a run tells what to change."""
SHOWN_ROWS = 5
"""Dropped rows of a dataset that are shown."""


def opening(config: Config, setup: RunSetup, directory: Path, begins: str) -> list[str]:
    """The lines before anything starts: folder, model, data, arithmetic of a step, places to look at, engines.

    Args:
        begins: The place where the run begins, such as ``new``.
    """
    report = Report()
    report.show("run", [f"{directory} ({begins})"])
    report.show("model", [_model(config, setup)])
    for source in (setup.training, *setup.evaluations.values()):
        lines = kept_rows(source) if source.is_scanned else []
        how = [setup.reading] if source is setup.training else []
        report.show(source.name.removeprefix("data."), [*lines, *how])
    if not setup.step_source.samples:
        report.show("learned", [f"{setup.step_source.texts} {setup.targets}"])
    evaluated = {name: len(source) for name, source in setup.evaluations.items()}
    shares, longest = setup.training.shares, setup.training.longest
    report.show("batches", Arithmetic(config, shares, longest, evaluated, setup.step_source).lines())
    report.show("files", [_files(config, setup)])
    goes_on = config.trainer.save_optimizer != "none"
    then = "the same command goes on" if goes_on else "the run cannot go on (trainer.save_optimizer is none)"
    report.show("Ctrl-C", [f"saves a checkpoint and stops; {then}"])
    report.show("engines", [_engines(config, setup)])
    return report.lines


def closing(
    config: Config,
    directory: Path,
    metrics: Mapping[int, Mapping[str, Any]],
    policy: Checkpoint,
    length: str = "trainer.steps",
) -> list[str]:
    """The lines after the last step: the run's outcome, the trained network's folder, and next steps.

    Args:
        metrics: Each step's metrics, as metrics.jsonl has them.
        policy: The last checkpoint.
        length: The key that says how long the run is: trainer.steps or trainer.epochs.
    """
    report = Report()
    report.show("done", [f"{plural(policy.step, 'step')}; {directory}"])
    courses = ((name, _course(_values(name, metrics), name, config.trainer)) for name in _outcomes(config, metrics))
    report.show("outcome", [f"{name}: {course}" for name, course in courses])
    report.show("time", waited(metrics, config.cluster, config.trainer.staleness))
    report.show("policy" if policy.role == POLICY else "model", [str(policy.model)])
    run = shlex.quote(str(directory))
    next_steps = [f"mmrl export {run} FOLDER", f"mmrl replay {run}"]
    if config.evaluations:
        on = " --on NAME" if len(config.evaluations) > 1 else ""
        next_steps.insert(0, f"mmrl eval --model {run}{on}")
    if policy.has_optimizer:
        next_steps.append(f"{way_on(config, metrics, policy.step, length)}, and the same command goes on")
    else:
        next_steps.append("this run cannot go on: its last checkpoint has no optimizer state (trainer.save_optimizer)")
    report.show("next", next_steps)
    return report.lines


def waited(metrics: Mapping[int, Mapping[str, Any]], cluster: ClusterConfig, lag: int) -> list[str]:
    """Lines on what ranks of their own have waited, and on how old tokens were; none of other runs.

    The first step is left out: nothing could be gathered before it.
    """
    later = [each for step, each in metrics.items() if step > 1]
    timed = [[each[name] for name in _IDLE] for each in later if all(name in each for name in _IDLE)]
    lines = list[str]()
    if timed:
        whole = sum(seconds for *_, seconds in timed)
        sampler, learner = (sum(each[side] * each[2] for each in timed) / max(whole, 1e-9) for side in (0, 1))
        line = (
            f"ranks that sample waited {sampler:.0%} of the time for weights, those that learn {learner:.0%} for groups"
        )
        less, more = ("learner", "sampler") if learner > sampler else ("sampler", "learner")
        if not lag:
            line += "; they work in turns, and trainer.staleness: 1 would have them work at once"
        elif abs(learner - sampler) > _UNEVEN:
            count = cluster.num_learner_ranks if less == "learner" else cluster.num_sampler_ranks
            fewer = f"fewer cluster.{less}_ranks and " if count > 1 else ""
            line += f"; {fewer}more cluster.{more}_ranks would shorten a step"
        lines.append(line)
    aged = [each for each in later if all(name in each for name in _STALE)]
    if any(each["staleness/max"] for each in aged):
        mean = sum(each["staleness/mean"] for each in aged) / len(aged)
        most = max(each["staleness/max"] for each in aged)
        age = plural(float(f"{mean:.2g}"), "optimizer step")
        lines.append(f"tokens were {age} old when they were learned, {most:g} at most")
    return lines


def shown_metrics(config: Config) -> list[str]:
    """The metrics that ``closing`` and ``way_on`` look at."""
    condition = config.trainer.stop_condition
    of_sets = [name for each in config.evaluations.values() for name in (each.accuracy_metric, each.mean_metric)]
    names = [config.trainer.best_metric, *of_sets, *MET, condition.metric if condition else None]
    names += [*_IDLE, *_STALE] if config.cluster.is_split or config.sampler.partial is not None else []
    return list(dict.fromkeys(filter(None, names)))


def shown_evaluations(config: Config) -> dict[str, tuple[str, str | None]]:
    """For each evaluation set, the metrics that a step's line shows: the share that is right, and its mean."""
    return {name: (each.accuracy_metric, each.mean_metric) for name, each in config.evaluations.items()}


def _outcomes(config: Config, metrics: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """The metrics that tell how a run went, as far as it has them: the one that it is chosen by, and one of each other
    evaluation set. A graded reward's mean tells more than the share of value 1. Without any, the first one of ``MET``.
    """
    best = config.trainer.best_metric
    found = [best] if best is not None and _values(best, metrics) else []
    for name, each in config.evaluations.items():
        if best is not None and found and (not name or best.startswith(metric_of(name, ""))):
            continue
        shares, means = _values(each.accuracy_metric, metrics), _values(each.mean_metric, metrics)
        if each.mean_metric is not None and any(mean != shares.get(step) for step, mean in means.items()):
            found.append(each.mean_metric)
        elif shares:
            found.append(each.accuracy_metric)
    return found or [name for name in MET if _values(name, metrics)][:1]


def _values(name: str | None, metrics: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """A metric's values by step, as far as they are finite."""
    found = ((step, values.get(name or "")) for step, values in metrics.items())
    return {step: value for step, value in found if value is not None and math.isfinite(value)}


def way_on(config: Config, metrics: Mapping[int, Mapping[str, Any]], step: int, length: str) -> str:
    """The change after which a run that has ended takes further steps.

    Args:
        metrics: Each step's metrics, as metrics.jsonl has them.
        step: The last one.
        length: The key that says how long the run is: trainer.steps or trainer.epochs.
    """
    condition, schedule = config.trainer.stop_condition, config.learner.schedule
    is_met = condition is not None and condition.holds(metrics.get(step, {}))
    change = "change trainer.stop_when" if is_met else ""
    if is_met and step < config.trainer.steps:
        return change
    raised = f"raise {length} above {step}" if length == "trainer.steps" else f"raise {length}"
    if schedule != "constant":  # a change of the last step is refused
        raised += f", add --allow-change trainer.steps (learner.schedule: {schedule} then ends at the new last step)"
    return ", ".join(filter(None, [change, raised]))


def kept_rows(source: PromptSource) -> list[str]:
    """Lines with the number of kept rows, the causes of dropped ones, and some names of these."""
    causes = ", ".join(f"{cause} ({count})" for cause, count in source.causes.most_common())
    dropped = [f"{prompt}: {reason}" for prompt, reason in source.dropped]
    first = f"{len(source)} of {source.num_rows} rows kept" + (f"; dropped: {causes}" if causes else "")
    return [first, *(f"  {line}" for line in shortened(dropped, SHOWN_ROWS))]


def _course(values: Mapping[int, float], name: str, trainer: TrainerConfig) -> str:
    """First, best and last value."""
    first, last = min(values), max(values)
    text = f"{values[first]:.3g} at step {first}, {values[last]:.3g} at step {last}"
    is_chosen = name == trainer.best_metric
    if name.startswith("loss/") and not is_chosen:
        return text
    word, choose = ("least", min) if is_chosen and trainer.best_is == "min" else ("most", max)
    best = choose(sorted(values), key=values.__getitem__)
    return f"{text}; {word} {values[best]:.3g} at step {best}"


def _files(config: Config, setup: RunSetup) -> str:
    """The files to look at."""
    numbers = "the model's scores" if setup.trains_reward_model else "their log-probs"
    beside = "" if setup.step_source.samples else f" with {numbers}"
    files = ["metrics.jsonl has the curves", f"rollouts/ the {setup.step_source.texts}{beside}"]
    files += ["evaluations/ the answers"] if config.evaluations and config.trainer.eval_every else []
    return f"{', '.join(files)}; warnings and errors, if there are any, are in events.jsonl"


def _model(config: Config, setup: RunSetup) -> str:
    """A model as a text such as ``qwen2_5_vl, 3.75 billion parameters, all of them trained``."""
    model, adapters = config.model, setup.num_adapter_weights
    name = f"{model.path} ({setup.folder.family.model_type}{_template(config)})"
    if adapters is not None:
        assert model.lora is not None
        beside = f", beside weights in 4 bits ({model.quantize})" if model.quantize else ""
        return f"{name}; adapters of rank {model.lora.rank} are trained, {_count(adapters)} parameters{beside}"
    size = setup.num_weights()
    whole = name if size is None else f"{name}, {_count(size)} parameters"
    return f"{whole}; {', '.join(model.freeze)} frozen" if model.freeze else f"{whole}; all are trained"


def _template(config: Config) -> str:
    """The chat template and its options in words; empty if they are the model's own."""
    own = "" if config.model.chat_template is None else f", chat template {config.model.chat_template}"
    given = _given(config)
    return own + (f", template options {to_flow(given)}" if given else "")


def template_lines(setup: RunSetup) -> list[str]:
    """A line on the chat template if it is a file's, has options, or could have some."""
    file, given = setup.config.model.chat_template, _given(setup.config)
    left = [name for name in setup.folder.template_options if name not in given]
    parts = [] if file is None else [file]
    parts += [f"with {to_flow(given)}"] if given else []
    parts += [f"data.template_options may set {', '.join(left)}"] if left else []
    return [f"chat template: {'; '.join(parts)}"] if parts else []


def _given(config: Config) -> dict[str, Any]:
    return {name: value for name, value in config.data.template_options.items() if value is not None}


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million")):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)


def _engines(config: Config, setup: RunSetup) -> str:
    ranks, cluster = config.cluster.num_ranks, config.cluster
    on_cluster = f"{plural(ranks, 'rank')} on {config.cluster.name}"
    where = "1 rank in this process" if config.cluster.name == "local" else on_cluster
    sampler = f"{config.sampler.name} samples"
    if config.sampler.ranks_together > 1:
        sampler += f" ({config.sampler.ranks_together} ranks together)"
    learner = f"DeepSpeed learns (ZeRO {config.learner.zero_stage})"
    if cluster.is_split:
        sampler += f" on {cluster.num_sampler_ranks}"
        learner += f" on {cluster.num_learner_ranks}, {plural(config.trainer.staleness, 'step')} ahead"
    if (partial := config.sampler.partial) is not None:
        sampler += f" in parts of {partial.engine_steps} of its steps at least"
    return ", ".join([where, *([sampler] if setup.with_sampler else []), learner])
