"""The cheap part of the audit: the rows that a run asks for before its first step, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from mmrl.config.sections import Config
from mmrl.engine_api import Engine, PromptEncoder
from mmrl.errors import NumericsError, plural
from mmrl.step.audit.agreement import agreement_rows
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import probed
from mmrl.step.audit.sight import CURE, SIGHT, sight_rows
from mmrl.step.audit.tokens import token_rows

SHOWN = 4
"""Bad rows that an error names."""
LIMITS = "data.max_prompt_tokens, data.min_pixels and data.max_pixels"
"""The keys that leave probes out."""


def cheap_rows(engine: Engine, encoder: PromptEncoder, config: Config) -> Iterator[ProbeRow]:
    """Rows of the cheap probes: one sampling of some short completions, and two passes over them.

    Empty for an engine without a model, and where no prompt fits ``data.max_prompt_tokens``.
    """
    found = probed(engine, encoder, config)
    if found is not None:
        yield from agreement_rows(found)
        yield from sight_rows(found)
        yield from token_rows(found, encoder, config)


def audit(engine: Engine, encoder: PromptEncoder, config: Config, event: Callable[..., None]) -> str:
    """Ask for the cheap rows, before anything is trained; returns a sentence on them, or nothing without any.

    Args:
        event: Called with a kind and fields for each bad row.

    Raises:
        NumericsError: A row is bad, and ``trainer.on_mismatch`` is ``stop``.
    """
    start, rows = time.perf_counter(), list(cheap_rows(engine, encoder, config))
    seconds = time.perf_counter() - start
    bad = [row for row in rows if row.verdict == "bad"]
    for row in bad:
        told = f"{row.probe}: {row.found}"
        event("mismatch", message=told, verdict="stop", probe=row.probe, number=row.number, bound=row.bound)
    if bad and config.trainer.on_mismatch == "stop":
        raise _error(bad)
    facts = engine.describe()
    if not rows:
        return f"the audit: nothing is probed, as no probe fits {LIMITS}" if "model_type" in facts else ""
    sees = any(row.probe.startswith(SIGHT) for row in rows)
    untried = "" if sees or not facts.get("max_images") else f"; sight is not probed, as no image fits {LIMITS}"
    if bad:
        return f"the audit: {len(bad)} of {plural(len(rows), 'probe')} are bad{untried}; {seconds:.1f} s"
    worst = max(rows, key=lambda row: row.ratio)
    close = f"{worst.ratio:.1%} of its bound at most ({worst.probe})"
    of = "numbers and sight" if sees else "numbers"
    return f"the audit: {plural(len(rows), 'probe')} of {of} are well, {close}{untried}; {seconds:.1f} s"


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
