"""How the viewer's page is used: keys, narrow windows, colours that can be read, names for those who do not see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.viewer.browser import PAGES, Viewer

CONTRAST = Path(__file__).with_name("contrast.js").read_text()


def test_keys_lead_through_groups_and_steps(viewer: Viewer) -> None:
    viewer.open("run/0/step/1?sort=-reward")
    viewer.press("j")
    viewer.until(lambda: viewer.address == "#/run/0/step/1/group/4?sort=-reward", "the first group as sorted")
    viewer.drawn()
    viewer.until(lambda: viewer.text("h1") == "Group 4", "drawn")
    for key, path in (
        ("j", "run/0/step/1/group/0"),
        ("n", "run/0/step/2/group/0"),
        ("k", "run/0/step/2/group/4"),
        ("p", "run/0/step/1/group/4"),
    ):
        viewer.press(key)
        viewer.until(lambda path=path: viewer.page == path, f"{key} leads to {path}")  # type: ignore[misc]
        assert viewer.address == f"#/{path}?sort=-reward"
    viewer.press("m", "m", "c")
    assert "member=2" in viewer.address and "color=" in viewer.address
    query = viewer.address.partition("?")[2]
    viewer.press("n")
    viewer.until(lambda: viewer.address == f"#/run/0/step/2/group/4?{query}", "the completion and colour are kept")
    viewer.until(lambda: viewer.page == "run/0/step/2/group/4", "drawn: keys are those of the page that is shown")
    viewer.press("u")
    viewer.until(lambda: viewer.address == "#/run/0/step/2?sort=-reward", "up to the step")
    viewer.until(lambda: viewer.count("input.search"), "drawn")
    viewer.press("/", "j")
    focus = "return [document.activeElement.type, document.activeElement.value]"
    assert viewer.script(focus) == ["search", "j"], "typing moves nowhere"


def test_keys_lead_on_from_a_group_that_the_step_has_not(viewer: Viewer) -> None:
    """Steps of an algorithm that fills its batch have different numbers of groups."""
    viewer.open("run/0/step/1/group/77")
    assert "step 1 has no group 77" in viewer.text(".problem") and viewer.count("nav.step-bar") == 1
    viewer.press("n")
    viewer.until(lambda: "step 2 has no group 77" in viewer.text(".problem"), "the next step")
    viewer.press("u")
    viewer.until(lambda: viewer.text("h1") == "Step 2", "up to the step")
    assert all("404" in each for each in viewer.complaints())


def test_help_lists_the_keys(viewer: Viewer) -> None:
    viewer.press("?")
    assert viewer.script("return document.getElementById('help').open")
    viewer.press("\ue00c")
    assert not viewer.script("return document.getElementById('help').open")


def test_no_page_is_wider_than_a_narrow_window(viewer: Viewer) -> None:
    viewer.width(400)
    for address in PAGES:
        viewer.open(address)
        viewer.script("window.scrollTo(0, 400)")
        assert viewer.script("return document.documentElement.scrollWidth") <= 400, address


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "ground"), [("light", "rgb(247, 247, 245)"), ("dark", "rgb(20, 23, 26)")])
def test_text_is_readable_in_the_dark_and_in_the_light(viewer: Viewer, scheme: str, ground: str) -> None:
    viewer.scheme(scheme)
    for address in (*PAGES, "run/0/step/2/group/1?view=tokens&color=entropy&member=1"):
        viewer.open(address)
        poor, found = viewer.script(CONTRAST)
        assert found == ground
        assert poor == [], address


@pytest.mark.full
def test_controls_and_images_have_names_and_pages_one_heading(viewer: Viewer) -> None:
    nameless = """
        const all = [...document.querySelectorAll("input, select, button, img, svg[role=img]")];
        const has = (each) => each.labels?.length || each.getAttribute("aria-label") || each.textContent.trim();
        return all.filter((each) => !has(each) && !each.hasAttribute("alt")).map((each) => each.outerHTML);
    """
    for address in PAGES:
        viewer.open(address)
        assert viewer.script(nameless) == [], address
        assert viewer.count("h1") == 1, address
        words = viewer.script("return document.title").split(" · ")
        assert words[-1] == "mmrl" and ("shapes" in words) == address.startswith("run/"), address
