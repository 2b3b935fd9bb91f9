"""Tables in Markdown and pictures in SVG, drawn from raw results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENGINES = ("generate", "forward", "backward", "optimizer")
"""The phases that are not the framework's own."""
COLOURS = {
    "generate": "#4e79a7",
    "forward": "#59a14f",
    "backward": "#8cd17d",
    "optimizer": "#b6992d",
    "images": "#e15759",
    "data": "#f28e2b",
    "everything else": "#bab0ac",
}
TARGETS = {
    "image-448": (3.0, 5.0), "image-1024": (4.0, 8.0), "geometry3k": (1.2, 1.6), "text": (1.3, 2.0),
    "dpo-image-448": (1.6, 2.5), "dpo-image-448-frozen": (1.6, 2.5),
    "dpo-text": (1.1, 1.4), "dpo-text-long": (1.1, 1.4),
}  # fmt: skip
"""Must and aim: how many times faster a whole step is than the faster of TRL's rows."""
MEMORY_TARGET = "must 0.5, aim 0.3; of pairs must 0.6"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def folded(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the phases that have a colour, the others together; a forward pass without a backward one counts to
    forward."""
    phases = {**phases, "forward": phases.get("forward", 0.0) + phases.get("logprob", 0.0), "logprob": 0.0}
    known = {name: phases.get(name, 0.0) for name in COLOURS if name != "everything else"}
    return known | {"everything else": sum(phases.values()) - sum(known.values())}


def comparison(results: Mapping[str, Any], picture: Path) -> str:
    """The tables against TRL; writes the picture."""
    targets, steps, bars = [], [], []
    for name, found in results["workloads"].items():
        ours = found["sides"]["mmrl"]
        theirs = {side: values for side, values in found["sides"].items() if side != "mmrl"}
        faster = min(theirs, key=lambda side: theirs[side]["seconds"])
        best = theirs[faster]
        must, aim = (f"{x:g}x" for x in TARGETS[name]) if name in TARGETS else ("", "")
        # Its two rows differ in memory too: the one with less.
        least = min(values["memory_bytes"] for values in theirs.values())
        alone = ""
        if apart := found.get("alone"):
            fastest = min(values["seconds"] for side, values in apart.items() if side != "mmrl")
            alone = f"{fastest / apart['mmrl']['seconds']:.2f}x"
        own = 1 - sum(folded(ours["phases"])[phase] for phase in ENGINES) / sum(ours["phases"].values())
        targets.append([
            found["what"], f"{best['seconds'] / ours['seconds']:.2f}x", alone, must, aim, faster.removeprefix("TRL, "),
            f"{best['processor_s'] / ours['processor_s']:.2f}x", f"{ours['memory_bytes'] / least:.2f}", f"{own:.1%}",
        ])  # fmt: skip
        for side, values in found["sides"].items():
            phases = folded(values["phases"])
            steps.append([
                found["what"], side, f"{values['seconds']:.2f} ({values['least']:.2f} to {values['most']:.2f})",
                f"{values['tokens_per_s']:.0f}", *(f"{phases[p]:.2f}" for p in COLOURS),
                f"{values['memory_bytes'] / 2**20:.0f}",
            ])  # fmt: skip
            bars.append((f"{found['what']}: {side}", phases, f"{values['seconds']:.1f} s"))
    picture.writetext(stacked_bars("Seconds of a training step, by phase", bars))
    first = [
        "a step",
        "ratio",
        "each alone",
        "must",
        "aim",
        "faster row of TRL",
        "by processor time",
        "memory",
        "own share",
    ]
    second = ["a step", "side", "s, median (spread)", "tokens/s", *COLOURS, "MiB"]
    return "\n\n".join([
        results["machine"],
        "Whole steps: TRL's seconds over mmrl's. Memory: mmrl's update over TRL's, peak above what was resident before "
        f"it ({MEMORY_TARGET}). Own share: of mmrl's step, outside generate, "
        "forward, backward and optimizer (must 10 %, aim 5 %).",
        markdown(first, targets), markdown(second, steps),
    ])  # fmt: skip


def stacked_bars(title: str, bars: Sequence[tuple[str, Mapping[str, float], str]]) -> str:
    """An SVG of one horizontal bar for each (label, seconds by phase, what to write at its end)."""
    label, width, height = 410, 520, 24
    longest = max(sum(phases.values()) for _, phases, _ in bars)
    total = 60 + height * len(bars) + 10
    parts = [svg(label + width + 80, total), text(10, 18, title, bold=True)]
    x = 10
    for name, colour in COLOURS.items():
        parts += [f'<rect x="{x}" y="30" width="10" height="10" fill="{colour}"/>', text(x + 14, 39, name)]
        x += 34 + 7 * len(name)
    for row, (name, phases, end) in enumerate(bars):
        y, x0 = 60 + height * row, float(label)
        parts.append(text(label - 8, y + 12, name, anchor="end"))
        for phase, colour in COLOURS.items():
            size = width * phases.get(phase, 0.0) / longest
            parts.append(f'<rect x="{x0:.1f}" y="{y}" width="{size:.1f}" height="16" fill="{colour}"/>')
            x0 += size
        parts.append(text(x0 + 6, y + 12, end))
    return "\n".join([*parts, "</svg>"]) + "\n"


def lines(panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]]) -> str:
    """An SVG of panels side by side: a title, what the points are called, and curves scaled to their first point."""
    size, gap = 190, 60
    parts = [svg(40 + (size + gap) * len(panels), size + 90)]
    for place, (title, ticks, curves) in enumerate(panels):
        x0, y0 = 40 + place * (size + gap), 30
        parts.append(text(x0, 18, title, bold=True))
        parts.append(f'<path d="M{x0} {y0}V{y0 + size}H{x0 + size}" fill="none" stroke="#888"/>')
        scaled = {name: [value / values[0] for value in values] for name, values in curves.items()}
        most = max(value for values in scaled.values() for value in values) * 1.05
        for number, (name, values) in enumerate(scaled.items()):
            points = [
                (x0 + size * (i + 0.5) / len(values), y0 + size * (1 - value / most)) for i, value in enumerate(values)
            ]
            colour = list(COLOURS.values())[number]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(text(x0, y0 + size + 32 + 13 * number, name, colour=colour))
        parts += [
            text(x0 + size * (i + 0.5) / len(ticks), y0 + size + 14, tick, anchor="middle")
            for i, tick in enumerate(ticks)
        ]
        parts.append(text(x0 - 4, y0 + 8, f"{most:.1f}", anchor="end"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def svg(width: int, height: int) -> str:
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return f'{frame}<rect width="{width}" height="{height}" fill="white"/>'


def text(x: float, y: float, words: str, *, anchor: str = "start", bold: bool = False, colour: str = "#222") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" fill="{colour}" text-anchor="{anchor}"{weight}>{words}</text>'
