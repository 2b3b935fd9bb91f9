"""Rows about a run's teachers: each is asked for the log-probs of the probes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mmrl.config.reference import Teacher
from mmrl.step.audit.agreement import few, told
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Probed
from mmrl.step.token_gap import gap_of
from mmrl.token_columns import POLICY, REFERENCE
from mmrl.types import EncodedPrompt, Sample

FINDS = "a teacher's weights that are not numbers; its positions or images in a packed row"


@dataclass(frozen=True, slots=True)
class Lesson:
    """A source of rows that has teachers.

    Attributes:
        source: Its name; empty if the teachers are for all rows.
        sees: True if they all read images.
    """

    source: str
    sees: bool

    def takes(self, prompt: EncodedPrompt) -> bool:
        """True if its teachers can read a prompt."""
        return self.sees or not prompt.images

    def prompt(self, prompt: EncodedPrompt) -> EncodedPrompt:
        """A prompt as one of its rows."""
        return replace(prompt, prompt=replace(prompt.prompt, source=self.source))


def lessons(teachers: Sequence[Teacher], sees: Sequence[bool]) -> list[Lesson]:
    """The sources that teachers name, or one without a name if all teach every row; none without teachers.

    Args:
        sees: For each teacher, True if it reads images.
    """
    if not teachers:
        return []
    named = dict.fromkeys(source for each in teachers for source in each.sources or ()) or [""]
    pairs = list(zip(teachers, sees, strict=True))
    return [Lesson(source, all(seen for each, seen in pairs if each.teaches(source))) for source in named]


def taught(prompts: Sequence[EncodedPrompt], found: Sequence[Lesson]) -> Iterator[EncodedPrompt]:
    """The prompts that a teacher can read, shared out among the sources; all of them if there are no teachers."""
    for place, prompt in enumerate(prompts):
        able = [lesson for lesson in found if lesson.takes(prompt)]
        if able or not found:
            yield able[place % len(able)].prompt(prompt) if able else prompt


def teacher_rows(probed: Probed, found: Sequence[Lesson]) -> Iterator[ProbeRow]:
    """For each source, the gap between its teachers' log-probs in packed rows and one by one."""
    for lesson in found:
        samples = [
            Sample(lesson.prompt(each.prompt.encoded), each.sample.segments)
            for each in probed.samples
            if lesson.takes(each.prompt.encoded)
        ]
        if not samples:
            continue
        with probed.engine.learning() as learner:
            teacher = learner.network(REFERENCE)
            packed, single = teacher.score(samples), teacher.score(samples, way="single")
            own = learner.network(POLICY).score(samples)
        gap, apart = gap_of(samples, single, packed), gap_of(samples, own, packed)
        rows = f", rows of {lesson.source}" if lesson.source else ""
        text = f"the teacher, packed, is {told(gap)} from itself one by one, and {told(apart)} from the policy"
        yield ProbeRow.at_most(f"teacher: packed = one by one{rows}", gap.abs_mean, few(probed.limits), text, FINDS)
