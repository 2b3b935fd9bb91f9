"""``mmrl rollouts``: prints what a run has recorded of its completions, for people or as lines of JSON."""

from __future__ import annotations

import argparse
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from mmrl.commands.arguments import chosen_steps
from mmrl.commands.printing import answer
from mmrl.errors import ConfigError, plural
from mmrl.token_columns import COLUMNS
from mmrl.types import GIVEN, SCORE

_WIDTH = 110
_FARTHEST = 3
"""Tokens of a rollout whose log-ratios to the reference are shown, or at which a critic changes its mind most."""
_OPTIONAL = ("segments", "episode", "components", "failure", "branch", "candidates", "final_value", "recalled")
"""Fields that only some rollouts have; null in the others."""
_CONDITION = re.compile(r"\s*([^<>=!]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.*?)\s*", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mmrl rollouts RUN [--step N]... [--where EXPRESSION]... [--json]"
    parser.description = "Print the recorded rollouts of a run, for people, or with --json an object a line for jq."
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder, or a file of RUN/rollouts")
    text = "which step, or A-B; repeat for more; by default all"
    parser.add_argument("--step", action="append", default=[], metavar="N", help=text)
    text = "such as 'reward<0.5', finish_reason=length, prompt_id=train/9, 'rewards.exact!=1'; repeat: all must hold"
    parser.add_argument("--where", action="append", default=[], metavar="EXPRESSION", help=text)
    parser.add_argument("--json", action="store_true", help="an object for each rollout, one a line")


def run(arguments: argparse.Namespace) -> int:
    from mmrl.rollout.records import read_lines
    from mmrl.system.redaction import Redactor

    conditions, redact = [Condition.of(text) for text in arguments.where], Redactor()
    seen = shown = 0
    for step, file in _files(arguments.run_dir, arguments.step):
        for _, members in groupby(read_lines(file), key=lambda record: record.get("group")):
            group = list(members)
            for recorded in group:
                record = {} if step is None else {"step": step}
                record |= _known(recorded)
                seen += 1
                if not all(condition.holds(record) for condition in conditions):
                    continue
                shown += 1
                if arguments.json:
                    print(json.dumps(redact.plain(record)))
                else:
                    answer(None, _lines(record, step, group), as_json=False)
    if not arguments.json:
        answer(None, [f"{shown} of {plural(seen, 'rollout')}"], as_json=False)
    return 0


def _files(path: Path, wanted: Sequence[str]) -> list[tuple[int | None, Path]]:
    """The chosen files, each with the step that its name tells."""
    from mmrl.rollout.records import recorded_files

    names = [(re.fullmatch(r"step-(\d+)", file.stem), file) for file in recorded_files(path)]
    found = [(int(name[1]) if name else None, file) for name, file in names]
    if not wanted:
        return found
    chosen = chosen_steps(wanted, [step for step, _ in found if step is not None], str(path))
    return [(step, file) for step, file in found if step in chosen]


def _known(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record without the numbers that stand in for those of a sampler and of rewards where nobody sampled."""
    if record["weight_version"] != GIVEN:
        return record
    return {**record, "reward": None, **{column.record: [] for column in COLUMNS if column.known == "sampled"}}


def _learned(record: Mapping[str, Any]) -> list[str]:
    """The texts of a demonstration of which several turns are learned; none of any other record."""
    segments = record.get("segments")
    begins = [each["by_policy"] and not each.get("continues") for each in segments or ()]
    begins = begins or [own for own, _ in groupby(record["mask"])]
    if record["weight_version"] != GIVEN or (turns := begins.count(True)) < 2:
        return []
    before = [each["content"] for each in record["messages"] if each["role"] == "assistant"]
    return [*before, record["completion"]][-turns:]


def _likelihood(record: Mapping[str, Any], group: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A candidate's log-probs or score, and the margin of the best one of its group over the worst one."""
    from mmrl.rollout.records.pairs import Likelihood, pair_of, score_of

    found = Likelihood.of(record)
    if found.policy is None and found.value is None:
        return
    parts = [f"log-prob {_number(found.policy)}"] if found.value is None else [f"model's score {_number(found.value)}"]
    parts += [] if found.log_ratio is None else [f"log-ratio to the reference {_number(found.log_ratio)}"]
    pair = pair_of([score_of(each) for each in group], list(map(Likelihood.of, group)))
    if pair is not None and pair.margin is not None and group[pair.chosen]["index"] == record["index"]:
        words = " per token" if pair.measure == "per_token" else ""
        parts += [f"margin{words} {_number(pair.margin)} over candidate {group[pair.rejected]['index']}"]
    yield f"    {', '.join(parts)}"


def _to_the_reference(record: Mapping[str, Any]) -> Iterator[str]:
    """A rollout's log-ratio to the reference, and the tokens where it is farthest from 0."""
    from mmrl.rollout.records.pairs import log_ratios

    found = log_ratios(record)
    if found is None:
        return
    places = sorted(found, key=lambda place: -abs(found[place]))[:_FARTHEST]
    tokens = ", ".join(f"token {place + 1} {_number(found[place])}" for place in places)
    yield f"    log-ratio to the reference {_number(sum(found.values()))}, farthest: {tokens}"


def _by_the_critic(record: Mapping[str, Any]) -> Iterator[str]:
    """A critic's values of a rollout: of the first and the last token, and where they change most."""
    values = record.get("value") or ()
    own = [place for place, (is_own, _) in enumerate(zip(record["mask"], values, strict=False)) if is_own]
    if not own:
        return
    first, last = own[0], own[-1]
    returned = record.get("return")
    learned = returned[last] if isinstance(returned, Sequence) and returned else returned
    line = f"value {_number(values[first])} before token {first + 1}, {_number(values[last])} before token {last + 1}"
    line += "" if not isinstance(learned, float) else f", whose return is {_number(learned)}"
    changes = {after: values[after] - values[before] for before, after in pairwise(own)}
    places = [place for place in sorted(changes, key=lambda place: -abs(changes[place])) if changes[place]]
    tokens = ", ".join(f"token {place + 1} {changes[place]:+.3g}" for place in places[:_FARTHEST])
    yield f"    {line}" + (f"; changes most: {tokens}" if tokens else "")


def _lines(record: Mapping[str, Any], step: int | None, group: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
    """A rollout for a person.

    Args:
        group: The records of its group.
    """
    place = "" if step is None else f"step {step}, "
    score = record["rewards"].get(SCORE)  # of a candidate; a demonstration has none
    given = "demonstration" if score is None else f"candidate {record['index']} of score {_number(score)}"
    kind = given if record["weight_version"] == GIVEN else f"rollout {record['index']}"
    member = "greedy" if record["greedy"] else kind
    episode, learned = record.get("episode"), _learned(record)
    turns = len(episode or learned)
    marks = [plural(turns, "turn")] if turns else []
    marks += [plural(len(record["token_ids"]), "token"), record["finish_reason"]]
    marks += [] if record["valid"] else ["unscored"]
    marks += [] if record["kept"] else ["rejected"]
    marks += ["recalled from an earlier step"] if record.get("recalled") else []
    yield f"{place}epoch {record.get('epoch', 0)}, {record['prompt_id']}, {member}: {', '.join(marks)}"
    if record["weight_version"] != GIVEN:  # nothing scores what nobody sampled
        parts = ", ".join(f"{name} {_number(value)}" for name, value in record["rewards"].items())
        yield f"    reward {_number(record['reward'])}" + (f" ({parts})" if parts else "")
        yield from _to_the_reference(record)
        yield from _by_the_critic(record)
    elif score is not None:
        yield from _likelihood(record, group)
    if not turns:
        yield f"    {_shortened(record['completion'])}"
    yield from (f"    turn {number}: {_shortened(text)}" for number, text in enumerate(learned, start=1))
    if (branch := record.get("branch")) is not None:
        yield f"    goes on from rollout {branch['member']} before its turn {branch['turn'] + 1}"
    for number, turn in enumerate(episode or (), start=1):
        yield from _turn_lines(number, turn)
    if failure := record.get("failure"):
        yield f"    failed: {_shortened(failure)}"


def _turn_lines(number: int, turn: Mapping[str, Any]) -> Iterator[str]:
    """A turn, its calls that could not be read, and its observation."""
    cut = " (cut)" if turn["finish_reason"] == "length" else ""
    yield f"    turn {number}{cut}: {_shortened(turn['text'])}"
    for call in turn["calls"]:
        arguments = "" if call["arguments"] is None else json.dumps(call["arguments"], ensure_ascii=False)
        wrong = f" is invalid: {call['error']}" if call["error"] else ""
        yield f"        calls {_shortened(call['name'] + f'({arguments})' + wrong)}"
    marks = [f"reward {_number(turn['reward'])}"] if turn["reward"] else []
    marks += ["done"] if turn["done"] else []
    about = f" ({', '.join(marks)})" if marks else ""
    if turn["content"] is not None:
        shown = " ".join(part["text"] if "text" in part else _image(part["image"]) for part in turn["content"])
        yield f"        {turn['role']}{about}: {_shortened(shown)}"
    elif marks:
        yield f"        {', '.join(marks)}"


def _image(image: Mapping[str, Any]) -> str:
    return f"[image {image['hash'][:8]} {image['width']}x{image['height']}]"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _shortened(text: str) -> str:
    """Beginning and end of a text, in one line."""
    line = " ".join(text.split())
    half = (_WIDTH - 5) // 2
    return line if len(line) <= _WIDTH else f"{line[:half]} ... {line[-half:]}"


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a record's field with a value; a record without a value there does not fulfil it.

    Attributes:
        field: Such as ``reward``, or ``rewards.exact`` for what is within.
        sign: A key of ``_COMPARE``.
        value: As it was written.
    """

    field: str
    sign: str
    value: str

    @classmethod
    def of(cls, text: str) -> Condition:
        """The condition that a text such as ``reward<0.5`` states.

        Raises:
            ConfigError: It states none.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            what = f"{text!r} is no condition"
            raise ConfigError(what, where="--where", possible=f"FIELD{', FIELD'.join(_COMPARE)}, each with a value")
        return cls(*found.groups())

    def holds(self, record: Mapping[str, Any]) -> bool:
        """True if a record fulfils it.

        Raises:
            ConfigError: No record has such a field, or it is of another kind than the value.
        """
        name, *_ = self.field.split(".")
        if name not in record and name not in _OPTIONAL:
            raise self._error(f"no rollout has a field {name!r}", ", ".join(record))
        found = _within({name: None, **record}, self.field)
        if found is _MISSING:
            return False
        if self.sign in ("=", "==", "!=") and self.value == "null":
            is_null = found is None or (isinstance(found, float) and not math.isfinite(found))  # as --json prints it
            return is_null is (self.sign != "!=")
        match found:
            case None:
                return self.sign == "!="
            case bool():
                if self.value not in ("true", "false") or self.sign not in ("=", "==", "!="):
                    raise self._error(f"{self.field} is true or false", f"{self.field}=true, {self.field}=false")
                return _COMPARE[self.sign](found, self.value == "true")
            case int() | float():
                try:
                    return _COMPARE[self.sign](found, float(self.value))
                except ValueError:
                    raise self._error(f"{self.field} is a number, and {self.value!r} is none") from None
            case str() if self.sign in ("=", "==", "!="):
                return _COMPARE[self.sign](found, self.value)
            case str():
                raise self._error(f"{self.field} is a text, which is not less or more than another", "= and !=")
            case _:
                raise self._error(f"{self.field} is no single value", "a field within it, or mmrl rollouts --json | jq")

    def _error(self, what: str, possible: str = "") -> ConfigError:
        return ConfigError(what, where=f"--where {self.field}{self.sign}{self.value}", possible=possible)


_MISSING = object()


def _within(value: Any, path: str) -> Any:
    """The value at a path such as ``rewards.exact``; names may hold dots themselves."""
    if not isinstance(value, Mapping):
        return _MISSING
    if path in value:
        return value[path]
    name, _, rest = path.partition(".")
    return _within(value[name], rest) if rest and name in value else _MISSING
