"""The viewer's page in a real browser: what each page shows of a run made by hand."""

from __future__ import annotations

from tests.viewer.browser import Viewer


def test_each_metric_has_a_curve_with_attempts_and_alarms_marked(viewer: Viewer) -> None:
    viewer.open("run/0/curves")
    assert viewer.texts(".fold > summary")[:2] == ["eval 1", "reward 2"]
    assert {"eval/accuracy", "reward/mean", "perf/step_s"} <= set(viewer.texts(".card h3"))
    chart = ".card[data-metric='reward/mean']"
    viewer.until(lambda: viewer.count(f"{chart} path.line"), "the curve is drawn")
    assert viewer.texts(f"{chart} .readout b") == ["0.5"]
    assert viewer.count(f"{chart} circle.dot") == 2, "reward/mean has a value at steps 1 and 2"
    [attempt, alarm] = viewer.texts(f"{chart} .mark title")
    assert attempt == "attempt 2 went on from step 1, with 1 change of the config"
    assert alarm.startswith("alarm at step 2, length: the reward pays length")
    assert "1 alarm" in viewer.text(".alarms h2")


def test_curves_are_filtered_smoothed_and_put_on_a_log_scale_by_their_address(viewer: Viewer) -> None:
    viewer.open("run/0/curves?names=reward/mean,eval/accuracy")
    assert viewer.texts(".card h3") == ["reward/mean", "eval/accuracy"]
    viewer.open("run/0/curves")
    viewer.type("input[type=search]", "REWARD entropy")
    viewer.until(lambda: viewer.texts(".card h3") == ["reward/mean", "reward/exact_mean", "policy/entropy"], "filtered")
    viewer.type("input[type=range]", "0.6")
    viewer.click(".tools .check input")
    assert viewer.address == "#/run/0/curves?q=REWARD+entropy&smooth=0.6&log=1"
    viewer.reload()
    assert viewer.texts(".card h3") == ["reward/mean", "reward/exact_mean", "policy/entropy"]
    assert viewer.texts("output") == ["0.60"]


def test_a_curve_tells_the_value_of_the_step_under_the_crosshair(viewer: Viewer) -> None:
    viewer.open("run/0/curves?names=eval/accuracy")
    viewer.until(lambda: viewer.count("path.line"), "the curve is drawn")
    viewer.script("document.querySelector('.chart').focus()")
    viewer.press("\ue012")  # left: from the end
    assert viewer.text(".readout").startswith("step 20.75")
    viewer.press("\ue012")
    assert viewer.text(".readout").startswith("step 00.25"), "step 1 has no evaluation"
    assert viewer.text("#said").startswith("step 0")
    viewer.press("\ue007")  # enter
    viewer.until(lambda: viewer.address == "#/run/0/evaluation/0", "the evaluation, not a step of training")


def test_a_log_scale_leaves_out_what_it_cannot_show_and_tells_it_all_the_same(viewer: Viewer) -> None:
    viewer.open("run/0/curves?names=loss/total&log=1")
    viewer.until(lambda: viewer.count("path.line"), "the curve is drawn")
    assert viewer.count("circle.dot") == 1 and viewer.text(".readout") == "-0.01", "0.01, then -0.01"


def test_a_curve_has_no_more_strokes_than_the_width_shows(joined: Viewer) -> None:
    alternating = "Array.from({ length: 5000 }, (_, step) => [step, step % 2 ? 1 : -1])"
    path = joined.script(f"return pathOf(thinned({alternating}, 300), (at) => at, (at) => at, (at) => at > 0)")
    assert 100 <= path.count("M") <= 300


def test_a_steps_groups_are_sorted_filtered_and_searched(viewer: Viewer) -> None:
    viewer.open("run/0/step/2")
    assert viewer.texts("#main tbody th[scope=row]") == ["0", "1", "2", "3", "4"]
    assert viewer.text(".count-line p") == "5 groups"
    viewer.open("run/0/step/2?sort=-reward")
    assert viewer.texts("#main tbody th[scope=row]") == ["4", "0", "3", "1", "2"], "mean rewards 1, 0.85, 0.45, 0.3, 0"
    viewer.open("run/0/step/2?state=dropped")
    assert viewer.texts("#main tbody th[scope=row]") == ["4"]
    viewer.open("run/0/step/2?by=rollout&right=yes")
    assert viewer.count("#main tbody tr") == 8, "three of group 0, one of group 1, and all four of group 4"
    for sort, first in (("right", ["0", "0", "1", "1"]), ("-right", ["0", "0", "0", "1"])):
        viewer.open(f"run/0/step/2?by=rollout&sort={sort}")
        groups = viewer.texts("#main tbody th[scope=row]")
        assert groups[:4] == first and groups[-3:] == ["3", "3", "3"], "what is unknown comes last either way"
    viewer.open("run/0/step/2?by=rollout&rmin=1.1")
    assert viewer.count("#main tbody tr") == 2
    viewer.open("run/0/step/2?q=walk to THE goal")
    assert viewer.texts("#main tbody th[scope=row]") == ["3"], "the prompt of the episodes"
    viewer.type("input[type=search]", "数学 🙂 red")
    viewer.until(lambda: viewer.texts("#main tbody th[scope=row]") == ["0"], "found in a completion")
    viewer.reload()
    assert viewer.texts("#main tbody th[scope=row]") == ["0"]


def test_a_group_shows_images_prompt_reference_answer_and_what_each_reward_read(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0")
    viewer.until(lambda: viewer.script("return [...document.images].every((each) => each.naturalWidth)"), "images")
    assert viewer.texts(".picture figcaption") == [
        "image 1 of 2: 56 × 56 pixels, shown ×4",
        "image 2 of 2: 84 × 56 pixels, shown ×2",
    ]
    assert viewer.script("return document.querySelector('.picture img').naturalWidth") == 56
    assert viewer.text(".reference-answer") == "red"
    assert "What colour is shape 0?" in viewer.text(".messages")
    assert viewer.text(".why").startswith("Trained on")
    rows = viewer.texts("section .scroll tbody tr")
    assert len(rows) == 5 and rows[4].startswith("greedy")
    assert "read blue." in rows[1], "the answer that exact read in completion 1"
    assert viewer.texts(".member-head b") == [*(f"completion {n}" for n in range(4)), "greedy"]


def test_a_dropped_group_says_why(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/4")
    assert "rejected it" in viewer.text(".why") and "all 4 valid rewards are 1" in viewer.text(".why")


def test_tokens_are_coloured_by_a_quantity_and_tell_its_exact_numbers(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/0?member=1&color=advantage")
    tokens = viewer.count(".tokens .token")
    assert viewer.count(".tokens .token.low") == tokens, "completion 1 has the least reward of its group"
    assert viewer.texts(".tokens .token.special") == ["<|im_end|>"]
    assert "I·look·at·the·square." in viewer.text(".tokens")
    viewer.script("document.querySelector('.tokens .token').focus()")
    details = viewer.text(".token-details")
    assert "advantage-0.85" in details and "log-prob of the sampler-0.01" in details and "gap" in details
    viewer.press("\ue014")  # right
    assert "2 of" in viewer.text(".token-details")
    viewer.press("c")
    assert "color=sampler_logprob" in viewer.address
    strengths = "map((each) => Number(each.style.getPropertyValue('--strength')))"
    shades = viewer.script(f"return [...document.querySelectorAll('.tokens .token')].{strengths}")
    assert shades[0] < 0.05 and shades[-1] > 0.95 and shades == sorted(shades), "log-probs fall from -0.01 to -2.5"


def test_characters_that_are_hidden_or_turn_text_around_are_symbols(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/1?view=text")
    text = viewer.text(".member-panel .text")
    assert "bidi ⟨U+202E⟩gnp.exe⟨U+202C⟩, control ⟨ESC⟩[31m⟨BEL⟩⟨NUL⟩" in text
    assert "lone ⟨U+D800⟩, lines ⟨U+2028⟩⟨U+2029⟩" in text
    assert viewer.texts(".member-panel .text .hidden-character")[0] == "⟨U+202E⟩"


def test_an_episode_shows_turns_calls_observations_and_rewards(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/group/3?member=0")
    assert viewer.texts(".turn h3") == ["Turn 1", "Turn 2", "Turn 3"]
    assert viewer.texts(".turn .bubble.policy > .text") == [f"I go right, turn {n}." for n in range(3)]
    assert viewer.count(".turn .picture img") == 2
    assert "calls move" in viewer.text(".call") and '"to": "right"' in viewer.text(".call")
    assert "reward 1" in viewer.texts(".turn-head")[2] and "done" in viewer.texts(".turn-head")[2]
    counts = viewer.texts(".turn-head > span:nth-child(2)")
    assert all("of the policy" in each for each in counts) and counts[2].endswith(", 0 inserted")
    viewer.open("run/0/step/2/group/3?member=0&view=tokens")
    assert viewer.texts(".turn-mark") == ["turn 1", "turn 2", "turn 3"]
    assert viewer.count(".tokens .token.given") > 0
    viewer.open("run/0/step/2/group/3?member=0&view=text")
    assert all(f"{n + 1} I go right, turn {n}." in viewer.text(".member-panel .text") for n in range(3))
    viewer.open("run/0/step/2?by=rollout")
    assert "last turn" in viewer.texts("#main thead th")
    viewer.open("run/0/step/2/group/3?member=1")
    assert "this is no JSON" in viewer.text(".call.failed")
    viewer.open("run/0/step/2/group/3?member=2")
    assert "the world did not answer in 5 s" in viewer.text(".member-panel .problem")


def test_a_prompt_is_followed_over_steps_and_evaluations(viewer: Viewer) -> None:
    viewer.open("run/0/prompt?id=shapes/0")
    titles = [each.partition(" epoch")[0] for each in viewer.texts(".fold > summary")]
    assert titles == [
        *("Blank pictures at step 0", "Evaluation at step 0", "Step 1"),
        *("Blank pictures at step 2", "Evaluation at step 2", "Step 2"),
    ]
    assert viewer.text(".asked .text") == "What colour is shape 0?"
    assert viewer.text(".asked dl") == "reference answerred"
    assert viewer.count(".asked .picture img") == 2
    viewer.click(".fold tbody a")
    viewer.until(lambda: "/group/0?member=0" in viewer.address, "a link to the group")


def test_a_steps_numbers_are_of_what_was_sampled_and_scored(viewer: Viewer) -> None:
    """As in its metrics: neither the greedy completion nor the episode that failed counts."""
    viewer.open("run/0/step/2")
    shown = dict(zip(viewer.texts(".facts dt"), viewer.texts(".facts dd"), strict=True))
    rewards = [1.2, 0.0, 1.2, 1.0, 0, 1, 0, 0.2, 0, 0, 0, 0, 1.0, -0.1, 1, 1, 1, 1]
    assert shown["reward"] == f"{sum(rewards) / len(rewards):.4g}" and shown["rollouts"] == "19 and 1 greedy"
    assert shown["unscored"] == "1"
    viewer.open("run/0/step/2/plots")
    label = "return document.querySelector('svg[aria-label^=\"Rewards:\"]')?.getAttribute('aria-label')"
    bins = viewer.until(lambda: viewer.script(label), "the histogram is drawn").split("; ")
    assert sum(int(each.rpartition(": ")[2]) for each in bins) == len(rewards)


def test_links_lead_to_what_the_page_shows_by_then(viewer: Viewer) -> None:
    """Their addresses have the words and choices that came after they were drawn."""
    viewer.open("run/0/curves")
    viewer.click(".tools .check input")
    viewer.click(".card[data-metric='reward/mean'] h3 a")
    viewer.until(lambda: viewer.address == "#/run/0/curves?log=1&names=reward/mean", "the scale is kept")
    viewer.until(lambda: viewer.texts(".card h3") == ["reward/mean"], "drawn")
    viewer.open("run/0/step/1")
    viewer.type("input.search", "circle")
    viewer.until(lambda: "q=circle" in viewer.address, "searched")
    viewer.click("nav.step-bar a[aria-label^='Next step']")
    viewer.until(lambda: viewer.page == "run/0/step/2", "drawn")
    assert viewer.address == "#/run/0/step/2?q=circle", "the search is kept"
    viewer.open("run/0/step/2/group/0?view=tokens")
    viewer.press("c")
    viewer.until(lambda: "color=" in viewer.address, "coloured")
    color = viewer.address.partition("color=")[2].partition("&")[0]
    viewer.click("a[data-member='2']")
    viewer.until(lambda: f"color={color}" in viewer.address and "member=2" in viewer.address, "the colour is kept")


def test_plots_tell_the_correlation_within_groups(viewer: Viewer) -> None:
    viewer.open("run/0/step/2/plots")
    assert "Within groups, reward and length have a mean correlation of" in viewer.text(".plots")
    viewer.until(lambda: viewer.count(".plots circle.point"), "the points are drawn")
    titles = ["Reward against length", "Rewards", "Lengths in tokens"]
    assert viewer.texts(".plot figcaption")[:3] == titles
    viewer.script("document.querySelector('.plots').scrollIntoView(false)")
    viewer.until(lambda: viewer.count(".plots rect.bar"), "the histograms are drawn")


def test_evaluations_are_shown_beside_those_with_blank_pictures(viewer: Viewer) -> None:
    viewer.open("run/0/evaluations")
    head = viewer.texts("#main thead th")
    columns = ["prompt", "reference answer", "change", "step 0", "step 2", "blank 0", "blank 2"]
    assert [each.strip() for each in head] == columns
    assert viewer.texts("#main tbody tr")[1] == "shapes/1blue+1✗✓✗✗", "wrong, then right; wrong without its picture"
    viewer.open("run/0/evaluations?which=blind")
    assert viewer.texts("#main tbody th") == ["shapes/0"], "right once of two times without its picture"


def test_about_has_config_with_origins_attempts_events_ledger_environment_and_seconds(viewer: Viewer) -> None:
    viewer.open("run/0/about")
    headings = ["Attempts", "Config", "Seconds by phase", "Time line", "Events", "Ledger", "Environment"]
    assert viewer.texts("#main section > h2") == headings
    text = viewer.text()
    assert "learner.lr: 0.01 -> 0.001" in text and "stopped by SIGTERM" in text
    assert "learner.lr0.001command line" in text and "sampler.group_size4examples/shapes.yaml:14" in text
    assert "generate3 s6 s60.0 %" in text, "3 of 5 seconds in both steps"
    assert "the image has no pixels" in text and "engine.device_nameCPU" in text
    viewer.open("run/0/about?config=learner")
    assert viewer.texts("[aria-label=Config] tbody th") == ["learner.lr", "learner.epochs"]


def test_two_runs_are_compared_by_curves_config_and_prompt(viewer: Viewer) -> None:
    viewer.open("compare?runs=0,1&names=reward/mean")
    viewer.until(lambda: viewer.count("path.line") == 2, "two curves")
    assert viewer.texts(".readout .of") == ["shapes", "shapes-again"]
    viewer.open("compare?runs=0,1&tab=config")
    assert viewer.texts("section tbody tr") == ["learner.lr0.001command line0.01command line"]
    viewer.open("compare?runs=0,1&tab=prompt&prompt=shapes/0")
    assert viewer.texts(".side h2") == ["shapes", "shapes-again"]
    assert viewer.count(".asked .picture img") == 2
    assert viewer.count(".side") == 2 and viewer.count(".side:nth-child(2) tbody tr") > 8
