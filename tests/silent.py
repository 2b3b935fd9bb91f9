"""Silent faults that other projects have published, put into our code: which probe finds each of them, and when.

    python -m tests.silent                    # writes SILENT.md from the outcomes in silent.json
    python -m tests.silent --run [NAME...]    # finds the outcomes of these faults anew, or of all, and writes both
    python -m tests.silent --check [NAME...]  # likewise, and writes nothing; exit code 1 where a moment is another

The faults are in ``silent.toml``. Each is put into a copy of the tree, whose ``mmrl check`` and ``mmrl train`` of a
tiny real run then show what they find (``silent_runs.py``). Without a fault the same runs must find
nothing: else the exit code is 1 too.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.mutants import Fault
from tests.silent_runs import RUNS, Bench, Ended, bench

HERE = Path(__file__).parent
OUTCOMES, WRITTEN = HERE / "silent.json", HERE / "SILENT.md"
Moment = Literal["check", "start", "first batch", "step 2", "not found"]
MOMENTS: Mapping[Moment, str] = {
    "check": "`mmrl check` ends with an error, before anything is loaded",
    "start": "`mmrl train` ends before its first step, by the audit's probes",
    "first batch": "`mmrl train` ends after it has sampled its first batch, before the first update",
    "step 2": "`mmrl train` ends in its second step, by the comparison of sampler and learner",
    "not found": "nothing tells",
}
HEAD = """\
# Silent faults

Faults that other projects have published, which let a training run go on with wrong numbers and a falling loss. Each is
told in our own words, and each was put into our code: `python -m tests.silent --run` did so, ran the commands on tiny
random models on a CPU in float32, and wrote what they found. [The tests' page](README.md#silent-faults) says how.
"""
CITED = "https://github.com/{}/issues/{}"
"""GitHub leads from here to a pull request too."""


@dataclass(frozen=True, slots=True)
class SilentFault:
    """A published kind of fault, and the changes that put it into our code.

    Attributes:
        kind: What goes wrong, in a sentence.
        cited: Where that is told of: a project and the number of an issue, a pull request or its review.
        run: The run that has it.
        harm: What a user suffers.
        changes: All of them together are the fault.
    """

    name: str
    kind: str
    cited: tuple[str, ...]
    run: str
    harm: str
    changes: tuple[Fault, ...]

    @property
    def places(self) -> list[str]:
        """The files that are changed."""
        return list(dict.fromkeys(change.place for change in self.changes))


@dataclass(frozen=True, slots=True)
class Absent:
    """A published kind of fault that cannot occur here, and why."""

    kind: str
    cited: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer of the commands to a fault.

    Attributes:
        moment: The first at which one of them did.
        probe: The probe that found it then, or the one of them that was furthest from its bound.
        found: The probe's sentence.
        number: The probe's number; None if it has none.
        bound: The bound of that number.
        probes: All probes that found it at that moment.
    """

    moment: Moment
    probe: str = ""
    found: str = ""
    number: float | None = None
    bound: float | None = None
    probes: tuple[str, ...] = ()


def faults() -> list[SilentFault]:
    """All of ``silent.toml``."""
    return [_fault(**entry) for entry in _entries()["fault"]]


def absent() -> list[Absent]:
    """The kinds that cannot occur here."""
    return [Absent(**{**entry, "cited": tuple(entry["cited"])}) for entry in _entries()["absent"]]


def _entries() -> dict[str, Any]:
    return tomllib.loads((HERE / "silent.toml").read_text())


def _fault(*, name: str, kind: str, cited: Sequence[str], run: str, harm: str, **change: Any) -> SilentFault:
    changes = [{key: change[key] for key in ("place", "old", "new")}, *change.get("also", ())]
    return SilentFault(
        name, kind, tuple(cited), run, harm, tuple(Fault(name, **c, harm=harm, tests=()) for c in changes)
    )


# The outcomes


def outcome_of(bench: Bench, fault: SilentFault) -> Outcome:
    """The outcome of a fault; ``check``, which computes no number, is asked of faults in texts alone."""
    with bench.changed(fault.changes):
        return found_in(bench, fault.run, checks=any("/text/" in place for place in fault.places))


def found_in(bench: Bench, run: str, *, checks: bool = True) -> Outcome:
    """What ``mmrl check`` and ``mmrl train`` find in a run of the copy as it is now."""
    if checks and (outcome := _of_check(bench.command("check", run))) is not None:
        return outcome
    return _of_train(bench.command("train", run)) or Outcome("not found")


def _of_check(ended: Ended) -> Outcome | None:
    return None if ended.code == 0 else Outcome("check", "`mmrl check`", _error(ended))


def _of_train(ended: Ended) -> Outcome | None:
    if ended.code == 0:
        return None
    stops = [event for event in ended.events if event["kind"] == "mismatch" and event["verdict"] == "stop"]
    probes = [event for event in stops if "probe" in event]
    if probes:
        worst = max(probes, key=lambda event: _distance(event["number"], event["bound"]))
        names = tuple(str(event["probe"]) for event in probes)
        found = worst["message"].partition(": ")[2]
        return Outcome("start", worst["probe"], found, worst["number"], worst["bound"], names)
    moment: Moment = "step 2" if ended.steps else "first batch" if _has_begun(ended) else "start"
    if stops:
        message = str(stops[0]["message"])
        return Outcome(moment, message.partition(":")[0], message)
    return Outcome(moment, f"`mmrl train`, exit code {ended.code}", _error(ended))


def _has_begun(ended: Ended) -> bool:
    """True if the run has come to its first step."""
    return "\nstep 0/" in ended.log


def _distance(number: float, bound: float) -> float:
    """How far a number is beyond its bound, on whichever side it must be."""
    low, high = sorted((abs(number), abs(bound)))
    return high / low if low else float("inf")


def _error(ended: Ended) -> str:
    """The line of an error."""
    lines = [line for line in ended.log.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("mmrl: ")]
    return (told or lines or [""])[-1].removeprefix("mmrl: ")


def stored() -> dict[str, Any]:
    """``silent.json``: outcomes by fault, and by run without a fault."""
    if not OUTCOMES.exists():
        return {"faults": {}, "runs": {}}
    found: dict[str, Any] = json.loads(OUTCOMES.read_text())
    return found


def renew(names: Sequence[str], *, stores: bool) -> int:
    """Find the outcomes of these faults anew, or of all, and those of their runs without a fault; the exit code.

    Args:
        stores: True to write them; False to compare them with those that are stored.
    """
    known = {fault.name: fault for fault in faults()}
    if unknown := set(names) - set(known):
        print(f"no fault is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return 2
    chosen = [fault for fault in known.values() if not names or fault.name in names]
    runs = [run for run in RUNS if any(fault.run == run for fault in chosen)]
    results, code = stored(), 0
    with tempfile.TemporaryDirectory(prefix="mmrl-silent-") as folder, bench(Path(folder) / "bench", runs) as made:
        for kind, name, outcome in _outcomes(made, runs, chosen):
            before = results[kind].get(name, {}).get("moment")
            print(f"{name}: {outcome.moment} (before: {before}), {outcome.probe}: {outcome.found[:200]}", flush=True)
            code |= kind == "runs" and outcome.moment != "not found"
            code |= not stores and outcome.moment != before
            results[kind][name] = asdict(outcome)
            if stores:
                _store(results, list(known))
    if stores:
        WRITTEN.write_text(page(results))
    return code


def _outcomes(
    made: Bench, runs: Sequence[str], chosen: Sequence[SilentFault]
) -> Iterator[tuple[Literal["runs", "faults"], str, Outcome]]:
    """The outcomes of runs without a fault, and then of faults, each with its name."""
    for run in runs:
        yield "runs", run, found_in(made, run)
    for fault in chosen:
        yield "faults", fault.name, outcome_of(made, fault)


def _store(results: dict[str, Any], names: Sequence[str]) -> None:
    found = {name: results["faults"][name] for name in names if name in results["faults"]}
    OUTCOMES.write_text(json.dumps({"faults": found, "runs": results["runs"]}, indent=1) + "\n")


# The page


def page(results: Mapping[str, Any]) -> str:
    """The page's text."""
    from tests.family_table import table  # it imports mmrl, which forks of this process must not have

    outcomes = results["faults"]
    counts = [
        f"{sum(outcome['moment'] == moment for outcome in outcomes.values())} at **{moment}**: {text}."
        for moment, text in MOMENTS.items()
    ]
    clean = [run for run, outcome in results["runs"].items() if outcome["moment"] == "not found"]
    rows = [["no.", "kind", "told of in", "put into", "found at", "by", "number (bound)"]]
    rows += [_row(number, fault, outcomes) for number, fault in enumerate(faults(), 1)]
    others = [["kind", "told of in", "why not here"]]
    others += [[each.kind, _links(each.cited), each.why] for each in absent()]
    lines = [
        f"{len(outcomes)} kinds:",
        "",
        *(f"- {count}" for count in counts),
        "",
        f"Without a fault, check and train find nothing in {len(clean)} of {len(results['runs'])} runs: "
        f"{', '.join(clean)}.",
        "",
        *table(rows),
        "",
        "## Kinds that cannot occur here",
        "",
        *table(others),
    ]
    return "\n".join([HEAD, *lines]) + "\n"


def _row(number: int, fault: SilentFault, outcomes: Mapping[str, Any]) -> list[str]:
    outcome = outcomes.get(fault.name)
    places = ", ".join(f"`{place.removeprefix('mmrl/')}`" for place in fault.places)
    if outcome is None:
        return [str(number), fault.kind, _links(fault.cited), places, "not run", "", ""]
    more = len(outcome["probes"]) - 1
    by = outcome["probe"] + (f", and {more} more" if more > 0 else "")
    return [str(number), fault.kind, _links(fault.cited), places, outcome["moment"], by, _measured(outcome)]


def _measured(outcome: Mapping[str, Any]) -> str:
    """The number with its bound, or the sentence where there is none."""
    if outcome["number"] is None:
        return str(outcome["found"]).replace("|", "\\|")
    return f"{outcome['number']:.2g} ({outcome['bound']:.2g})"


def _links(cited: Sequence[str]) -> str:
    return ", ".join(_link(each) for each in cited)


def _link(cited: str) -> str:
    project, _, number = cited.partition("#")
    return f"[{project.partition('/')[2]} {number}]({CITED.format(project, number)})"


def main(words: Sequence[str]) -> int:
    """The exit code."""
    if words[:1] in (["--run"], ["--check"]):
        return renew(words[1:], stores=words[0] == "--run")
    WRITTEN.write_text(page(stored()))
    print(f"{WRITTEN} is written")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its copy and its runs end with it
    sys.exit(main(sys.argv[1:]))
