"""Draw an episode of a run: the prompt, each turn of the policy, and what the environment answered, side by side.

    python examples/draw_episode.py RUN OUT.png [--step N]

It is the longest of those with the highest reward of the run's last recorded step, or of step N. Pictures are as the
policy saw them, enlarged.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import mmrl
from mmrl.types import ImageRef, Rollout

SIDE, GAP, LINE, WIDE = 224, 16, 22, 26
"""Pixels: a picture, what is around it, and a line of text; and characters of a line."""
INK, GREY, BLUE = (20, 20, 20), (120, 120, 120), (30, 80, 180)


@dataclass(frozen=True)
class Panel:
    """A column of the drawing."""

    title: str
    text: str
    picture: Path | None = None

    @property
    def lines(self) -> list[str]:
        return [line for part in self.text.split("\n") for line in textwrap.wrap(part, WIDE)]


def panels(rollout: Rollout, reward: float | None) -> list[Panel]:
    """The prompt, then the policy's turns and the environment's answers."""
    question = "\n".join(message.content for message in rollout.messages).replace("<image>", "").strip()
    picture = Path(rollout.images[-1].path) if rollout.images else None
    found = [Panel("prompt", question, picture)]
    for played in rollout.episode:
        found.append(Panel(f"policy, turn {played.turn.index + 1}", played.turn.text))
        parts = played.content or ()
        texts = "\n".join(part for part in parts if isinstance(part, str))
        refs = [part for part in parts if isinstance(part, ImageRef)]
        if texts or refs:
            found.append(Panel("environment", texts, Path(refs[0].path) if refs else None))
    return [*found, Panel("reward", "none" if reward is None else f"{reward:g}")]


def draw(columns: list[Panel]) -> Image.Image:
    """The panels in one picture; those with text alone are narrow."""
    font, small = ImageFont.load_default(18), ImageFont.load_default(14)
    widths = [SIDE if panel.picture else max(96, 11 * max(map(len, panel.lines), default=0)) for panel in columns]
    lines = max(len(panel.lines) for panel in columns if panel.picture) if any(p.picture for p in columns) else 0
    size = GAP + sum(width + GAP for width in widths), 3 * GAP + LINE + SIDE + lines * LINE
    sheet = Image.new("RGB", size, "white")
    pen, left = ImageDraw.Draw(sheet), GAP
    for panel, width in zip(columns, widths, strict=True):
        pen.text((left, GAP), panel.title, GREY, small)
        top = GAP + LINE
        if panel.picture:
            with Image.open(panel.picture) as picture:
                sheet.paste(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST), (left, top))
            top += SIDE + GAP // 2
        else:
            top += (SIDE - LINE * len(panel.lines)) // 2
        for number, line in enumerate(panel.lines):
            pen.text((left, top + number * LINE), line, INK if panel.picture else BLUE, font)
        left += width + GAP
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--step", type=int)
    arguments = parser.parse_args()
    run = mmrl.load_run(arguments.run)
    step = run.rollout_steps[-1] if arguments.step is None else arguments.step
    scored = [(sum(value or 0 for value in each.rewards.values()), each.rollout) for each in run.rollouts(step)]
    reward, rollout = max(scored, key=lambda each: (each[0], len(each[1].episode)))
    draw(panels(rollout, reward)).save(arguments.out)


if __name__ == "__main__":
    main()
