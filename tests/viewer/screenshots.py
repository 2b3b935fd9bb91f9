"""Pictures of the viewer's pages, as the README shows them: curves, a group, tokens, an episode, a pair, a sweep.

    python -m tests.viewer.screenshots FOLDER [--dark] [--height PIXELS] [NAME=RUN:ADDRESS ...]

NAME is curves, group, tokens, episode, pair, sweep or any other name of a file; RUN is the folder of a run or a sweep
and ADDRESS what follows `#/` in the page. Without them all six are taken, of two small runs and a sweep that are made
for it.

    python -m tests.viewer.screenshots pictures 'group=runs/digits:run/0/step/40/group/3' 'sweep=runs/rates:compare'
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tests.viewer.browser import Viewer, chromium, missing, served
from tests.viewer.made_pairs import make_pairs
from tests.viewer.made_run import make_run
from tests.viewer.made_sweep import make_sweep

MADE = {
    "curves": "run/0/curves?q=reward eval loss length",
    "group": "run/0/step/2/group/0?color=advantage",
    "tokens": "run/0/step/2/group/0?member=1&view=tokens&color=entropy",
    "episode": "run/0/step/2/group/3?member=0&view=episode",
}
"""The addresses in the made run."""
_SHOWN = {"tokens": ".member-panel", "episode": ".member-panel", "pair": ".pair"}
"""The part of the page that is scrolled to the top."""
_WIDTH, _HEIGHT, _SCALE = 1200, 760, 1.5
_COLOURS = 160


@dataclass(frozen=True)
class Shot:
    """A picture to take."""

    name: str
    run: Path
    address: str

    @classmethod
    def of(cls, text: str) -> Shot:
        name, equals, rest = text.partition("=")
        run, colon, address = rest.partition(":")
        if not (equals and colon):
            raise argparse.ArgumentTypeError(f"{text} is not NAME=RUN:ADDRESS")
        return cls(name, Path(run), address)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the pictures go")
    parser.add_argument("--dark", action="store_true", help="as a browser shows them that asks for dark pages")
    parser.add_argument("--height", type=int, default=_HEIGHT, metavar="PIXELS", help="of the window")
    parser.add_argument("shots", nargs="*", type=Shot.of, metavar="NAME=RUN:ADDRESS")
    options = parser.parse_args()
    if sentence := missing():
        print(sentence, file=sys.stderr)
        return 5
    options.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        shots = options.shots or list(_made(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        driver = stack.enter_context(chromium(_WIDTH, options.height))
        for shot in shots:
            server = stack.enter_context(served(shot.run))
            viewer = Viewer(driver, server.url, server.url)
            viewer.width(_WIDTH, options.height, _SCALE)
            viewer.scheme("dark" if options.dark else "light")
            file = options.folder / f"{shot.name}.png"
            file.write_bytes(picture(viewer, shot))
            print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    return 0


def _made(folder: Path) -> Iterator[Shot]:
    run = make_run(folder / "shapes")
    yield from (Shot(name, run, address) for name, address in MADE.items())
    yield Shot("pair", make_pairs(folder / "pairs"), "run/0/step/2/group/0")
    yield Shot("sweep", make_sweep(folder / "rates"), "compare?sort=-last:eval/accuracy")


def picture(viewer: Viewer, shot: Shot) -> bytes:
    """A PNG file of the page, with few colours so that it is small."""
    viewer.open(shot.address)
    if viewer.count(".card"):
        viewer.until(lambda: viewer.count("path.line"), "curves are drawn")
    viewer.script("for (const each of document.images) each.loading = 'eager'")  # also those below the window
    viewer.until(lambda: viewer.script("return [...document.images].every((each) => each.complete)"), "images")
    if (shown := _SHOWN.get(shot.name)) is not None:
        viewer.script("document.querySelector(arguments[0]).scrollIntoView()", shown)
    if shot.name == "tokens":
        strongest = (
            "const strength = (node) => Number(node.style.getPropertyValue('--strength'));"
            "[...document.querySelectorAll('.tokens .token')].reduce((best, each) => "
            "strength(each) > strength(best) ? each : best).focus({preventScroll: true})"
        )
        viewer.script(strongest)
    with Image.open(io.BytesIO(viewer.driver.get_screenshot_as_png())) as image:
        few, file = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE), io.BytesIO()
        few.save(file, "PNG", optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
