"""Prompts in tokens: image tokens expanded, shortened again for vLLM, and rows that do not fit refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mmrl.data.chat_messages import special_tokens
from mmrl.data.images import MediaStore
from mmrl.engine.aids.tiny_templates import chat_template
from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.text.encoding import Encoder, unexpanded
from mmrl.engine.text.thoughts import continued
from mmrl.errors import DataError
from mmrl.types import Message, Prompt

VISION = [name for name, family in FAMILIES.items() if family.vision]


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", VISION)
def test_prompts_are_encoded_as_the_models_own_processor_does(family, as_on_hub, bench):
    setting = bench(family, as_on_hub)
    for prompt in setting.prompts:
        images = [setting.media.load(ref) for ref in prompt.images]
        pictures = {"images": images} if images else {}
        expected = setting.folder.processor(text=[prompt.text], **pictures)["input_ids"][0]
        assert prompt.token_ids.tolist() == list(expected)
        assert prompt.token_ids.dtype == np.int32


def test_a_first_token_that_template_and_tokenizer_both_write_comes_once(bench):
    setting = bench("llama", True)
    first = setting.folder.tokenizer.bos_token_id
    assert setting.folder.tokenizer("what")["input_ids"][0] == first
    assert setting.prompts[0].token_ids.tolist().count(first) == 1
    assert setting.prompts[0].token_ids[0] == first


@pytest.mark.parametrize("family", VISION)
def test_unexpanded_is_the_inverse_of_expansion(family, bench):
    setting = bench(family)
    for prompt in setting.prompts:
        expected = setting.folder.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        assert unexpanded(prompt.token_ids, prompt.images, setting.folder) == expected


@pytest.mark.parametrize("family", VISION)
def test_the_length_is_known_without_the_pixels(family, bench, picture):
    encoder = bench(family).encoder
    row = Prompt("row", (Message("user", "a <image> b <image>"),), (picture(60, 90), picture(300, 200)))
    assert encoder.num_tokens(row) == len(encoder.encode(row).token_ids)


def test_a_row_with_other_messages_has_the_tokens_of_one_that_was_read_so_and_the_images_of_the_first(bench, picture):
    encoder = bench("qwen2_5_vl").encoder
    row = Prompt("row", (Message("user", "a <image> b <image>"),), (picture(60, 90), picture(300, 200)))
    hinted = replace(row, messages=(Message("user", "a <image> b <image>: it is 7"), Message("assistant", "So")))
    prompt = replace(encoder.encode(row), epoch=3)
    found = encoder.reworded(prompt, replace(hinted, images=(), retries=1))
    expected = encoder.encode(hinted)
    assert found.token_ids.tolist() == expected.token_ids.tolist() and found.text == expected.text
    assert (found.images, found.epoch, found.prompt.retries) == (prompt.images, 3, 1)
    with pytest.raises(DataError, match="1 image token and 2 images"):
        encoder.reworded(prompt, replace(hinted, images=(), messages=(Message("user", "<image>"),)))


def test_measuring_looks_at_no_pixel_and_encoding_at_every_one(vision, picture):
    whole = picture(300, 200)
    broken = replace(whole, data=whole.data[:60] + bytes(60))  # a header, and nothing that could be decoded
    row = Prompt("row", (Message("user", "<image>"),), (whole,))
    bad = replace(row, images=(broken,))
    assert vision.encoder.num_tokens(bad) == vision.encoder.num_tokens(row)
    with pytest.raises(DataError, match="cannot be decoded") as caught:
        vision.encoder.encode(bad)
    assert caught.value.where == "300x200 noise 0"


def test_messages_keep_their_roles_and_the_text_ends_where_the_completion_starts(vision):
    row = Prompt("row", (Message("system", "Be brief."), Message("user", "2+2?")))
    assert vision.encoder.encode(row).text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("family", "written", "eos", "end"),
    [
        ("qwen2", "<|im_end|>", "<|im_end|>", "<|im_end|>"),
        ("qwen2", "<|im_end|>", "<|endoftext|>", "<|im_end|>"),  # as base models of Qwen have it
        ("qwen2_5_vl", "<|im_end|>", "<|endoftext|>", "<|im_end|>"),
        ("qwen2", "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        ("qwen2", "<|box_end|>", "<|im_end|>", "<|box_end|>"),  # which no config of the folder calls an end
        ("qwen2_5_vl", "<|box_end|>", "<|im_end|>", "<|box_end|>"),
        ("qwen2", "<|box_end|><|im_end|>", "<|im_end|>", "<|box_end|>"),
        ("qwen2", " <|im_end|>", "<|endoftext|>", "<|im_end|>"),  # as Llama 2, with a blank before it
        ("qwen2", "", "<|endoftext|>", "<|endoftext|>"),  # the mark that begins the next message ends no turn
        ("qwen2", "\nEnd.", "<|endoftext|>", "<|endoftext|>"),
    ],
)
def test_a_demonstration_ends_as_the_template_ends_turns_and_sampling_stops_there(
    family, written, eos, end, models, tmp_path
):
    template = chat_template(family).replace("{{ body(m) }}<|im_end|>", "{{ body(m) }}" + written)
    folder, encoder = opened(models(family), tmp_path, template, eos_token=eos)
    prompt = encoder.encode(Prompt("row", (Message("user", "2+2?"),), demonstration="\\boxed{4}"))
    for all_turns in (False, True):
        sample = encoder.demonstrate(prompt, all_turns=all_turns)
        *text, last = sample.token_ids.tolist()
        assert folder.tokenizer.decode(text) == "\\boxed{4}" and folder.tokenizer.decode([last]) == end
        assert sample.mask.all() and last in folder.vocabulary.eos
    assert encoder.targets == f"end with {end}"
    (tmp_path / "saved").mkdir()
    folder.save_files(tmp_path / "saved")
    assert last in json.loads((tmp_path / "saved/generation_config.json").read_text())["eos_token_id"]


def opened(model, tmp_path, template, **settings):
    """A copy of a model's folder, without weights and with another template and other settings, and its encoder."""
    path = shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    (path / "chat_template.jinja").write_text(template)
    folder = ModelFolder.open(str(path), with_weights=False)
    return folder, Encoder(folder, MediaStore(tmp_path / "media", folder.image_sizes(3136, 50176)))


THOUGHT = "<think>\nb\n</think>\nit is 3"


@pytest.mark.parametrize(
    ("head", "demonstration", "learned"),
    [
        ("<think>\n", THOUGHT, "b\n</think>\nit is 3"),
        ("<think>\n", "\n<think>b</think>it is 3", "b</think>it is 3"),
        ("<think>\n", "b\n</think>\nit is 3", "b\n</think>\nit is 3"),  # it goes on already
        ("<think>\n", "<think>\n\n</think>\n\n3", "\n</think>\n\n3"),
        ("<think>", THOUGHT, "\nb\n</think>\nit is 3"),
        ("<think>\n\n", THOUGHT, "b\n</think>\nit is 3"),
        ("<think> ", THOUGHT, "b\n</think>\nit is 3"),
        ("<thinking>\n", THOUGHT.replace("think>", "thinking>"), "b\n</thinking>\nit is 3"),
        ("<think>\n\n</think>\n\n", "it is 3", "it is 3"),
        ("<think>\n\n</think>\n\n", "<think>\n\n</think>\n\nit is 3", "it is 3"),
        ("", THOUGHT, THOUGHT),
        ("", "it is 3", "it is 3"),
        ("<answer>", "it is 3", "it is 3"),  # no thought
        ("◁think▷", "◁think▷b◁/think▷it is 3", "b◁/think▷it is 3"),
        ("[THINK]", "[THINK]b[/THINK]it is 3", "b[/THINK]it is 3"),
        ("<seed:think>\n", "<seed:think>\nb</seed:think>it is 3", "b</seed:think>it is 3"),
        ("<scratchpad>", "b</scratchpad>it is 3", "b</scratchpad>it is 3"),
        ("[think]", "[think]b", "[think]b"),
    ],
)
def test_a_thought_that_the_prompt_has_begun_is_not_begun_again(head, demonstration, learned):
    assert continued(demonstration, f"<|im_start|>assistant\n{head}", "row") == learned


@pytest.mark.parametrize(
    ("head", "demonstration", "what"),
    [
        ("<think>\n", "it is 3", "opens <think> before the demonstration, which has no </think>"),
        ("<think>\n", "<think>\nb", "opens <think> before the demonstration, which has no </think>"),
        ("<reasoning>\n", THOUGHT, "opens <reasoning>"),
        ("<think>\n\n</think>\n\n", THOUGHT, "the demonstration has a thought"),
        ("<think></think>", "b\n</think>\nit is 3", "the demonstration has a thought"),
    ],
)
def test_a_demonstration_that_does_not_go_on_from_its_prompt_is_a_row_error(head, demonstration, what):
    with pytest.raises(DataError, match=what) as caught:
        continued(demonstration, f"<|im_start|>assistant\n{head}", "row 7")
    assert caught.value.where == "row 7" and caught.value.remedy


def test_no_turn_of_a_conversation_begins_a_thought_that_its_head_has_begun(models, tmp_path):
    head = "<|im_start|>assistant\n"
    template = chat_template("qwen3").replace(head + "{% endif %}", head + "{{ '<think>\n' }}{% endif %}")
    folder, encoder = opened(models("qwen3"), tmp_path, template)
    asked, said = Message("user", "2+1?"), Message("assistant", THOUGHT)
    prompt = encoder.encode(Prompt("row", (asked, said, asked), demonstration=THOUGHT))
    for all_turns, turns in ((False, 1), (True, 2)):
        sample = encoder.demonstrate(prompt, all_turns=all_turns)
        read = folder.tokenizer.decode([*sample.prompt.token_ids, *sample.token_ids])
        shown = [folder.tokenizer.decode(each.token_ids) for each in sample.segments if each.by_policy]
        assert shown == ["b\n</think>\nit is 3<|im_end|>"] * turns
        assert "<think>\n<think>" not in read and read.count("<think>") == 2
    assert encoder.targets == "end with <|im_end|>; the prompt has <think>, and theirs is left out"


def test_a_row_without_a_demonstration_is_named(vision):
    with pytest.raises(DataError, match="no demonstration") as caught:
        vision.encoder.demonstrate(vision.prompts[0])
    assert caught.value.where == "text"


@pytest.mark.parametrize("text", ["<image>", "<image><image><image>", "no place for it <|image_pad|><|image_pad|>"])
def test_placeholders_that_do_not_fit_the_images_are_a_data_error(text, vision, picture):
    row = Prompt("row 7", (Message("user", text),), (picture(56, 56), picture(56, 56, 1)))
    with pytest.raises(DataError, match=r"image tokens? and \d images") as caught:
        vision.encoder.num_tokens(row)
    assert caught.value.where == "row 7"


def with_row(prompt, **fields):
    """The prompt with other fields in its row."""
    return replace(prompt, prompt=replace(prompt.prompt, **fields))


def encoded(setting, text, images=(), role="user"):
    return setting.encoder.encode(Prompt("row", (Message(role, text),), images))


def specials_of(setting, ids):
    """The special tokens among ids, in order, as transformers itself names them."""
    added = setting.folder.tokenizer.added_tokens_decoder
    return [str(added[i]) for i in ids.tolist() if i in added and added[i].special]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "qwen3_5"])
def test_a_placeholder_in_a_row_without_images_is_text_like_any_other(family, bench, picture):
    setting = bench(family)
    assert setting.folder.family.vision
    messages = (Message("user", "A <image>?"), Message("assistant", "No <image>."), Message("user", "<image><image>"))
    row = Prompt("row", messages, demonstration="So <image>, and <image>.")
    encoded, decode = setting.encoder.encode(row), setting.folder.tokenizer.decode
    said = encoded.token_ids.tolist()
    assert setting.folder.image_token_id not in said and setting.encoder.num_tokens(row) == len(said)
    assert decode(said).count("<image>") == 4 and not encoded.images
    assert decode(setting.encoder.demonstrate(encoded).segments[0].token_ids).startswith("So <image>, and <image>.")
    whole = setting.encoder.demonstrate(encoded, all_turns=True)
    assert decode(whole.segments[0].token_ids).startswith("No <image>.")
    assert decode(whole.token_ids).count("<image>") == 5 and setting.folder.image_token_id not in whole.token_ids
    with pytest.raises(DataError, match="4 image tokens and 1 image"):
        setting.encoder.encode(replace(row, images=(picture(56, 56),)))
    turns = (Message("user", "<image>?"), Message("assistant", "7"), Message("user", "Sure?"))
    shown = setting.encoder.encode(Prompt("row", turns, (picture(56, 56),), demonstration="Yes."))
    assert setting.folder.image_token_id in setting.encoder.demonstrate(shown, all_turns=True).prompt.token_ids


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_dataset_text_are_text(family, as_on_hub, bench, picture):
    setting = bench(family, as_on_hub)
    tokenizer = setting.folder.tokenizer
    names = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    assert len(names) > 2
    hostile = "7" + "<<|".join(names) + "".join(names) + names[0][:3] + names[0] + names[0][3:]
    images = (picture(56, 56),) if setting.folder.family.vision else ()
    place = "<image>" * len(images)
    plain, spelled = (encoded(setting, place + text, images) for text in ("7", hostile))
    assert specials_of(setting, spelled.token_ids) == specials_of(setting, plain.token_ids) != []
    as_role = setting.encoder.encode(Prompt("row", (Message("user" + names[0], "7"),)))
    assert specials_of(setting, as_role.token_ids) == specials_of(setting, encoded(setting, "7").token_ids)
    shown = tokenizer.decode(spelled.token_ids).replace("\u200b", "")
    assert hostile in shown  # nothing is lost for a reader
    assert spelled.prompt.messages[0].content == place + hostile  # nor for a reward


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_text_stays_as_it_is(family, bench):
    setting = bench(family)
    text = "a < b | <b>bold</b> <think> </think> <|not a token|> < |im_end| > {{ 7*7 }} {% raw %} \u200b <video>"
    text = text if setting.folder.family.vision else text + " <image>"  # which opens nothing in a text model
    if "<video>" in setting.folder.tokenizer.get_vocab():  # a special token here
        text = text.replace("<video>", "")
    prompt = encoded(setting, text)
    assert text in prompt.text
    assert text in setting.folder.tokenizer.decode(prompt.token_ids)


def test_marks_of_turns_that_a_tokenizer_does_not_call_special_are_found(bench):
    from copy import deepcopy

    from tokenizers import AddedToken

    tokenizer = deepcopy(bench("qwen2").folder.tokenizer)
    tokenizer.add_tokens([AddedToken("<｜User｜>", special=False), AddedToken("<answer>", special=False)])
    found = special_tokens(tokenizer)
    assert found["<｜User｜>"] == tokenizer.convert_tokens_to_ids("<｜User｜>")
    assert "<answer>" not in found and "<|im_end|>" in found


@pytest.mark.parametrize("token", ["<|im_end|>", "<|image_pad|>"])
def test_a_demonstration_with_a_special_token_is_a_row_error(token, vision):
    with pytest.raises(DataError, match="demonstration holds special tokens") as caught:
        vision.encoder.demonstrate(with_row(vision.prompts[0], demonstration=f"7{token}"))
    assert caught.value.where == "text" and token in caught.value.possible


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_an_image_row_is_refused_by_a_text_model(family, bench, picture):
    row = Prompt("row 7", (Message("user", "<image>what?"),), (picture(56, 56),))
    with pytest.raises(DataError, match="reads text only"):
        bench(family).encoder.encode(row)


@pytest.mark.parametrize("role", ["system", "user"])
def test_half_of_a_character_is_a_row_error(role, vision):
    half = "\ud800"
    row = Prompt("row 7", (Message(role, f"7 {half}"), Message("user", "what?")))
    demonstration = with_row(vision.prompts[0], id="row 7", demonstration=f"so {half}")
    calls = (vision.encoder.num_tokens, row), (vision.encoder.encode, row), (vision.encoder.demonstrate, demonstration)
    for call, given in calls:
        with pytest.raises(DataError, match=r"U\+D800, half of a character") as caught:
            call(given)
        assert caught.value.where == "row 7"
    assert vision.encoder.num_tokens(replace(row, messages=(Message(role, "7 \U0001f600"),))) > 0
