"""Rows on tokens: prompts, ends of turns, and turns in a row, as the model's own template has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.config.sections import Config
from mmrl.engine_api import PromptEncoder
from mmrl.step.audit.probe_prompts import ProbePrompt
from mmrl.step.audit.probe_row import ProbeRow
from mmrl.step.audit.probed import Probed
from mmrl.types import Content, EncodedPrompt, IntArray

SEEN = "It shows 7.\n", " and {x} <b>8</b>"
"""Texts of an observation."""
PROMPTS = "tokens that are written twice or left out: one that begins a text, image tokens"
TURNS = "separators dropped between turns, tool images that the template loses, earlier turns or thoughts rewritten"
ENDS = "completions without the token that ends a turn: their model never stops"


def token_rows(probed: Probed, encoder: PromptEncoder, config: Config) -> Iterator[ProbeRow]:
    """Rows of the prompts that are probed; of turns where an environment answers, of ends where nothing is sampled."""
    yield prompt_row([each.encoded for each in probed.prompts], encoder)
    environment = config.environment
    if environment is not None and not environment.keep_thoughts:  # else turns differ, which was accepted
        yield from turn_rows(encoder, probed.prompts if environment.max_images else ())
    given = [each.sample for each in probed.samples if not each.is_sampled and not each.is_crossed]
    if ends := probed.engine.describe().get("eos_token_ids"):
        endless = sum(int(sample.token_ids[-1]) not in ends for sample in given)
        if given:
            yield counted("ends of turns", endless, f"of {len(given)} given completions have no end", ENDS)


def turn_rows(encoder: PromptEncoder, prompts: Sequence[ProbePrompt]) -> Iterator[ProbeRow]:
    """A turn, an observation and the head of the next turn, with text, and with an image of the prompts' if there is
    one."""
    image = next((each.encoded.images[0] for each in prompts if each.has_images), None)
    contents: dict[str, Content] = {"text": SEEN}
    if image is not None:
        contents["images"] = (SEEN[0], image, SEEN[1], image)
    for name, content in contents.items():
        appended, whole = encoder.exchange(content, "tool")
        found = f"of {len(whole)} tokens of a conversation differ from the template's own"
        yield counted(f"turns with {name}", differing(appended, whole), found, TURNS)


def prompt_row(prompts: Sequence[EncodedPrompt], encoder: PromptEncoder) -> ProbeRow:
    """The tokens of prompts, beside those of the model's own template and processor."""
    wrong = sum(differing(each.token_ids, encoder.by_template(each)) for each in prompts)
    found = f"tokens of {len(prompts)} prompts differ from those of the model's own template and processor"
    return counted("tokens of prompts", wrong, found, PROMPTS)


def differing(one: IntArray, other: IntArray) -> int:
    """Places at which two sequences of tokens differ."""
    length = min(len(one), len(other))
    return int((one[:length] != other[:length]).sum()) + abs(len(one) - len(other))


def counted(probe: str, count: int, found: str, finds: str) -> ProbeRow:
    """A row of a count that must be 0."""
    return ProbeRow.at_most(probe, float(count), 0.0, f"{count} {found}", finds)
