"""Modules under the names that plugins of version 0.2.0 import."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
import warnings
from importlib import import_module

import numpy as np
import pytest

from mmrl.cluster.process import _show_warnings_once
from mmrl.errors import OldNameWarning
from mmrl.system.old_names import MOVED
from mmrl.types import Credit, EncodedPrompt, Prompt

SHOWN = {
    "mmrl.errors": "ConfigError DataError MMRLError PluginError ResourceError first_line",
    "mmrl.hub": "HubRepo",
    "mmrl.interfaces": """Aggregation AggregationMode Algorithm Arguments BASELINE_STEPS Curve DatasetFacts
        DatasetLoader Environment Finding KLEstimator Monitor Needs PluginConfig Reward RunFacts ShownRollout StepRecord
        StepView Tool ToolError Tracker tool""",
    "mmrl.interfaces.environments": "is_content",
    "mmrl.media": "MAX_IMAGE_BYTES MAX_IMAGE_PIXELS",
    "mmrl.ops.credit": """best_of_group greedy_rewards group_advantages grouped leave_one_out less_sequence_kl
        mixed_groups reward_to_go token_rewards valid_masks whiten""",
    "mmrl.ops.surrogate": """clipped_weight geometric_mean ppo_clip reinforce sequence_clip sequence_clip_per_token
        soft_gate""",
    "mmrl.policy_gradient": """ClipOptions DualClipOptions DynamicSamplingOptions KLOptions NotNegative PolicyGradient
        Positive StdOptions off_policy_warning""",
    "mmrl.templates": "PromptTemplate",
    "mmrl.testing": """alarms_of check_algorithm check_dataset check_environment check_monitor check_reward
        make_rollouts read_rollouts replay""",
    "mmrl.types": """ENVIRONMENT IMAGE_PLACEHOLDER Batch BoolArray Call Credit CreditedGroup EncodedPrompt FloatArray
        ImageRef IntArray Message Observation PackedTokens Prompt RawImage Rollout RolloutGroup Score ScoredGroup
        TokenLoss Turn""",
}
"""The names that the plugins and templates in the repository of 0.2.0 import."""


@pytest.mark.filterwarnings("ignore::mmrl.errors.OldNameWarning")
@pytest.mark.parametrize("module", SHOWN)
def test_what_the_plugins_of_0_2_0_import_is_there(module):
    found = import_module(module)
    assert [name for name in SHOWN[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_module_that_moved_is_the_same_under_its_old_name(old, new):
    sys.modules.pop(old, None)
    with pytest.warns(OldNameWarning, match=f"{old} is now {new}"):
        assert import_module(old) is import_module(new)
    assert import_module(new).__spec__.name == new


def test_importing_the_package_imports_none_of_them():
    program = "import sys, mmrl; print(sorted(name for name in sys.modules if name[:5] == 'mmrl.'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['mmrl.errors', 'mmrl.system', 'mmrl.system.old_names', 'mmrl.system.version']"


def test_a_credit_has_its_old_name_for_advantages():
    with pytest.warns(OldNameWarning, match=r"Credit\(values=...\) is now Credit\(advantages=...\)"):
        credit = Credit(values=np.ones(2), metrics={"a": 1.0})
    with pytest.warns(OldNameWarning, match=r"Credit.values is now Credit.advantages"):
        assert credit.values is credit.advantages
    assert dataclasses.replace(credit, keep=np.ones(2, bool)).metrics == {"a": 1.0}
    with pytest.raises(TypeError, match="needs advantages"):
        Credit()


def test_an_encoded_prompt_has_the_columns_of_its_row_by_their_old_names():
    row = Prompt("p", (), answer="7", columns={"unit": "cm"})
    prompt = EncodedPrompt(prompt=row, text="", token_ids=np.zeros(1, np.int32), images=())
    with pytest.warns(OldNameWarning, match=r"rollout.prompt.answer is now rollout.prompt.prompt.answer"):
        assert prompt.answer == "7"
    with pytest.warns(OldNameWarning):
        assert pickle.loads(pickle.dumps(prompt)).columns == {"unit": "cm"}
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = prompt.colour


def test_a_run_shows_a_warning_of_a_line_once_whoever_changes_filters(monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    _show_warnings_once()
    for name in ("old", "old", "older"):
        warnings.simplefilter("always", OldNameWarning)  # Python then forgets which it has shown
        warnings.warn(f"{name} is now new", OldNameWarning, stacklevel=1)
    assert shown == ["old is now new", "older is now new"]
