"""Each recipe on a small file with exactly the columns of its dataset."""

from __future__ import annotations

import importlib
import io
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from mmrl.config.plugin_specs import RewardSpec
from mmrl.errors import DataError
from mmrl.plugin_host import registry
from mmrl.rollout.rewards.worker import call
from mmrl.testing import check_dataset, make_rollouts
from mmrl.types import Prompt
from mmrl_datasets.names import ALIASES, PICTURES, REFERENCES
from mmrl_datasets.table import Table
from mmrl_rewards.answers import references

ROOT = Path(__file__).parents[2]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
RECIPES = {name: point for name, point in POINTS["mmrl.datasets"].items() if ".recipes." in point}


def recipe(name: str) -> type[Table]:
    module, _, attribute = RECIPES[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert issubclass(found, Table)
    return found


def picture(shade: int = 0, mode: str = "RGB") -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (60, 40), (shade, 0, 0)).convert(mode).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": f"{shade}.png"}


WORKED = "<think>Half of 16.</think>\n\n<answer>8</answer>"
CHART = {"query": "Which share in 2019?", "label": ["12.5"], "human_or_machine": 0, "image": picture()}
VISTA = {
    "pid": "1", "question": "How long is AB?", "image": "images/1.jpg", "decoded_image": picture(), "choices": None,
    "unit": "cm", "precision": 1.0, "answer": "2.5", "question_type": "free_form", "answer_type": "float",
    "metadata": {"grade": "high school"}, "query": "Hint: ...\nQuestion: How long is AB?",
}  # fmt: skip
MMMU_ROW = {
    "id": "validation_Math_1", "question": "In <image 1>, which of <image 2> fits?", "options": "['3 cm', '4 cm']",
    "explanation": "", **{f"image_{i}": picture(i) if i < 3 else None for i in range(1, 8)}, "img_type": "['Diagrams']",
    "answer": "B", "topic_difficulty": "Easy", "question_type": "multiple-choice", "subfield": "Geometry",
}  # fmt: skip
TWO = {"chosen": "A red hat.", "rejected": "A blue hat."}
TAGS = {"ds_name": "RLAIF-V", "origin_dataset": "COCO", "origin_split": "{}", "idx": "0", "image_path": "a/0.jpg"}


def graded(*ratings: str) -> dict[str, Any]:
    aspects = ("Helpfulness", "Ethical Considerations", "Visual Faithfulness")
    return {name: {"Rating": each, "Rationale": "So."} for name, each in zip(aspects, ratings, strict=True)}


def talk(answer: str) -> list[dict[str, str]]:
    asked = [("user", "Hi."), ("assistant", "Hello."), ("user", "Which hat?"), ("assistant", answer)]
    return [{"role": role, "content": content} for role, content in asked]


def told(answer: str) -> str:
    return f"\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: Which hat?\n\nAssistant: {answer}"


LLAVA = [{"from": "human", "value": "<image>Which hat?"}]
BENCH = {"ID": "pairs-1", "Category": "safety", "Dataset": "PAIRS", "Image": "a.png", "Text": "Which hat?"}
COMPARED: dict[str, list[dict[str, Any]]] = {
    "rlaif_v": [{**TAGS, "image": picture(), "question": "Which hat?", **TWO}],
    "rlhf_v": [{**TAGS, "image": picture(), "text": json.dumps({"question": "Which hat?", **TWO})}],
    "rlhf_v_sharegpt": [
        {
            "conversations": [{"from": "human", "value": "<image>Which hat?"}],
            "chosen": {"from": "gpt", "value": TWO["chosen"]},
            "rejected": {"from": "gpt", "value": TWO["rejected"]},
            "images": [picture()],
        }
    ],
    "vlfeedback": [
        {
            "id": "svit-1",
            "prompt": "Which hat?",
            "models": ["a", "b", "c", "d"],
            "completions": {
                "annotations": [graded("5", "5", "4"), graded("2", "5", "N/A"), graded("2", "5", "3"), graded(*"///")],
                "model": ["a", "b", "c", "d"],
                "response": ["A red hat.", "A blue hat.", "A hat.", "No."],
            },
            "img_path": "a.png",
        }
    ],
    "trl_rlaif_v": [
        {
            "images": [picture()],
            "prompt": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Which hat?"}]}
            ],
            **{
                name: [{"role": "assistant", "content": [{"type": "text", "text": text}]}] for name, text in TWO.items()
            },
        }
    ],
    "ultrafeedback": [
        {
            "prompt": "Which hat?",
            "prompt_id": "1",
            "chosen": talk(TWO["chosen"]),
            "rejected": talk(TWO["rejected"]),
            "messages": talk(TWO["chosen"]),
            "score_chosen": 8.5,
            "score_rejected": 8.5,
        }
    ],
    "hh_rlhf": [{name: told(text) for name, text in TWO.items()}],
    "llava_preference": [
        {
            "id": "000000000009",
            "image": "a.png",
            "conversations": [*LLAVA, {"from": "gpt", "value": "A hat."}],
            "output_1": {"from": "llava", "value": first},
            "output_2": {"from": "llava", "value": second},
            "hallucination": False,
            "preference": better,
        }
        for first, second, better in (("A red hat.", "A blue hat.", 1), ("A blue hat.", "A red hat.", 2))
    ],
    "mm_rlhf": [{"prompt": "<image>Which hat?", **TWO, "image": "a.png"}],
    "mmpr": [{"image": "a.png", "question": "<image>Which hat?", **TWO}],
    "vl_rewardbench": [
        {
            "id": "RLAIF-V-14",
            "query": "Which hat?",
            "response": ["A blue hat.", "A red hat."],
            "image": picture(),
            "human_ranking": [1, 0],
            "models": ["a", "b"],
            "judge": "",
            "rationale": None,
            "query_source": "WildVision",
            "ground_truth": None,
        }
    ],
    "multimodal_rewardbench": [
        {**BENCH, "Output1": "A blue hat.", "Output2": "A red hat.", "Better": "Output2"},
        {**BENCH, "Output1": "A red hat.", "Output2": "A blue hat.", "Better": "Output1"},
    ],
}
PAIR = [("A red hat.", 1.0), ("A blue hat.", 0.0)]
SCORES: dict[str, list[tuple[str, float | None]]] = dict.fromkeys(COMPARED, PAIR) | {
    "vlfeedback": [("A red hat.", 14 / 3), ("A blue hat.", 3.5), ("A hat.", 10 / 3), ("No.", None)],
    "vl_rewardbench": PAIR[::-1],
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "geometry3k": [
        {"images": [picture(mode="RGBA")], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"},
        {"images": [picture(mode="P")], "problem": "<image>Find y.", "answer": "\\frac { 7 } { 25 }"},
    ],
    "math12k": [{"problem": "Evaluate $1+1$.", "answer": "2"}],
    "journeybench_multi_image_vqa": [
        {"images": [picture(1), picture(2)], "problem": "<image><image>What differs?", "answer": "the hat"}
    ],
    "rl_mixed_dataset": [
        {"images": [picture()], "problem": "<image>Find x.", "answer": "48"},
        {"images": [], "problem": "Evaluate $1+1$.", "answer": "2"},
    ],
    "clevr_count_70k": [{"images": [picture()], "problem": "<image>How many items are there?", "answer": "5"}],
    "clevr_cogen_a_train": [
        {"image": picture(), "problem": "How many items are there?", "solution": "<answer> 3 </answer>"}
    ],
    "geoqa_8k_r1v": [{"images": [picture()], "problem": "<image>Find angle A.", "answer": "48^\\circ"}],
    "geoqa_r1v_train_8k": [{"image": picture(), "problem": "Find angle A.", "solution": "<answer> 48° </answer>"}],
    "multimodal_open_r1_8k_verified": [
        {
            "image": picture(),
            "problem": "Find x.",
            "solution": WORKED,
            "original_question": "Find x?",
            "original_answer": "8",
        }
    ],
    "chartqa": [CHART, {**CHART, "label": ["Yes"]}],
    "mathvista": [
        VISTA,
        {
            **VISTA,
            "choices": ["3 cm", "4 cm"],
            "answer": "4 cm",
            "answer_type": "text",
            "precision": None,
            "question_type": "multi_choice",
        },
        {**VISTA, "unit": None, "answer": "[1, 2]", "answer_type": "list", "precision": None},
        {**VISTA, "unit": "", "answer": "3", "answer_type": "integer", "precision": None},
    ],
    "mmmu": [
        MMMU_ROW,
        {
            **MMMU_ROW,
            "question": "Name <image 1> and <image 2>.",
            "options": "[]",
            "answer": "a cone",
            "question_type": "open",
        },
    ],
}


def load(name: str, folder: Path, **options: Any) -> list[Prompt]:
    loader = recipe(name)
    split = loader.Config().split or "all_data"  # type: ignore[call-arg]
    rows = (ROWS | COMPARED)[name]
    if name in ("mm_rlhf", "mmpr"):
        write_lines(folder / f"{split}.jsonl", rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    if name == "mmpr":
        write_meta(folder, {"hats": {"root": "", "annotation": "all_data.jsonl", "repeat_time": 1}})
    check_dataset(loader, options={"path": str(folder), **options})
    return list(loader(loader.Config(path=str(folder), **options)).load())


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_meta(folder: Path, entries: Mapping[str, Any]) -> None:
    (folder / "meta.json").write_text(json.dumps(entries))


def test_every_recipe_has_its_rows_here_and_its_facts() -> None:
    assert set(RECIPES) == set(ROWS) | set(COMPARED)
    modules = {path.stem for path in (ROOT / "datasets/mmrl_datasets/recipes").glob("[a-z]*.py")}
    assert modules == {RECIPES[name].partition(":")[0].rpartition(".")[2] for name in RECIPES}
    for name in RECIPES:
        facts = recipe(name).facts
        assert facts is not None and bool(facts.reward) == (name in ROWS)
        assert facts.origin == recipe(name).Config().path, name  # type: ignore[call-arg]


def rewards(name: str) -> list[RewardSpec]:
    """Those that a recipe suggests: as its notes write them, or else the one of its facts."""
    facts = recipe(name).facts
    assert facts is not None
    written = re.match(r"rewards: \[.*?}\]", facts.notes)
    entries = yaml.safe_load(written[0])["rewards"] if written else [{"name": facts.reward[0]}]
    assert [entry["name"] for entry in entries] == list(facts.reward)
    if written:
        assert written[0] in (ROOT / "datasets" / "README.md").read_text()
    return [RewardSpec(**entry) for entry in entries]


@pytest.mark.parametrize("name", ROWS)
def test_the_suggested_rewards_score_every_row_the_right_answer_above_a_wrong_one(name: str, tmp_path: Path) -> None:
    specs = rewards(name)
    assert len({spec.metric for spec in specs}) == 1, "one component tells right from wrong"
    for prompt in load(name, tmp_path):
        source = prompt.source or name
        [spec] = [each for each in specs if each.sources is None or source in each.sources]
        reward = registry.create("reward", spec)
        [reference] = references(prompt.answer)
        columns, values = dict(prompt.columns), []
        for text in (f"So it is \\boxed{{{reference}}}.", "So it is \\boxed{1234567}."):
            [rollout] = make_rollouts([text], answer=prompt.answer, columns=columns)
            encoded = replace(
                rollout.prompt, prompt=replace(rollout.prompt.prompt, choices=prompt.choices, source=source)
            )
            [value] = call(reward, [replace(rollout, prompt=encoded)])  # type: ignore[misc]
            values.append(value)
        assert values == [1.0, 0.0], (name, prompt.id)


TEXTS: dict[str, list[str]] = {
    "geometry3k": ["<image>Find x.", "<image>Find y."],
    "math12k": ["Evaluate $1+1$."],
    "journeybench_multi_image_vqa": ["<image><image>What differs?"],
    "rl_mixed_dataset": ["<image>Find x.", "Evaluate $1+1$."],
    "clevr_count_70k": ["<image>How many items are there?"],
    "clevr_cogen_a_train": ["<image>How many items are there?"],
    "geoqa_8k_r1v": ["<image>Find angle A."],
    "geoqa_r1v_train_8k": ["<image>Find angle A."],
    "multimodal_open_r1_8k_verified": ["<image>Find x."],
    "chartqa": ["<image>Which share in 2019?"] * 2,
    "mathvista": [
        "<image>How long is AB? (Unit: cm)\nAnswer with a number that has 1 decimal place.",
        "<image>How long is AB? (Unit: cm)\n(A) 3 cm\n(B) 4 cm",
        "<image>How long is AB?\nAnswer with a list of numbers, such as [1, 2, 3].",
        "<image>How long is AB?\nAnswer with a whole number.",
    ],
    "mmmu": ["In <image>, which of <image> fits?\n(A) 3 cm\n(B) 4 cm", "Name <image> and <image>."],
}


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_reads_its_dataset_without_any_option(name: str, tmp_path: Path) -> None:
    prompts = load(name, tmp_path)
    assert [prompt.messages[-1].content for prompt in prompts] == TEXTS[name]
    references = [row.get("answer", row.get("solution", row.get("label"))) for row in ROWS[name]]
    assert [prompt.answer for prompt in prompts] == references


def test_recipes_keep_what_rewards_and_algorithms_need(tmp_path: Path) -> None:
    for name in ("multimodal_open_r1_8k_verified", "mathvista", "mmmu", "clevr_cogen_a_train"):
        (tmp_path / name).mkdir()
    [worked] = load("multimodal_open_r1_8k_verified", tmp_path / "multimodal_open_r1_8k_verified")
    assert worked.demonstration == WORKED
    [count] = load("clevr_cogen_a_train", tmp_path / "clevr_cogen_a_train")
    assert count.demonstration is None
    vista = load("mathvista", tmp_path / "mathvista")
    assert (vista[0].columns["precision"], vista[0].columns["question"]) == (1.0, "How long is AB?")
    assert vista[1].choices == ("3 cm", "4 cm")
    assert "image" not in vista[0].columns
    subject = load("mmmu", tmp_path / "mmmu")
    assert [prompt.choices for prompt in subject] == [("3 cm", "4 cm"), ()]
    assert [image.data for image in subject[0].images] == [picture(1)["bytes"], picture(2)["bytes"]]


@pytest.mark.parametrize("name", COMPARED)
def test_a_recipe_reads_answers_to_compare_without_any_option(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture()["bytes"])
    for prompt in load(name, tmp_path):
        found = [(each.text, each.score) for each in prompt.candidates]
        assert [text for text, _ in found] == [text for text, _ in SCORES[name]]
        assert [score for _, score in found] == pytest.approx([score for _, score in SCORES[name]])
        has_image = name not in ("ultrafeedback", "hh_rlhf")
        assert [each.content for each in prompt.messages] == (
            ["<image>Which hat?"] if has_image else ["Hi.", "Hello.", "Which hat?"]
        )
        assert len(prompt.images) == has_image and prompt.answer in (None, "A red hat.")


def test_a_column_of_each_answers_fields_and_a_list_of_answers_are_read_alike(tmp_path: Path) -> None:
    [row] = COMPARED["vlfeedback"]
    fields = row["completions"]
    listed = [dict(zip(fields, each, strict=True)) for each in zip(*fields.values(), strict=True)]
    (tmp_path / "a.png").write_bytes(picture()["bytes"])
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps(row | {"completions": c}) + "\n" for c in (fields, listed))
    )
    one, two = recipe("vlfeedback")(recipe("vlfeedback").Config(path=str(tmp_path))).load()
    assert one.candidates == two.candidates and len(one.candidates) == 4


BAD = [
    ("rlhf_v", {"text": "{"}, "no JSON", "'text'"),
    ("rlhf_v", {"text": "[]"}, "no JSON object", "'text'"),
    ("rlhf_v", {"text": '{"question": "?", "chosen": "a"}'}, "has no rejected", "'text'"),
    ("vlfeedback", {"completions": None}, "no answers with annotations", "'completions'"),
    ("vlfeedback", {"completions": {"annotations": [{}] * 4, "response": list("abcd")}}, "no grade", "'completions'"),
    ("hh_rlhf", {"rejected": "Which hat?"}, "no transcript", "'rejected'"),
    ("hh_rlhf", {"rejected": told("")}, "answer is empty", "'rejected'"),
    ("vl_rewardbench", {"human_ranking": [0, 0]}, "The ranks are", "'human_ranking'"),
    ("multimodal_rewardbench", {"Better": "Output3"}, "is 'Output3'", "'Better'"),
    ("multimodal_rewardbench", {"Output1": None}, "The answer is null", "'rejected'"),
    ("multimodal_rewardbench", {"Category": ["safety"]}, "The category is list", "'category'"),
    ("llava_preference", {"preference": 0}, "The preference is 0", "'preference'"),
    ("llava_preference", {"preference": True}, "The preference is True", "'preference'"),
    ("llava_preference", {"output_1": None}, "The answer is null", "'chosen'"),
    ("llava_preference", {"output_2": {"from": "llava", "value": " "}}, "answer is empty", "'rejected'"),
    ("mm_rlhf", {"video": "long/1.mp4"}, "The row has video, and only text and images", "'video'"),
]


@pytest.mark.parametrize(("name", "change", "message", "column"), BAD)
def test_a_row_of_another_layout_is_an_error_of_row_and_column(
    name: str, change: dict[str, Any], message: str, column: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(picture()["bytes"])
    rows = [{key: value for key, value in COMPARED[name][0].items() if key != "image"} | each for each in ({}, change)]
    (tmp_path / f"{recipe(name).Config().split or 'all'}.json").write_text(json.dumps(rows))  # type: ignore[call-arg]
    loader = recipe(name)
    with pytest.raises(DataError, match=message) as caught:
        loader(loader.Config(path=str(tmp_path), images="")).load()[1]
    assert "row 1" in caught.value.where and column in caught.value.where


@pytest.mark.parametrize("name", ["multimodal_rewardbench", "mm_rlhf", "mmpr"])
def test_data_whose_pictures_are_on_no_hub_ask_for_a_copy(name: str) -> None:
    loader = recipe(name)
    with pytest.raises(DataError, match=r"no (unpacked )?copy is named") as caught:
        loader(loader.Config()).load()  # type: ignore[call-arg]
    assert "path" in caught.value.remedy


def test_benchmarks_tell_the_categories_that_their_authors_publish(tmp_path: Path) -> None:
    """VL-RewardBench by its authors' `cal.py`, Multimodal RewardBench by `2_get_accuracy.py`."""
    published = {
        "vl_rewardbench": (
            COMPARED["vl_rewardbench"][0],
            "id",
            {
                "mathverse_Text Dominant-5": "reasoning", "mmmu_pro_validation_1": "reasoning",
                "hallucination_pair-12": "hallucination", "RLAIF-V-14": "hallucination", "RLHF-V-3": "hallucination",
                "wildvision-battle-7": "general", "LRVInstruction-000000007746": "general",
            },
        ),
        "multimodal_rewardbench": (
            COMPARED["multimodal_rewardbench"][0] | {"Category": "reasoning"},
            "ID",
            {"mathvista_3": "reasoning/math", "EMMA-Coding_1": "reasoning/coding"},
        ),
    }  # fmt: skip
    for name, (row, key, categories) in published.items():
        folder, loader = tmp_path / name, recipe(name)
        rows = [row | {"image": None, "Image": None, key: each} for each in categories]
        write_lines(folder / f"{loader.Config().split or 'all'}.jsonl", rows)  # type: ignore[call-arg]
        found = loader(loader.Config(path=str(folder), images="")).load()
        assert [prompt.category for prompt in found] == list(categories.values())
    assert [prompt.category for prompt in load("multimodal_rewardbench", tmp_path, images="")] == ["safety/bias"] * 2


def test_a_talk_of_llavas_may_be_in_a_list_of_its_own_and_end_with_the_question(tmp_path: Path) -> None:
    [row, _] = COMPARED["llava_preference"]
    earlier = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}, *LLAVA]
    talks = [[*LLAVA, {"from": "gpt", "value": "A hat."}]], earlier
    write_lines(tmp_path / "train.jsonl", [row | {"conversations": each, "image": "a.png"} for each in talks])
    (tmp_path / "a.png").write_bytes(picture()["bytes"])
    loader = recipe("llava_preference")
    one, two = loader(loader.Config(path=str(tmp_path))).load()
    assert [each.content for each in one.messages] == ["<image>Which hat?"]
    assert [each.content for each in two.messages] == ["Hi.", "Hello.", "<image>Which hat?"]
    assert one.candidates == two.candidates and one.demonstration is None


def test_the_files_of_a_meta_json_are_one_dataset_with_the_images_of_each(tmp_path: Path) -> None:
    """Paths count from its folder, or as InternVL's own example has them from the one around it."""
    folder = tmp_path / "MMPR"
    for place, shade in (("one", 10), ("two", 20)):
        (folder / "images" / place).mkdir(parents=True)
        (folder / "images" / place / "a.png").write_bytes(picture(shade)["bytes"])
    texts = [f"Which hat is {place}?" for place in range(6)]
    write_lines(folder / "annotations" / "one.jsonl", [{"image": "a.png", "question": text, **TWO} for text in texts])
    pair = {"image": ["a.png", "a.png"], "question": "<image><image>Which?", **TWO}
    write_lines(folder / "annotations" / "two.jsonl", [pair, {"question": "Why?", **TWO}])
    shared = {"data_augment": False, "max_dynamic_patch": 12, "length": 6}
    write_meta(
        folder,
        {
            "one": {"root": "images/one", "annotation": "annotations/one.jsonl", "repeat_time": 0.5, **shared},
            "two": {"root": "MMPR/images/two", "annotation": "MMPR/annotations/two.jsonl", "repeat_time": 2, **shared},
        },
    )
    loader = recipe("mmpr")
    rows = list(loader(loader.Config(path=str(folder), category="subset")).load())
    asked = [prompt.messages[0].content for prompt in rows]
    assert asked == [f"<image>{texts[at]}" for at in (0, 2, 4)] + ["<image><image>Which?", "Why?"] * 2
    assert [prompt.category for prompt in rows] == ["one"] * 3 + ["two"] * 4
    assert {image.data for prompt in rows[:3] for image in prompt.images} == {picture(10)["bytes"]}
    assert [image.data for image in rows[3].images] == [picture(20)["bytes"]] * 2 and not rows[4].images
    assert len({prompt.id for prompt in rows}) == 7
    alone = loader(loader.Config(path=str(folder / "meta.json"), subset="two"))
    assert len(alone.load()) == 4 and alone.fingerprint() != loader(loader.Config(path=str(folder))).fingerprint
    other = tmp_path / "pictures"
    (other / "images" / "one").mkdir(parents=True)
    (other / "images" / "one" / "a.png").write_bytes(picture(30)["bytes"])
    moved = loader(loader.Config(path=str(folder), subset="one", image_root=str(other))).load()
    assert moved[0].images[0].data == picture(30)["bytes"]


@pytest.mark.parametrize(
    ("meta", "options", "message"),
    [
        (None, {}, "meta.json cannot be read"),
        ([], {}, "no list of files"),
        ({"a": {"root": "."}}, {}, "annotation and root are no paths"),
        ({"a": {"annotation": "a.jsonl"}}, {}, "There is no file a.jsonl"),
        ({"a": {"annotation": "some.jsonl", "repeat_time": "2"}}, {}, "repeat_time is '2'"),
        ({"a": {"annotation": "some.jsonl", "repeat_time": 0}}, {}, "no rows that are taken"),
        ({"a": {"annotation": "some.jsonl"}}, {"subset": "b"}, "There is no subset 'b'"),
    ],
)
def test_a_meta_json_that_leads_nowhere_is_an_error(
    meta: Any, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    write_lines(tmp_path / "some.jsonl", COMPARED["mmpr"])
    if meta is not None:
        (tmp_path / "meta.json").write_text(json.dumps(meta))
    loader = recipe("mmpr")
    with pytest.raises(DataError, match=message) as caught:
        loader(loader.Config(path=str(tmp_path), **options)).load()
    assert "meta.json" in caught.value.where


def test_options_of_a_recipe_may_be_overridden(tmp_path: Path) -> None:
    [prompt] = load("multimodal_open_r1_8k_verified", tmp_path, prompt="original_question", answer="original_answer")
    assert (prompt.messages[0].content, prompt.answer) == ("<image>Find x?", "8")


def test_a_precision_that_is_no_number_is_an_error_of_the_row(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{**VISTA, "precision": "one"}]), tmp_path / "testmini.parquet")
    loader = recipe("mathvista")
    with pytest.raises(DataError, match="no number of decimals") as caught:
        loader(loader.Config(path=str(tmp_path))).load()[0]
    assert caught.value.where.endswith("row 0, column 'precision'")


def test_mmmu_asks_for_a_subject() -> None:
    loader = recipe("mmmu")
    with pytest.raises(DataError, match="a subset for each subject") as caught:
        loader(loader.Config()).load()  # type: ignore[call-arg]
    assert "subset" in caught.value.remedy


def test_the_page_and_the_recipes_agree() -> None:
    page = (ROOT / "datasets" / "README.md").read_text()
    lines = set(page.splitlines())
    for role, names in ALIASES.items():
        assert f"| `{role}` | {', '.join(f'`{name}`' for name in names) or 'the one that you name'} |" in lines
    for names in (PICTURES, REFERENCES):
        assert ", ".join(f"`{name}`" for name in names) in " ".join(page.split())
    for name in RECIPES:
        facts = recipe(name).facts
        assert facts is not None
        counts = ", ".join(f"{split} {count:,}" for split, count in facts.rows.items()) or "not stated"
        rewards = ", ".join(f"`{reward}`" for reward in facts.reward)
        start = f"| `{name}` | {facts.origin} | {facts.licence} | {counts} | "
        assert f"{start}{rewards} |" in lines if rewards else any(line.startswith(start) for line in lines)
    for section, count in {"Columns": len(ALIASES), "Recipes": len(RECIPES)}.items():
        [found] = re.findall(rf"^## {section}$(.*?)^## ", page, re.DOTALL | re.MULTILINE)
        assert found.count("\n| `") == count, f"{section} lists what there is, and nothing else"
