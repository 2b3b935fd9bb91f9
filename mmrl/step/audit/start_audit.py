"""The cheap part of the audit: the rows that a run asks for before its first step, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from mmrl.config.sections import Config
from mmrl.engine_api import Engine, PromptEncoder
from mmrl.errors import NumericsError, plural
from mmrl.step.audit.agreement import agreement_rows
from mmrl.step.audit.probe_prompts import PROMPT_TOKENS
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import probed
from mmrl.step.audit.ranks import rank_rows
from mmrl.step.audit.scores import score_rows, scores_of
from mmrl.step.audit.sight import CURE, SIGHT, sight_rows
from mmrl.step.audit.tokens import token_rows
from mmrl.step.audit.values import value_rows

SHOWN = 4
"""Bad rows that an error names."""


def cheap_rows(
    engine: Engine, encoder: PromptEncoder, config: Config, *, total_tokens: float = PROMPT_TOKENS
) -> Iterator[ProbeRow]:
    """Rows of the cheap probes: one sampling of some short completions, and two passes over them.

    Empty for an engine without a model.

    Args:
        total_tokens: As of ``fitting``.
    """
    if (scores := scores_of(engine, encoder, config, total_tokens=total_tokens)) is not None:
        yield from [left_out_row(scores.left_out)] if scores.left_out else []
        yield from score_rows(scores)
        return
    found = probed(engine, encoder, config, total_tokens=total_tokens)
    if found is None:
        return
    if found.left_out:
        yield left_out_row(found.left_out)
    if found.samples:
        yield from agreement_rows(found)
        yield from value_rows(found)
        yield from sight_rows(found)
        if config.cluster.is_split or config.sampler.partial is not None:
            yield from rank_rows(found, config.sampler.temperature)
        yield from token_rows(found, encoder, config)


def left_out_row(left_out: Mapping[str, str]) -> ProbeRow:
    """A row, never bad, of prompts that were not asked, by why."""
    names = dict[str, list[str]]()
    for name, why in left_out.items():
        names.setdefault(why, []).append(name)
    told = "; ".join(f"{', '.join(each)} ({why})" for why, each in names.items())
    found = f"{plural(len(left_out), 'prompt')} left out: {told}"
    finds = "what those prompts are made for"
    return ProbeRow("prompts left out", float(len(left_out)), 0.0, "warn", found, finds)


def audit(engine: Engine, encoder: PromptEncoder, config: Config, event: Callable[..., None]) -> str:
    """Ask for the cheap rows, before anything is trained; returns a sentence on them, or nothing without any.

    Args:
        event: Called with a kind and fields for each bad row, and for a run of which nothing can be probed.

    Raises:
        NumericsError: A row is bad, and ``trainer.on_mismatch`` is ``stop``.
    """
    start, found = time.perf_counter(), list(cheap_rows(engine, encoder, config))
    seconds = time.perf_counter() - start
    rows, lacking = ([row for row in found if (row.verdict == "warn") == warns] for warns in (False, True))
    bad = [row for row in rows if row.verdict == "bad"]
    verdict = config.trainer.on_mismatch
    for row in bad:
        told = f"{row.probe}: {row.found}"
        event("mismatch", message=told, verdict=verdict, probe=row.probe, number=row.number, bound=row.bound)
    if bad and verdict == "stop":
        raise _error(bad)
    without = "".join(f"; {row.found}" for row in lacking)
    if not rows:
        if lacking:
            event("warning", message=f"the run is not audited, nothing probes its numbers and sight{without}")
        return ""
    if bad:
        return f"the audit: {len(bad)} of {plural(len(rows), 'probe')} are bad{without}; {seconds:.1f} s"
    worst = max(rows, key=lambda row: row.ratio)
    what = "numbers and sight" if any(row.probe.startswith(SIGHT) for row in rows) else "numbers"
    close = f"{worst.ratio:.1%} of its bound at most ({worst.probe})"
    return f"the audit: {plural(len(rows), 'probe')} of {what} are well, {close}{without}; {seconds:.1f} s"


def _error(bad: list[ProbeRow]) -> NumericsError:
    told = "; ".join(f"{row.probe}: {row.found}" for row in bad[:SHOWN])
    more = f"; and {len(bad) - SHOWN} more, which are events of the run" if len(bad) > SHOWN else ""
    cure = f"{CURE}; " if any(row.probe.startswith(SIGHT) for row in bad) else ""
    return NumericsError(
        f"the audit finds wrong numbers before the first step: {told}{more}",
        where="prompts with drawn images, computed by sampler, learner and plain transformers",
        possible=f"this probe finds {bad[0].finds}",
        remedy=f"{cure}`mmrl doctor CONFIG` shows all probes; check the model's folder, sampler.engine and "
        "learner.deepspeed; trainer.on_mismatch: warn trains all the same",
    )
