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
from mmrl.step.audit.sight import sight_rows
from mmrl.system.rng_state import generators, set_generators

SHOWN = 4
"""Bad rows that an error names."""


def cheap_rows(engine: Engine, encoder: PromptEncoder, config: Config) -> Iterator[ProbeRow]:
    """Rows of the cheap probes: one sampling of some short completions, and two passes over them.

    Empty for an engine without a model, and where no prompt fits ``data.max_prompt_tokens``.
    """
    found = probed(engine, encoder, config)
    if found is not None:
        yield from agreement_rows(found)
        yield from sight_rows(found)


class StartAudit:
    """Audits a run before its first step.

    Args:
        event: Called with a kind and fields for each bad row, and once for all.
    """

    def __init__(self, config: Config, engine: Engine, encoder: PromptEncoder, event: Callable[..., None]) -> None:
        self._config, self._engine, self._encoder, self._event = config, engine, encoder, event

    def check(self) -> None:
        """Ask for the cheap rows; no random generator of this process moves.

        Raises:
            NumericsError: A row is bad, and ``trainer.on_mismatch`` is ``stop``.
        """
        state, start = generators(), time.perf_counter()
        try:
            rows = list(cheap_rows(self._engine, self._encoder, self._config))
        finally:
            set_generators(state)
        bad = [row for row in rows if row.verdict == "bad"]
        for row in bad:
            self._event("mismatch", message=f"{row.probe}: {row.found}", verdict="stop", probe=row.probe)
        if bad and self._config.trainer.on_mismatch == "stop":
            raise _error(bad)
        if rows and not bad:
            worst = max(rows, key=lambda row: row.ratio)
            message = (
                f"{plural(len(rows), 'probe')} of sampler, learner and sight agree; the worst, {worst.probe}, reaches "
                f"{worst.ratio:.0%} of its bound"
            )
            seconds = time.perf_counter() - start
            self._event("audit", message=f"{message}; {seconds:.1f} s", probes=len(rows), seconds=seconds)


def _error(bad: list[ProbeRow]) -> NumericsError:
    told = "; ".join(f"{row.probe}: {row.found}" for row in bad[:SHOWN])
    more = f"; and {len(bad) - SHOWN} more, which are events of the run" if len(bad) > SHOWN else ""
    return NumericsError(
        f"the audit finds wrong numbers before the first step: {told}{more}",
        where="prompts with drawn images, computed by sampler, learner and plain transformers",
        possible=f"this probe finds {bad[0].finds}",
        remedy="`mmrl doctor CONFIG` shows all probes; check the model's folder, sampler.engine and learner.deepspeed; "
        "trainer.on_mismatch: warn trains all the same",
    )
