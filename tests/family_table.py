"""Writes the table of families, from the families' records and the outcomes of the tests that prove something.

python -m tests.family_table
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mmrl.engine.network.family import FAMILIES, Family
from mmrl.engine.network.features import FEATURES, PAGE, Feature
from tests.proofs import Pairs, Results, proving_tests, stored_pairs, stored_results

WRITTEN = Path(__file__).parents[1] / PAGE
STATEMENTS: Mapping[Feature, str] = {
    "hf": "after an optimizer step `sampler.name: hf`, the learner and plain transformers agree to 1e-4 nats",
    "vllm": "after an optimizer step `sampler.name: vllm` and the learner agree to 1e-4 nats",
    "packing": "completions in one packed row have the log-probs that each has alone in plain transformers (1e-5 "
    "nats), and every parameter has the same gradient (1e-5)",
    "sharing": "completions that share their prompt in a row have the log-probs and gradients of those that do not",
    "vision_once": "an image that several prompts of a row show goes through the vision tower once, with the gradient "
    "of separate passes",
    "lora": "adapters of every part have the chain rule's gradient, and the sampler gets their merged weights",
    "tensor_parallel": "a vLLM on two ranks and the learner agree to 1e-4 nats before and after an optimizer step",
    "zero_3": "two ranks with `learner.zero_stage: 3` find the gradient that plain autograd finds on one (1e-5)",
    "sequence": "two ranks that hold rows together (`learner.sequence_parallel_size: 2`, ZeRO 3) find the log-probs "
    "and the gradient of one (1e-5); cuts go through images",
    "checkpoint": "a checkpoint opens in plain transformers with its names and files, and the sampler answers from it "
    "greedily as transformers does",
    "turns": "turns and observations that are appended one by one, images included, have the tokens that the chat "
    "template gives to the whole conversation; where a run is listed, sampler, learner and plain transformers agree on "
    "each of its turns after an optimizer step",
}
HEAD = """\
# Model families

`python -m tests.family_table` writes this page from the records in [family.py](network/family.py) and from
[the outcomes of the tests](../../tests/families.json). [The tests' page](../../tests/README.md#families) says how the
outcomes are renewed. All tests ran on a CPU, in float32, with tiny random models; nothing has run on a GPU.

- **proven**: the tests with these numbers, listed below, passed when they last ran.
- **fallback**: a run goes another way, which the cell names.
- **refused**: a run that asks for it ends with this line before its engines start.
- **not proven**: no test of it has passed for this family so far.

Any other `model_type` is refused by its name. One of them is `gemma4_unified` (Gemma 4 12B): it has no vision tower but
projects patches of 48 pixels, which needs an image form of its own, and none of the proofs below has it yet.
"""
PAIRS = """\
## Packed pairs

Six pairs of a step of DPO in one packed row, with text, one image and two images where the family reads them, against
plain transformers that see one completion at a time. The numbers are the largest differences that
`tests/engine/test_preference_updates.py::test_pairs_in_a_packed_row_equal_plain_transformers_one_by_one` has found,
which fails from 1e-5 on. A parameter's gradient is compared with its own norm. Those that decide the decay of linear
attention are allowed ten times as much: in plain transformers too their gradient depends on the length of chunks.

Whole runs of DPO end in the weights of plain transformers: four updates of three such pairs each, with AdamW, warm-up,
decay and clipping, move weights by up to 3e-3 and agree to 1e-5, those of the decay of linear attention to 1e-4, on one
and two ranks, at ZeRO 0 and 3 (`::test_whole_updates_end_in_the_weights_of_plain_transformers`, and `slow` for every
family).

"""


def page(results: Results, pairs: Pairs) -> str:
    """The page's text."""
    numbers = numbered(results)
    rows = [["family", "models", *FEATURES.values()]]
    rows += [
        [f"`{family.model_type}`", family.models, *(cell(family, each, results, numbers) for each in FEATURES)]
        for family in FAMILIES.values()
    ]
    statements = [["feature", "a test that proves it shows that"]]
    statements += [[FEATURES[feature], text] for feature, text in STATEMENTS.items()]
    proofs = [["no.", "test", "tier, by family"]]
    proofs += [[str(number), f"`{test}`", tiers(test, results)] for test, number in numbers.items()]
    sections = ["", "## What is proven", "", *table(statements), "", PAIRS, *table(pair_rows(pairs))]
    sections += ["", "## The tests", "", *table(proofs)]
    return "\n".join([HEAD, *table(rows), *sections]) + "\n"


def cell(family: Family, feature: Feature, results: Results, numbers: Mapping[str, int]) -> str:
    """A family's cell for a feature: its limit, or the numbers of the tests that prove it."""
    tests = proving_tests(results, family.model_type, feature)
    proven = f"proven ({', '.join(str(numbers[test]) for test in tests)})" if tests else ""
    limit = family.all_limits.get(feature)
    if limit is None:
        return proven or "not proven"
    return f"{limit}; else {proven}" if proven and limit.precision else str(limit)


def pair_rows(pairs: Pairs) -> Iterator[Sequence[str]]:
    """The table's head, and each family's differences of packed pairs from unpacked ones."""
    yield "family", "loss", "log-probs, nats", "gradient, relative"
    for family in FAMILIES:
        found = pairs.get(family, {})
        differences = (
            f"{found[of]:.1e}" if of in found else "not measured" for of in ("loss", "log-probs", "gradient")
        )
        yield f"`{family}`", *differences


def numbered(results: Results) -> dict[str, int]:
    """A number for each test that proves something, feature by feature."""
    tests = [test for feature in FEATURES for family in FAMILIES for test in proving_tests(results, family, feature)]
    return {test: number for number, test in enumerate(dict.fromkeys(tests), 1)}


def tiers(test: str, results: Results) -> str:
    """The tiers to which a test belongs, each with its families."""
    found: dict[str, list[str]] = {}
    for family, features in results.items():
        outcomes: dict[str, str] = {}
        for tests in features.values():
            outcomes |= tests.get(test, {})
        for tier in outcomes:
            found.setdefault(tier, []).append(family)
    return "; ".join(f"{tier}: {', '.join(found[tier])}" for tier in ("short", "full", "slow") if tier in found)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A Markdown table, whose first row is its head."""
    head, *rest = rows
    for row in (head, ["---"] * len(head), *rest):
        yield f"| {' | '.join(row)} |"


if __name__ == "__main__":
    WRITTEN.write_text(page(stored_results(), stored_pairs()))
    print(f"{WRITTEN} is written")
