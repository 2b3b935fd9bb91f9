"""Opening a model's folder, and what is said of one that cannot be opened."""

from __future__ import annotations

import json
import shutil

import pytest

from mmrl.engine.folder import ModelFolder
from mmrl.errors import ConfigError, HubUnreachableError


def test_a_missing_folder_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no model folder at") as caught:
        ModelFolder.open(str(tmp_path / "nowhere"))
    assert caught.value.where == "model.path" and caught.value.exit_code == 2


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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_with_a_missing_or_broken_file_is_a_config_error(name, content, models, tmp_path):
    folder = shutil.copytree(models("qwen2_5_vl"), tmp_path / "model")
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        ModelFolder.open(str(folder))
    assert str(folder) in str(caught.value)


def test_an_unsupported_family_is_a_config_error(models, tmp_path):
    folder = shutil.copytree(models("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ConfigError, match="'gpt2' are not supported"):
        ModelFolder.open(str(folder))


def test_a_folder_without_sampling_defaults_opens(models, tmp_path):
    folder = shutil.copytree(models("qwen2_5_vl"), tmp_path / "model")
    (folder / "generation_config.json").unlink()
    assert ModelFolder.open(str(folder)).vocabulary.eos


@pytest.mark.parametrize(("family", "factor"), [("qwen2_vl", 28), ("qwen3_vl", 28)])
def test_the_image_grid_is_patch_times_merge(family, factor, bench):
    assert bench(family).folder.image_factor == factor


def test_saved_files_open_again_with_the_same_vocabulary(vision, models, tmp_path):
    vision.folder.save_files(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(models("qwen2_5_vl") / name, tmp_path)
    again = ModelFolder.open(str(tmp_path))
    assert again.vocabulary == vision.folder.vocabulary
    assert again.tokenizer.chat_template == vision.folder.tokenizer.chat_template
