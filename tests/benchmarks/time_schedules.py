"""Throughput of schedules: `python -m tests.benchmarks.time_schedules [--json FILE] [--picture FILE]`.

Trainer, queue of steps, collector, episodes and the sampler's admissions are the real ones; the engine's work costs
seconds of a simulated clock (``simulated_engine``). Both sides of each comparison have equally many devices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.benchmarks.charts import COLOURS, markdown, svg, text
from tests.benchmarks.simulated_engine import GRAIN, Costs, InstantPool, Load, SimulatedEngine

STEPS, WARM = 14, 6
"""Steps of a run, and those of them that are not counted: nothing is unfinished at its beginning."""
FURTHER = 512
"""Real steps of the sampler that a round of partial rollouts takes at least."""
LATENCY_S = 20.0
"""``environment.latency_steps`` in seconds of a sampler that is half full."""


@dataclass(frozen=True)
class Schedule:
    """A row: how a run's time is laid out.

    Attributes:
        staleness: ``trainer.staleness``; None has the same devices sample and learn.
        in_flight: ``sampler.partial.in_flight``; 0 has no partial rollouts.
        aim: Throughput that was aimed at, in that of the synchronous row.
    """

    name: str
    staleness: int | None = None
    in_flight: float = 0.0
    aim: float | None = None


SCHEDULES = (
    Schedule("synchronous"),
    Schedule("partial, in_flight 1.5", in_flight=1.5, aim=1.3),
    Schedule("partial, in_flight 3", in_flight=3.0, aim=1.3),
    Schedule("one step off", 1, aim=1.5),
    Schedule("K = 4", 4),
    Schedule("one step off, partial 1.5", 1, 1.5, aim=1.5),
    Schedule("K = 4, partial 1.5", 4, 1.5, aim=2.3),
    Schedule("K = 4, partial 3", 4, 3.0, aim=2.3),
)


@dataclass(frozen=True)
class Case:
    """A table: work, costs, and the devices of 16 that sample where others learn; the best number is taken.

    Attributes:
        whole: Those that are tried with whole rollouts; ``parts`` with partial ones.
    """

    title: str
    load: Load
    whole: Sequence[int]
    parts: Sequence[int]
    costs: Costs = field(default_factory=Costs)
    devices: int = 16


CASES = {
    "thin": Case("answers of up to 32k tokens, 32 a device", Load(group=8), (12, 13), (10, 11)),
    "long": Case("the same, 64 a device", Load(), (11,), (9, 10)),
    "tools": Case(
        "episodes of two to six turns with slow tools, 32 a device",
        Load(group=8, median=1500.0, limit=8192, turns=6),
        (12, 13),
        (11, 12),
    ),
    "learner": Case(
        "answers of up to 32k tokens, 32 a device; learning takes six times as long",
        Load(group=8),
        (4, 5),
        (3, 4),
        Costs(learn_s=6 * Costs.learn_s),
    ),
    "bound": Case(
        "the same; learning takes thirty times as long and is the bottleneck",
        Load(group=8),
        (1, 2),
        (1,),
        Costs(learn_s=30 * Costs.learn_s),
    ),
}


@dataclass(frozen=True)
class Found:
    """Numbers of a run, of the steps after its first.

    Attributes:
        split: Devices that sample, and that learn.
        tokens_per_s: Learned tokens a second.
        idle_sampler: Share of the time in which the sampler waited for weights; where the same devices learn, in which
            they did.
        idle_tools: Share in which it waited for tools.
        idle_learner: Share in which the learner waited for groups.
        sequences: Mean number of sequences that a device which samples has at once.
        staleness: Mean of ``staleness/mean``.
    """

    split: tuple[int, int]
    tokens_per_s: float
    step_s: float
    idle_sampler: float
    idle_tools: float
    idle_learner: float
    sequences: float
    staleness: float


def run(
    load: Load, costs: Costs, schedule: Schedule, split: tuple[int, int], steps: int = STEPS, warm: int = WARM,
    **how: Any,
) -> Found:  # fmt: skip
    """A run of a schedule, on so many devices that sample and that learn.

    Args:
        how: As of ``simulated``.
    """
    return _found(*simulated(load, costs, schedule, split, steps, **how), split, warm)


def simulated(
    load: Load, costs: Costs, schedule: Schedule, split: tuple[int, int], steps: int, pace: float = 0.0,
    further: int = FURTHER, latency_s: float = LATENCY_S,
) -> tuple[SimulatedEngine, Numbers]:  # fmt: skip
    """The engine after a run, and what the run has logged.

    Args:
        pace: As of ``Times``.
        further: Real steps of the sampler in a round of partial rollouts.
        latency_s: As ``LATENCY_S``.
    """
    from mmrl.config.load import from_mapping
    from mmrl.data.prompts import DatasetRows, PromptSource
    from mmrl.rollout.collector import Collector
    from mmrl.rollout.episodes.player import EpisodePlayer
    from mmrl.rollout.partial import PartialCollector
    from mmrl.step.loop import RunContext, Trainer
    from mmrl.system.profiling import Profiler
    from mmrl.system.signals import Interruption
    from mmrl.system.watchdog import Watchdog
    from mmrl.types import Message, Prompt
    from mmrl_algorithms.grpo import GRPO

    config = from_mapping(_config(load, schedule, split, steps, further, latency_s))
    algorithm, recorder, encoder = GRPO(GRPO.Config()), Numbers(), _Encoder()
    engine = SimulatedEngine(load, costs, split, apart=schedule.staleness is not None, pace=pace)
    text = "x" * (load.prompt_tokens // GRAIN)
    rows = [Prompt(f"p{i}", (Message("user", text),)) for i in range(load.prompts * (steps + 16))]
    source = PromptSource([DatasetRows("kit", rows)], encoder, max_prompt_tokens=len(text), max_bad_rows=0.2)
    player = None
    if config.environment is not None:
        pool: Any = InstantPool(load)
        player = EpisodePlayer(config.environment, config.sampler.max_new_tokens, (), pool, encoder, SimpleNamespace())
    told = recorder.event
    kind = Collector if config.sampler.partial is None else PartialCollector
    collector = kind(config, engine, _Scorer(), lambda *_: None, event=told, player=player)
    context = RunContext(recorder, Interruption(), Watchdog(None, bool, print), Profiler(engine, Path(), 0, 0, print))
    Trainer(config, algorithm, engine, encoder, collector, source, {}, context, precision="float32").fit()
    return engine, recorder


def _config(
    load: Load, schedule: Schedule, split: tuple[int, int], steps: int, further: int, latency_s: float
) -> dict[str, Any]:
    episodes = load.turns > 0
    partial = {"engine_steps": max(further // GRAIN, 16), "in_flight": schedule.in_flight}
    cluster = {"name": "ray", "sampler_ranks": split[0], "learner_ranks": split[1]}
    trainer = {"steps": steps, "prompts_per_step": load.prompts, "eval_every": 0, "save_every": 0}
    tool = {"name": "tool", "max_turns": load.turns, "max_turn_tokens": load.limit // GRAIN,
            "latency_steps": round(latency_s / 0.017) // GRAIN}  # fmt: skip
    return {
        "model": {"path": "m"},
        "data": {"train": {"name": "rows"}},
        "rewards": [{"name": "right"}],
        "algorithm": {"name": "grpo"},
        "sampler": {
            "group_size": load.group,
            "max_new_tokens": load.limit // GRAIN,
            **({"partial": partial} if schedule.in_flight else {}),
        },
        "trainer": trainer | ({} if schedule.staleness is None else {"staleness": schedule.staleness}),
        **({} if schedule.staleness is None else {"cluster": cluster}),
        **({"environment": tool} if episodes else {}),
    }


def _found(engine: SimulatedEngine, recorder: Numbers, split: tuple[int, int], warm: int) -> Found:
    begin, end = engine.learned[warm - 1], engine.learned[-1]
    seconds, count = end[0] - begin[0], len(engine.learned) - warm
    marks = engine.marks
    sampler, tools, learner = ((marks[-1][place] - marks[warm - 1][place]) / seconds for place in range(3))
    stale = [values.get("staleness/mean", 0.0) for step, values in recorder.logged.items() if step > warm]
    tokens = sum(tokens for _, tokens in engine.learned[warm:])
    sampled, sequences = (marks[-1][place] - marks[warm - 1][place] for place in (3, 4))
    rest = (sampler, tools, learner, sequences / sampled, float(np.mean(stale)))
    return Found(split, tokens / seconds, seconds / count, *rest)


class _Encoder:
    """One token a letter."""

    def num_tokens(self, prompt: Any) -> int:
        return len(prompt.messages[0].content)

    def encode(self, prompt: Any) -> Any:
        from mmrl.types import EncodedPrompt

        return EncodedPrompt(prompt=prompt, text="", token_ids=np.zeros(self.num_tokens(prompt), np.int32), images=())

    def calls(self, text: str) -> tuple[()]:
        return ()

    def insertion(self, turn: Any, content: Any, role: str) -> Any:
        from mmrl.types import Segment

        length = sum(map(len, content))
        return Segment(np.zeros(length, np.int32), False, np.zeros(length, np.float32), role=role)


class _Scorer:
    """Scores by the member: half of each group is right."""

    def submit(self, group: Any, failures: Any, *, needed: bool = True) -> Future[Any]:
        from mmrl.types import ScoredGroup

        values = np.array([float(rollout.index % 2) for rollout in group.rollouts])
        future = Future[Any]()
        future.set_result(ScoredGroup(group, values, np.ones(len(values), np.bool_), {"right": values}))
        return future


class Numbers:
    """A recorder that keeps the metrics alone."""

    def __init__(self) -> None:
        self.logged: dict[int, Mapping[str, float]] = {}

    def look(self, step: int, values: Any) -> Any:
        from mmrl.ops.alarms import Looked

        return Looked()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged[step] = dict(values)

    def save(self, learner: Any, step: int, values: Any, state: Any) -> None:
        return None

    def rollouts(self, *_: Any) -> None: ...
    def wait_for_rollouts(self) -> None: ...
    def event(self, *_: Any, **__: Any) -> None: ...
    def trained(self, *_: Any) -> None: ...
    def progress(self, *_: Any) -> None: ...


def best(case: Case, schedule: Schedule) -> Found:
    """The fastest division of the devices; of those that sample and learn in turns there is one."""
    if schedule.staleness is None:
        return run(case.load, case.costs, schedule, (case.devices, case.devices))
    tried = case.parts if schedule.in_flight else case.whole
    splits = [(ranks, case.devices - ranks) for ranks in tried]
    return max((run(case.load, case.costs, schedule, split) for split in splits), key=lambda each: each.tokens_per_s)


def tables(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A table of each case."""
    head = ["schedule", "throughput", "aim", "devices", "s a step", "sampler waits", "of it for tools", "learner waits",
            "sequences", "staleness"]  # fmt: skip
    parts = []
    for name, rows in results.items():
        first = rows[SCHEDULES[0].name]["tokens_per_s"]
        lines = []
        for schedule in SCHEDULES:
            if (found := rows.get(schedule.name)) is None:
                continue
            apart = schedule.staleness is not None
            lines.append([
                schedule.name, f"{found['tokens_per_s'] / first:.2f}x", f"{schedule.aim:g}x" if schedule.aim else "",
                f"{found['split'][0]} + {found['split'][1]}" if apart else f"{found['split'][0]} in turns",
                f"{found['step_s']:.0f}", f"{found['idle_sampler'] + found['idle_tools']:.0%}",
                f"{found['idle_tools']:.0%}", f"{found['idle_learner']:.0%}", f"{found['sequences']:.0f}",
                f"{found['staleness']:.2g}",
            ])  # fmt: skip
        parts += [f"**{CASES[name].title}**", markdown(head, lines)]
    return "\n\n".join(parts)


def picture(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Bars of throughput, one group of them for each case."""
    label, width, height, top = 250, 420, 17, 34
    count = sum(len(rows) + 1.6 for rows in results.values())
    parts = [svg(label + width + 90, int(top + height * count + 10))]
    parts.append(text(10, 18, "Learned tokens a second, in those of the synchronous schedule; lines: aims", bold=True))
    most = max(row["tokens_per_s"] / rows[SCHEDULES[0].name]["tokens_per_s"] for rows in results.values()
               for row in rows.values())  # fmt: skip
    y = float(top)
    for name, rows in results.items():
        parts.append(text(10, y + 12, CASES[name].title, bold=True))
        y += height
        first = rows[SCHEDULES[0].name]["tokens_per_s"]
        for schedule in SCHEDULES:
            if schedule.name not in rows:
                continue
            ratio = rows[schedule.name]["tokens_per_s"] / first
            size = width * ratio / most
            colour = COLOURS["generate" if schedule.staleness is None else "data"]
            parts.append(text(label - 8, y + 11, schedule.name, anchor="end"))
            parts.append(f'<rect x="{label}" y="{y:.0f}" width="{size:.1f}" height="13" fill="{colour}"/>')
            parts.append(text(label + size + 6, y + 11, f"{ratio:.2f}x"))
            if schedule.aim:
                x = label + width * schedule.aim / most
                parts.append(f'<path d="M{x:.1f} {y - 1:.0f}v15" stroke="#222" stroke-width="1.5"/>')
            y += height
        y += 0.6 * height
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, default=Path("time_schedules.json"), help="results; those in it are kept")
    parser.add_argument("--picture", type=Path, help="an SVG of throughput")
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=CASES)
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.cases:
        rows = results.setdefault(name, {})
        for schedule in SCHEDULES:
            if schedule.name not in rows:
                rows[schedule.name] = asdict(best(CASES[name], schedule))
                args.json.write_text(json.dumps(results, indent=1))
                print(name, schedule.name, rows[schedule.name], flush=True)
    print(tables(results))
    if args.picture:
        args.picture.write_text(picture(results))


if __name__ == "__main__":
    main()
