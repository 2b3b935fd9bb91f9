"""Opening a model's folder, and what is said of one that cannot be opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.engine.network.family import FAMILIES
from mmrl.engine.network.folder import ModelFolder
from mmrl.engine.network.policy import load_policy
from mmrl.engine.refusals import window_refusal
from mmrl.errors import ConfigError, HubUnreachableError, ResourceError


def test_a_missing_folder_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no model folder at") as caught:
        ModelFolder.open(str(tmp_path / "nowhere"))
    assert caught.value.where == "model.path" and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("files", "what", "remedy"),
    [
        ([], "the folder is there, and has no config.json", "the folder is empty"),
        (["readme.md"], "the folder is there, and has no config.json", "check the path"),
        (["config.json", "pytorch_model.bin"], "has a config.json and no *.safetensors", "convert pytorch_model.bin"),
        (["checkpoints/step-000004/model/config.json"], "has no config.json", "checkpoints/step-000004/model"),
    ],
)
def test_a_folder_that_is_no_model_says_what_it_lacks(files, what, remedy, tmp_path):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        ModelFolder.open(str(tmp_path))
    assert what in caught.value.what and remedy in caught.value.remedy


def test_a_hub_id_that_cannot_be_reached_is_a_hub_error():
    with pytest.raises(HubUnreachableError, match="nobody/no-such-model is not, or not wholly, in the cache"):
        ModelFolder.open("nobody/no-such-model", "v1")


def test_a_folder_has_no_revisions(models):
    with pytest.raises(ConfigError, match="a folder has no revisions") as caught:
        ModelFolder.open(str(models("qwen2")), "v1")
    assert caught.value.where == "model.revision: v1"


def test_a_folder_is_fetched_as_it_is(models):
    folder = ModelFolder.open(str(models("qwen2")))
    assert folder.fetched() is folder and folder.commit is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_that_would_drop_images_is_refused_for_models_that_read_them(family, models, monkeypatch):
    import transformers

    path = str(models(family))
    folder = ModelFolder.open(path)
    body = transformers.MODEL_MAPPING[type(folder.config)]
    # As in transformers 5.16.1 to 5.17: a name that is not known is no error.
    monkeypatch.setattr(body, "forward", lambda self, input_ids=None, position_ids=None, **kwargs: None)
    if not folder.family.vision:
        assert ModelFolder.open(path).family is folder.family
        return
    version = transformers.__version__
    with pytest.raises(ResourceError, match=f"transformers {version} is too old .* it would drop them") as caught:
        ModelFolder.open(path, with_weights=False)
    assert caught.value.exit_code == 5 and path in caught.value.where
    assert "5.18" in caught.value.possible and "transformers>=5.18" in caught.value.remedy
    with pytest.raises(ResourceError, match="too old"):
        load_policy(folder, "cpu", "float32", freeze=(), temperature=1.0)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_with_a_missing_or_broken_file_is_a_config_error(name, content, models, tmp_path):
    folder = shutil.copytree(models("qwen2_5_vl"), tmp_path / "model")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        ModelFolder.open(str(folder))
    assert str(folder) in str(caught.value)


@pytest.fixture
def changed(models, tmp_path) -> Callable[..., Path]:
    """A copy of a family's folder with other values in its config.json, and without weights."""

    def copy(family: str, as_on_hub: bool = False, **values: Any) -> Path:
        folder = shutil.copytree(models(family, as_on_hub), tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))
        for weights in folder.glob("*.safetensors"):
            weights.write_bytes(b"")
        return folder

    return copy


@pytest.mark.parametrize(
    "model_type", ["gpt2", "gemma3", "gemma4_unified", "qwen2_moe", "qwen3_omni_moe", "qwen2_5_omni", "of_tomorrow"]
)
def test_a_family_that_is_not_supported_is_refused_whether_transformers_knows_it_or_not(model_type, changed):
    with pytest.raises(ConfigError, match=f"'{model_type}' are not supported") as caught:
        ModelFolder.open(str(changed("llama", model_type=model_type)))
    assert "qwen2_5_vl (Qwen2.5-VL)" in caught.value.possible


def test_a_language_model_that_a_family_may_not_have_is_refused(changed):
    with pytest.raises(ConfigError, match="'internvl' whose language model is 'qwen3_moe' are not supported") as caught:
        ModelFolder.open(str(changed("internvl", text_config={"model_type": "qwen3_moe"})))
    assert caught.value.possible == "language models of type qwen2, qwen3"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_that_cannot_be_packed_are_refused_by_their_type(family, changed):
    folder = changed(family, layer_types=["chunked_attention", "full_attention"])
    with pytest.raises(ConfigError, match="layers of type chunked_attention, which cannot be packed"):
        ModelFolder.open(str(folder))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}}, "mixtures of experts"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, "all tokens of the model see each other"),
    ],
)
def test_what_is_not_read_of_gemma4_is_refused_by_name(changes, message, changed, models):
    config = json.loads((models("gemma4") / "config.json").read_text())
    for key, value in changes.items():
        config[key] = (config[key] or {}) | value if key in config else value
    with pytest.raises(ConfigError, match=message):
        ModelFolder.open(str(changed("gemma4", **config)))


@pytest.mark.parametrize(
    ("kind", "name", "ahead"),
    [("cpu", "vllm", True), ("cpu", "hf", True), ("cpu", "vllm", False), ("cuda", "vllm", True)],
)
def test_a_sampler_that_cannot_mask_a_models_window_is_refused(kind, name, ahead, changed, models):
    text = json.loads((models("gemma4") / "config.json").read_text())["text_config"]
    text["use_bidirectional_attention"] = "vision" if ahead else None
    folder = ModelFolder.open(str(changed("gemma4", text_config=text)), with_weights=False)
    config: Any = SimpleNamespace(sampler=SimpleNamespace(name=name))
    error = window_refusal(folder, config, kind)
    assert (error is not None) == ((kind, name, ahead) == ("cpu", "vllm", True))
    assert error is None or (error.where, error.remedy) == ("sampler.name: vllm", "set sampler.name: hf")


def test_a_folder_without_sampling_defaults_opens(models, tmp_path):
    folder = shutil.copytree(models("qwen2_5_vl"), tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert ModelFolder.open(str(folder)).vocabulary.eos


def test_limits_of_pixels_are_limits_of_tiles_within_the_processors_own(bench):
    folder = bench("internvl").folder
    found = folder.images.processor_arguments(folder.image_sizes(2 * 56**2 - 5, 6 * 56**2 + 5))
    assert found == {"crop_to_patches": True, "min_patches": 2, "max_patches": 6}
    assert folder.images.processor_arguments(folder.image_sizes(0, 100 * 56**2))["max_patches"] == 12
    assert folder.image_tokens(56, 56) == 4 and folder.image_tokens(112, 168) == 7 * 4
    assert folder.images.largest_grid(100 * 56**2, 1000) == (13, 4, 4)
    assert folder.images.largest_grid(100 * 56**2, 21) == (5, 4, 4)


@pytest.mark.parametrize(("family", "factor"), [("qwen2_vl", 28), ("qwen3_vl", 28)])
def test_the_image_grid_is_patch_times_merge(family, factor, bench):
    assert bench(family).folder.images.factor == factor


def test_saved_files_open_again_with_the_same_vocabulary(vision, models, tmp_path):
    vision.folder.save_files(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(models("qwen2_5_vl") / name, tmp_path)
    again = ModelFolder.open(str(tmp_path))
    assert again.vocabulary == vision.folder.vocabulary
    assert again.tokenizer.chat_template == vision.folder.tokenizer.chat_template


LEFT = {
    "video_preprocessor_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.json", "modeling_mine.py", "LICENSE", "additional_chat_templates/tool_use.jinja",
}  # fmt: skip
CODE = "modeling_mine.py"
NOT_KEPT = {"mmrl.json", "pytorch_model.bin.index.json", "pytorch_model.bin", "README.md", "adapter_config.json"}


@pytest.mark.parametrize(
    ("family", "as_on_hub", "trusted"),
    [("qwen2_5_vl", False, False), ("qwen2_5_vl", True, True), ("internvl", True, False), ("qwen2", False, True)],
)
def test_a_saved_folder_has_the_files_of_its_source_and_no_others(family, as_on_hub, trusted, models, tmp_path):
    """Code that the run may not run is not handed on."""
    source, saved = shutil.copytree(models(family, as_on_hub), tmp_path / "source"), tmp_path / "saved"
    folder = replace(ModelFolder.open(str(source)), trust_remote_code=trusted)
    left, not_kept = (LEFT, NOT_KEPT) if trusted else (LEFT - {CODE}, NOT_KEPT | {CODE})
    for name in (*LEFT, *NOT_KEPT):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f'{{"written": "{name}"}}')
    saved.mkdir()
    folder.save_files(saved)
    before, after = (
        {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in (source, saved)
    )
    weights = {name for name in before if "safetensors" in name}
    assert before.keys() - after.keys() == not_kept | weights | {"config.json"}
    # No file of the installed transformers' own layout either: transformers 4.51 stops at its processor_config.json.
    assert after.items() <= before.items() and after.keys() >= left


@pytest.mark.parametrize("as_on_hub", [False, True], ids=["", "as on the hub"])
def test_a_saved_config_is_the_sources_with_another_element_type(as_on_hub, models, tmp_path):
    source = models("qwen2_5_vl", as_on_hub)
    ModelFolder.open(str(source)).save_config(tmp_path, "float16")
    before, after = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path))
    changed = {key for key in before if before[key] != after[key]}
    assert changed - {"text_config", "vision_config"} == {"torch_dtype" if as_on_hub else "dtype"}
    assert before.keys() == after.keys() and "float16" in (after.get("dtype"), after.get("torch_dtype"))


def test_a_folder_whose_source_is_gone_is_saved_from_memory(models, tmp_path):
    source, saved = shutil.copytree(models("qwen2_5_vl"), tmp_path / "source"), tmp_path / "saved"
    folder = ModelFolder.open(str(source))
    shutil.rmtree(source)
    saved.mkdir()
    folder.save_files(saved)
    shutil.copy(models("qwen2_5_vl") / "config.json", saved)
    assert ModelFolder.open(str(saved), with_weights=False).vocabulary == folder.vocabulary
