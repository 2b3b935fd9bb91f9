"""Pages of comparisons in a real browser: two answers side by side, and what the policy makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mmrl.viewer.report import make_report
from tests.viewer.browser import Viewer, served
from tests.viewer.made_pairs import CHOSEN, REJECTED, make_pairs
from tests.viewer.made_run import ids

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

CONTRAST = Path(__file__).with_name("contrast.js").read_text()
LEFT, RIGHT = ".side:nth-of-type(1)", ".side:nth-of-type(2)"
ARROW_RIGHT = "\ue014"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Runs with a reference, without one, and of an earlier version, whose evaluations have no log-probs."""
    folder = tmp_path_factory.mktemp("pairs")
    without = make_pairs(folder / "without", has_reference=False)
    return make_pairs(folder / "with"), without, make_pairs(folder / "old", old=True)


@pytest.fixture(scope="module")
def url(driver: Chrome, runs: tuple[Path, ...]) -> Iterator[str]:
    with served(*runs) as server:
        yield server.url


def most_in_common(one: str, other: str) -> int:
    """The most tokens that two texts, as candidates, have in the same order."""
    ones, others = (ids(f"{text}<|im_end|>").tolist() for text in (one, other))
    row = [0] * (len(others) + 1)
    for token in ones:
        row = [0, *accumulate_matches(token, others, row)]
    return row[-1]


def accumulate_matches(token: int, others: list[int], row: list[int]) -> list[int]:
    found = [0]
    for place, each in enumerate(others):
        found.append(row[place] + 1 if token == each else max(row[place + 1], found[-1]))
    return found[1:]


def test_a_pair_stands_side_by_side_under_its_prompt(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0")
    assert viewer.count(".picture") == 2, "the prompt's two images, once"
    assert viewer.texts("#main h2")[1] == "Chosen and rejected"
    said = "✓ the policy prefers the chosen one Log-ratio to the reference: chosen 19.5, rejected -10.5, margin 30"
    assert viewer.text(".verdict p") == said
    assert viewer.texts(".side h3") == ["chosen: candidate 0 score 1", "rejected: candidate 1 score 0"]
    rows = viewer.texts(".numbers tbody tr")
    assert rows[0] == "score10+1" and "tokens3942-3" in rows and "log-ratio to the reference19.5-10.5+30" in rows
    assert "× beta 0.5: implicit reward9.75-5.25+15" in rows and "log-prob of the policy-19.5-52.5+33" in rows


def test_what_two_answers_do_not_share_is_underlined_and_told_of_each_token(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0")
    common, (left, right) = most_in_common(CHOSEN, REJECTED), (viewer.texts(f"{side} .token") for side in (LEFT, RIGHT))
    shared = [viewer.texts(f"{side} .token:not(.alone)") for side in (LEFT, RIGHT)]
    assert shared[0] == shared[1] and len(shared[0]) == common, "the same tokens in the same order, and no more are"
    assert viewer.count(".token.alone") == len(left) + len(right) - 2 * common == 21
    assert "".join(shared[0]).startswith("The·light·on·the·left·is")
    assert "tokens are not in the other one" in viewer.text(f"{LEFT} > p")
    assert viewer.count(f"{LEFT} .token.high") == 39 and viewer.count(f"{RIGHT} .token.low") == 42
    viewer.script(f"document.querySelector('{RIGHT} .token.alone').focus()")
    details = viewer.text(f"{RIGHT} .token-details")
    assert "in the other oneno" in details and "log-ratio to the reference-0.25" in details and "bydataset" in details
    viewer.script(f"document.querySelector('{RIGHT} .token').focus()")
    viewer.press(ARROW_RIGHT)
    assert "token2 of 42" in viewer.text(f"{RIGHT} .token-details")
    assert "in the other oneyes" in viewer.text("#said"), "told to those who do not see it"
    viewer.click(".pair .check input")
    assert viewer.count(".token.alone") == 0 and "marks=0" in viewer.address
    viewer.reload()
    assert viewer.count(".token.alone") == 0


def test_a_pair_is_used_by_keys(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0")
    viewer.press("c")
    assert "color=entropy" in viewer.address, "the next quantity, of both"
    assert viewer.count(f"{LEFT} .token.plain") == 39 and viewer.count(f"{RIGHT} .token.plain") == 42
    assert viewer.script("return document.querySelector('.members').checkVisibility()") is False
    viewer.press("m")
    viewer.until(lambda: viewer.script("return document.querySelector('.members').checkVisibility()"), "each by itself")
    assert viewer.text(".panel-head h2") == "Candidate 1"
    assert viewer.texts(".member-head b") == ["candidate 0", "candidate 1"]
    viewer.press("j")
    viewer.until(lambda: "/group/1" in viewer.address, "the next group")


def test_of_three_candidates_any_two_are_compared_and_hostile_ones_are_text(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/1")
    assert viewer.texts(".side h3") == ["chosen: candidate 1 score 0.9", "rejected: candidate 0 score 0.2"]
    assert viewer.text(".verdict p").startswith("✗ the policy prefers the rejected one")
    assert "Both have become less likely than under the reference." in viewer.text(".verdict")
    assert "<script>alert(1)</script>" in viewer.text(f"{LEFT} .tokens").replace("·", " ")
    assert viewer.script("return document.title").startswith("Group 1")
    assert viewer.count(".members article") == 3, "all are there below"
    viewer.script(
        "const select = document.querySelector('select[data-key=left]'); select.selectedIndex = 2;"
        "select.dispatchEvent(new Event('change'))"
    )
    assert viewer.texts(".side h3") == ["candidate 2 score 0.5", "candidate 0 score 0.2"]
    assert viewer.count(".verdict") == 0 and "in a loss only" in viewer.text(".pair > p")
    viewer.reload()
    assert viewer.texts(".side h3")[0] == "candidate 2 score 0.5", "the address has it"


def test_a_single_candidate_and_equal_ones_say_what_can_be_said(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/2")
    assert viewer.count(".side") == 0 and viewer.count("#main h2") and "Given by the dataset" in viewer.text("#main")
    assert viewer.texts("section .scroll tbody tr") == ["candidate 0114-1.52"], (
        "score, advantage, tokens, log-prob, ratio"
    )
    assert viewer.script("return document.querySelector('select[data-color]').value") == "log_ratio"
    viewer.open("run/0/step/2/group/3")
    assert viewer.text(".verdict p").startswith("= the policy prefers neither")
    assert "Both have the same tokens" in viewer.text(".verdict") and viewer.count(".token.alone") == 0
    assert "The other one has all of its 6 tokens." in viewer.text(LEFT)


def test_without_a_reference_the_mean_log_prob_is_compared(viewer: Viewer) -> None:
    viewer.open("run/1/step/2/group/0")
    said = "✓ the policy prefers the chosen one Log-prob per token: chosen -0.5, rejected -1.25, margin 0.75"
    assert viewer.text(".verdict p") == said
    assert not any("reference" in row or "beta" in row for row in viewer.texts(".numbers tbody tr"))
    assert viewer.script("return document.querySelector('select[data-color]').value") == "learner_logprob"


def test_an_evaluation_without_log_probs_says_so(viewer: Viewer) -> None:
    viewer.open("run/2/evaluation/2/group/0")
    assert "No log-probs are recorded of this evaluation" in viewer.text(".pair > p")
    assert viewer.count(".token.alone") == 21, "texts are compared all the same"
    viewer.open("run/2/evaluations")
    assert "no log-probs are recorded" in viewer.text("#main") and viewer.count(".chart") == 0


def test_best_and_worst_of_a_sampled_group_are_a_pair_where_they_alone_were_in_the_loss(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/4")
    assert viewer.texts("#main h2")[1] == "Best and worst"
    assert viewer.texts(".side h3") == ["best: completion 1 reward 1", "worst: completion 2 reward 0"]
    assert "Best has become less likely than under the reference." in viewer.text(".verdict")
    assert viewer.count(".members article") == 4


def test_a_steps_pairs_are_sorted_by_margin_and_chosen_by_order(viewer: Viewer) -> None:
    viewer.open("run/0/step/1")
    assert viewer.texts(".tag")[:4] == ["= tie", "trained on", "= tie", "trained on"], "before the first update"
    viewer.open("run/0/evaluation/2?sort=-margin")
    assert viewer.texts("#main tbody th[scope=row]") == ["0", "1", "2"], "margins 60, -265.5, none"
    heads = viewer.texts("#main thead th")
    assert {"preference", "margin ▼", "candidates"} <= set(heads)
    assert not {"reward", "std", "reference answer"} & set(heads)
    facts = viewer.text(".facts")
    assert "candidates6" in facts and "pairs2" in facts and "chosen preferred50.0 %" in facts
    viewer.open("run/0/evaluation/2?order=wrong")
    assert viewer.texts("#main tbody th[scope=row]") == ["1"]
    viewer.open("run/0/evaluation/2?by=rollout&sort=-score&rmin=0.5")
    assert viewer.texts("#main tbody tr td:nth-child(3)") == ["1", "1", "0.9", "0.5"], "scores"
    assert viewer.count("#main thead th") == 6, "group, member, score, log-ratio, length, text"
    viewer.open("run/0/evaluation/2/plots")
    assert "The chosen answer is longer in 50.0 % of 2 pairs." in viewer.text(".plots")


def test_evaluations_tell_which_pairs_the_policy_orders_right(viewer: Viewer) -> None:
    viewer.open("run/0/evaluations")
    assert viewer.text(".card h3").startswith("share of 2 pairs whose chosen answer the policy prefers")
    assert viewer.texts("#main tbody tr") == ["shapes/0+0.5=✓✓===", "shapes/1-0.5=✗✗===", "shapes/2–––––––"]
    assert "not right at first, right at last (1)" in viewer.texts("select option")
    assert viewer.texts("#bar nav a[aria-current]") == ["Evaluations"]


def test_a_prompt_tells_how_its_margin_grew(viewer: Viewer) -> None:
    viewer.open("run/0/prompt?id=shapes/0")
    assert viewer.text(".card h3") == "margin of the chosen answer over the rejected one"
    titles = [text for text in viewer.texts(".fold > summary") if text.startswith("Step")]
    assert titles == ["Step 1 epoch 0, margin 0", "Step 2 epoch 0, margin 30"]


def test_curves_of_preferences_come_after_those_of_evaluations(viewer: Viewer) -> None:
    viewer.open("run/0/curves")
    sections = [text.split()[0] for text in viewer.texts(".fold > summary") if "never" not in text]
    assert sections == ["eval", "eval_blank", "preference", "loss", "data", "reward_model"]


def test_a_pair_can_be_read_in_a_narrow_window_and_in_the_dark(viewer: Viewer) -> None:
    for scheme in ("light", "dark"):
        viewer.scheme(scheme)
        viewer.open(f"run/0/step/2/group/0?color={'none' if scheme == 'dark' else ''}")
        assert viewer.script(CONTRAST)[0] == []
    viewer.width(360)
    viewer.open("run/0/step/2/group/1")
    assert viewer.script("return document.documentElement.scrollWidth") <= 360
    tops = "return [...document.querySelectorAll('.side')].map((each) => each.getBoundingClientRect().top)"
    left, right = viewer.script(tops)
    assert right > left, "one below the other"


def test_a_report_of_pairs_is_read_from_the_disk(driver: Chrome, runs: tuple[Path, ...], tmp_path: Path) -> None:
    file = tmp_path / "pairs.html"
    file.write_text(make_report([runs[0]], [2]).html())
    found = Viewer.opened(driver, file.as_uri())
    found.open("run/0/step/2/group/0")
    assert found.text(".verdict p").endswith("margin 30") and found.count(".side .token.alone") == 21
    found.open("run/0/step/2?order=wrong")
    assert found.texts("#main tbody th[scope=row]") == ["1"]
    found.open("run/0/prompt?id=shapes/0")
    assert found.count(".card h3") == 1 and "margin 30" in found.text("#main")
    assert found.complaints() == []
