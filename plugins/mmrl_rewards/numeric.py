"""1 for a completion whose answer is the reference's number, or list of numbers, within a tolerance, else 0.

Numbers are read as people write them (``mmrl_rewards.quantities``): thousands separators, fractions, mixed numbers,
percentages, powers of ten, "million"; a unit may be left out, but ``48 m`` is wrong for ``48 cm``. A percent sign
counts by the reference: ``50%`` is right for ``0.5`` and for ``50``, ``5000%`` for neither. A reference ``[0, 6]`` asks
for as many numbers in that order, without thousands separators, in such brackets or with a comma and a space between.

If the row says how many decimals count (``precision_column``, as MathVista's ``precision``), an answer within half a
unit of that decimal is right. In other rows an answer within ``abs_tol`` or ``rel_tol`` times the reference is right,
both 0 by default. The answer is the content of the last box or answer tags, else (unless ``require_box``) the text
after "the answer is", also where it follows a box with no number, else the last number, always outside of thinking. A
plain sentence, ``The length is 5 cm``, is read as the number that it says. A rollout without a reference, or with one
that is no number (``2\\sqrt{3}``: use ``math``), is unscorable.
"""

from __future__ import annotations

from fractions import Fraction

from pydantic import Field

from mmrl.interfaces import PluginConfig, Reward
from mmrl.types import Rollout, Score
from mmrl_rewards.answers import candidates, first_read, reply_text
from mmrl_rewards.choice_matching import accepted_texts, chosen_text
from mmrl_rewards.quantities import Quantity, comparable, last_quantity, quantity, spelled, the_number

_SLACK = Fraction(1, 10**9)
"""Slack of a tolerance: 0.1 and 0.05 are no exact binary numbers, and a difference of exactly that size is allowed."""
_MAX_CHARACTERS = 2000
"""Longer lists are not read."""


class Numeric(Reward):
    """Equality in number with the reference answer."""

    class Config(PluginConfig):
        abs_tol: float = Field(default=0.0, ge=0, allow_inf_nan=False)
        """Largest difference from the reference."""
        rel_tol: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False)
        """Largest difference as a share of the reference."""
        precision_column: str | None = "precision"
        """Column with the decimals that count in this row; rows without a number there have the tolerances."""
        unit_column: str | None = "unit"
        """Column with the unit of a reference that has none itself."""
        require_box: bool = False
        """True if an answer outside a box or answer tags is wrong."""

    def score_one(self, rollout: Rollout) -> Score | None:
        references = [values for reference in accepted_texts(rollout) if (values := _numbers(reference))]
        if not references:
            return None
        answer = self._read(rollout)
        unit, decimals = self._unit(rollout), self._decimals(rollout)
        return float(
            any(
                len(reference) == len(answer)
                and all(self._equal(_with_unit(a, unit), b, decimals) for a, b in zip(reference, answer, strict=True))
                for reference in references
            )
        )

    def answer_of(self, rollout: Rollout) -> str | None:
        return ", ".join(map(spelled, self._read(rollout))) or None

    def _read(self, rollout: Rollout) -> tuple[Quantity, ...]:
        """The answer's number, or those of its list; none where there is no answer, or no such one."""
        texts = candidates(reply_text(rollout), last_quantity, require_box=self.config.require_box)
        return first_read((chosen_text(rollout, text) for text in texts), _read) or ()

    def _unit(self, rollout: Rollout) -> str:
        """The row's unit; "" if it has none, or an unknown one."""
        named = rollout.columns.get(self.config.unit_column) if self.config.unit_column else None
        read = quantity(f"1 {named}") if isinstance(named, str) and named.strip() else None
        return read.unit if read else ""

    def _decimals(self, rollout: Rollout) -> int | None:
        found = rollout.columns.get(self.config.precision_column) if self.config.precision_column else None
        read = quantity(str(found)) if found is not None else None
        return int(read.value) if read and read.value.denominator == 1 and 0 <= read.value <= 30 else None

    def _equal(self, reference: Quantity, answer: Quantity, decimals: int | None) -> bool:
        for wanted, got in comparable(reference, answer):
            if decimals is not None:
                allowed = Fraction(1, 2 * 10**decimals)
            else:
                allowed = max(Fraction(self.config.abs_tol), Fraction(self.config.rel_tol) * abs(wanted))
            if abs(wanted - got) <= allowed * (1 + _SLACK):
                return True
        return False


def _read(text: str) -> tuple[Quantity, ...] | None:
    """The number that the text is or says, or those of a list with or without brackets; None if there is none."""
    said = the_number(text)
    return _numbers(text) or ((said,) if said else None) or (_numbers(f"[{text}]") if ", " in text else None) or None


def _numbers(text: str) -> tuple[Quantity, ...]:
    """The number that the text is, or those of a list in square brackets; none if any of it is something else."""
    if len(text) > _MAX_CHARACTERS:
        return ()
    is_list = text.startswith("[") and text.endswith("]")
    read = [quantity(item) for item in (text[1:-1].split(",") if is_list else [text])]
    found = tuple(filter(None, read))
    return found if len(found) == len(read) else ()


def _with_unit(reference: Quantity, unit: str) -> Quantity:
    """The quantity, with the row's unit if the reference has none itself."""
    return reference if reference.unit or not unit else Quantity(reference.value, unit, reference.decimals)
