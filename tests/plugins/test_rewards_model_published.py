"""Published reward models: tiny folders of their layouts, and the rules by which their cards have them used."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mmrl.engine.aids.tiny_model import write_tokenizer
from mmrl.errors import ConfigError
from mmrl.types import EncodedPrompt, ImageRef, Message, Prompt, Rollout, Unscored
from mmrl_rewards.model import Model

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
TURN = "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
QWEN3 = f"{{% for m in messages %}}{TURN}{{% endfor %}}"
QWEN2_5 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    f"{{% for m in messages %}}{TURN}{{% endfor %}}<|endoftext|>"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)


def rollout(text="7", *, system="", question="What is 3 + 4?"):
    messages = (*((Message("system", system),) if system else ()), Message("user", question))
    prompt = EncodedPrompt(prompt=Prompt("p", messages), text="", token_ids=np.zeros(0, np.int32), images=())
    return Rollout(prompt, (), 0, text, "stop", 1)


def made(path, **options):
    return Model(Model.Config(path=str(path), device="cpu", **options))


def ids_of(reward, given):
    return reward._conversations.written(given, {}).token_ids


def write(folder, stem, template, *, heads=None, **tokens):
    """A folder as its publisher has written it: model, config.json and tokenizer."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from tokenizers.processors import TemplateProcessing

    folder.mkdir()
    tokenizer = write_tokenizer(folder, vision=False)
    if "bos_token_id" in tokens:  # a tokenizer that begins each text itself, as Llama's does
        tokenizer.bos_token = tokens["bos_token_id"]
        ids = [("<|object_ref_start|>", tokenizer.bos_token_id)]
        tokenizer._tokenizer.post_processor = TemplateProcessing("<|object_ref_start|> $A", special_tokens=ids)
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    ids = {name: tokenizer.convert_tokens_to_ids(value) for name, value in tokens.items()}
    config = getattr(transformers, f"{stem}Config")(**SIZES, vocab_size=len(tokenizer), num_labels=1, **ids)
    model = getattr(transformers, f"{stem}ForSequenceClassification")(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    if heads:
        weights = {name: value for name, value in model.state_dict().items() if name != "score.weight"}
        save_file(weights | heads, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_on_its_card(folder, given):
    """The lines of Skywork-Reward-V2's card: the template's text without the token that the tokenizer adds."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    turns = [{"role": m.role, "content": m.content} for m in given.messages if m.role != "system"]
    turns.append({"role": "assistant", "content": given.text})
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        text = text[len(tokenizer.bos_token) :]
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        return inputs["input_ids"][0].tolist(), model(**inputs).logits[0][0].item()


SKYWORK = {
    "Qwen3": (QWEN3, {"pad_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"}),
    "Llama": (LLAMA, {"bos_token_id": "<|object_ref_start|>", "pad_token_id": "<|endoftext|>"}),
}


@pytest.mark.parametrize("stem", SKYWORK)
def test_skywork_reward_v2_has_no_system_prompt_and_reads_16384_tokens(tmp_path, stem):
    template, tokens = SKYWORK[stem]
    folder = write(tmp_path / "rm", stem, template, **tokens)
    reward = made(folder, system_prompt=False, max_tokens=16384)
    given = [rollout(), rollout("It is eight. " * 60, system="Be brief."), rollout(" and" * 4400)]
    for each, score in zip(given, reward.score(given), strict=True):
        ids, expected = as_on_its_card(folder, each)
        assert ids_of(reward, each) == ids and score == pytest.approx(expected, abs=1e-4)
    assert len(ids_of(reward, given[2])) > 4096
    kept, left = ids_of(made(folder), given[1]), ids_of(reward, given[1])
    assert len(kept) > len(left)
    more = 16384 - len(ids_of(reward, rollout("7")))
    assert reward._too_long(len(ids_of(reward, rollout("7" + "7" * more)))) is None
    (unscored,) = reward.score([rollout("7" + "7" * (more + 1))])
    assert unscored == Unscored("reads at most 16384 tokens, and the conversation has 16385")


def worldpm(folder):
    import torch

    draw = torch.Generator().manual_seed(1)
    heads = {
        name: torch.randn(shape, generator=draw)
        for name, shape in (("0.weight", (32, 32)), ("0.bias", (32,)), ("2.weight", (1, 32)), ("2.bias", (1,)))
    }
    heads = {f"score.{name}": value for name, value in heads.items()}
    write(folder, "Qwen2", QWEN2_5, heads=heads, bos_token_id="<|endoftext|>", eos_token_id="<|endoftext|>")
    facts = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["Qwen2ForRewardModel"],
        "auto_map": {
            "AutoConfig": "configuration_qwen2_rm.Qwen2RMConfig",
            "AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel",
        },
    }
    (folder / "config.json").write_text(json.dumps(facts))
    for name in ("configuration_qwen2_rm", "modeling_qwen2_rm"):
        (folder / f"{name}.py").write_text("raise RuntimeError('code of the folder ran')")
    return heads


@pytest.mark.parametrize("pad", [None, "<|endoftext|>"])
def test_worldpm_has_an_empty_system_turn_and_two_layers_after_the_end_of_text(tmp_path, pad):
    import torch
    from torch.nn.functional import linear, relu
    from transformers import AutoTokenizer, Qwen2Model

    folder = tmp_path / "rm"
    heads = worldpm(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["pad_token_id"] = pad and tokenizer.convert_tokens_to_ids(pad)
    (folder / "config.json").write_text(json.dumps(config))
    reward = made(folder, system_prompt="")
    given = [rollout(), rollout("It is eight. " * 9), rollout("no", system="Be brief.")]
    body = Qwen2Model.from_pretrained(folder, dtype=torch.float32)
    for each, score in zip(given, reward.score(given), strict=True):
        ids = ids_of(reward, each)
        assert tokenizer.decode(ids).startswith("<|im_start|>system\n<|im_end|>\n<|im_start|>user\nWhat")
        assert ids[-1] == tokenizer.convert_tokens_to_ids("<|endoftext|>")
        with torch.no_grad():
            hidden_H = body(torch.tensor([ids])).last_hidden_state[0, -1]
            inner_H = relu(linear(hidden_H, heads["score.0.weight"], heads["score.0.bias"]))
            expected = linear(inner_H, heads["score.2.weight"], heads["score.2.bias"]).item()
        assert score == pytest.approx(expected, abs=1e-4)
    assert "You are a helpful assistant." in tokenizer.decode(ids_of(made(folder), given[0]))


def test_a_head_of_another_width_is_refused_with_both(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    template, tokens = SKYWORK["Qwen3"]
    folder = write(tmp_path / "rm", "Qwen3", template, **tokens)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(1, 48)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"its score\.weight is 1 x 48, and config\.json means 1 x 32"):
        made(folder).prepare()
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="its weights cannot be read"):
        made(folder).prepare()


def skywork_vl(source, folder):
    """Skywork-VL-Reward's layout, which LLaMA-Factory writes: a policy, and its score in a file beside it."""
    import torch
    from safetensors.torch import save_file

    shutil.copytree(source, folder)
    draw = torch.Generator().manual_seed(2)
    head = {"v_head.summary.weight": torch.randn(1, 128, generator=draw), "v_head.summary.bias": torch.tensor([0.25])}
    save_file(head, folder / "value_head.safetensors", metadata={"format": "pt"})
    return head


def test_a_policy_with_its_score_beside_it_becomes_a_reward_model_by_export(models, tmp_path):
    import torch
    from PIL import Image
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

    from mmrl.engine.aids.exporting import export_model

    folder, out = tmp_path / "skywork", tmp_path / "out"
    head = skywork_vl(models("qwen2_5_vl", as_on_hub=True), folder)
    with pytest.raises(ConfigError, match="ForConditionalGeneration with its score in value_head") as refused:
        made(folder)._folder.check()
    assert f"mmrl export {folder} OUT" in refused.value.remedy
    for dtype in (None, "float32"):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        export_model(folder, None, out, tmp_path / "media", dtype=dtype)
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["Qwen2_5_VLForSequenceClassification"], 1)
    assert not (out / "value_head.safetensors").exists()
    image = tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 112, 3), np.uint8)).save(image)
    seen = replace(rollout(question="<image>What is it?").prompt, images=(ImageRef("h", 112, 84, str(image)),))
    given = replace(rollout("A lamp."), prompt=seen)
    processor = AutoProcessor.from_pretrained(folder)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    turns = [
        {
            "role": "user",
            "content": [{"type": "image", "image": Image.open(image)}, {"type": "text", "text": "What is it?"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "A lamp."}]},
    ]
    inputs = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        hidden_H = model(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
    (score,) = made(out).score([given])
    expected = (head["v_head.summary.weight"] @ hidden_H).item()
    assert score == pytest.approx(expected, abs=1e-4)  # all scores lack the one bias of 0.25


def test_a_score_beside_a_policy_is_read_once(models, tmp_path, monkeypatch):
    import safetensors.torch

    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.network.policy import load_policy
    from mmrl.engine.network.reward_model import RewardLoading, is_reward_model

    folder, read = tmp_path / "skywork", []
    head = skywork_vl(models("qwen2_5_vl"), folder)
    original = safetensors.torch.load_file
    monkeypatch.setattr(safetensors.torch, "load_file", lambda file, *args: read.append(file) or original(file, *args))
    opened, options = ModelFolder.open(str(folder)), {"freeze": (), "temperature": 1.0}
    assert is_reward_model(folder)
    loaded = load_policy(opened, "cpu", "float32", **options, loading=RewardLoading(begins=False))
    load_policy(opened, "cpu", "float32", **options, with_weights=False, loading=RewardLoading(begins=False))
    assert [file.name for file in read if file.name.startswith("value_head")] == ["value_head.safetensors"]
    np.testing.assert_array_equal(loaded.score.detach(), head["v_head.summary.weight"])


def test_a_score_beside_a_policy_that_cannot_be_read_is_refused_by_name(models, tmp_path):
    import torch
    from safetensors.torch import save_file

    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.network.policy import load_policy
    from mmrl.engine.network.reward_model import RewardLoading, is_reward_model

    folder = tmp_path / "skywork"
    skywork_vl(models("qwen2_5_vl"), folder)
    assert is_reward_model(folder) and not is_reward_model(models("qwen2_5_vl"))
    save_file({"v_head.summary.weight": torch.zeros(1, 48)}, folder / "value_head.safetensors")
    with pytest.raises(ConfigError, match="the score has 1x48 weights, and the model 1 x 128"):
        load_policy(
            ModelFolder.open(str(folder)), "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading()
        )
    save_file({"v_head.weight": torch.zeros(1, 128)}, folder / "value_head.safetensors")
    with pytest.raises(ConfigError, match=r"has no v_head\.summary\.weight"):
        load_policy(
            ModelFolder.open(str(folder)), "cpu", "float32", freeze=(), temperature=1.0, loading=RewardLoading()
        )
    (folder / "value_head.safetensors").rename(folder / "value_head.bin")
    with pytest.raises(ConfigError, match=r"the score lies in value_head\.bin"):
        is_reward_model(folder)
    (folder / "value_head.bin").rename(folder / "value_head.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="the score of an adapter lies in value_head"):
        is_reward_model(folder)
