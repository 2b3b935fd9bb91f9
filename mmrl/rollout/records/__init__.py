"""Rollouts on disk: all that a reward can see, and what the step made of it.

A step's file (schema 2) is parquet with a row for each group (``schema.py``; ``writing.py`` writes it, ``columns.py``
reads it). Groups that a checkpoint carries (``carried.py``), and completions that an evaluation appends, are JSON
objects, one for each rollout (``lines.py``). Files of steps that older versions wrote (schema 1) are lines of such
objects too. ``reading.py`` reads them all.
"""

from mmrl.rollout.records.carried import carried_records, read_carried, recorded_images
from mmrl.rollout.records.lines import credited_records, group_records
from mmrl.rollout.records.reading import (
    EVALUATIONS,
    PARQUET,
    RecordedGroup,
    RecordedRollout,
    RecordedStep,
    evaluation_names,
    read_groups,
    read_lines,
    read_rollouts,
    read_step,
    recorded_evaluations,
    recorded_files,
    recorded_steps,
)

__all__ = [
    "EVALUATIONS",
    "PARQUET",
    "RecordedGroup",
    "RecordedRollout",
    "RecordedStep",
    "carried_records",
    "credited_records",
    "evaluation_names",
    "group_records",
    "read_carried",
    "read_groups",
    "read_lines",
    "read_rollouts",
    "read_step",
    "recorded_evaluations",
    "recorded_files",
    "recorded_images",
    "recorded_steps",
]
