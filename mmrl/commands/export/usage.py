"""The lines of a model card with which plain transformers loads a model and asks it something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WHOLE = """\
from transformers import {model}, {processor}

model = {model}.from_pretrained("{place}", dtype="auto")
processor = {processor}.from_pretrained("{place}")
"""
_ADAPTER = """\
from peft import PeftConfig, PeftModel
from transformers import {model}, {processor}

base = PeftConfig.from_pretrained("{place}")
model = {model}.from_pretrained(base.base_model_name_or_path, revision=base.revision, dtype="auto")
model = PeftModel.from_pretrained(model, "{place}")
processor = {processor}.from_pretrained(base.base_model_name_or_path, revision=base.revision)
"""
_SCORED = """from transformers import AutoConfig, {processor}

from mmrl.score_head import sequence_classification_class

kind = sequence_classification_class(AutoConfig.from_pretrained("{place}"))
model = kind.from_pretrained("{place}", dtype="auto")
processor = {processor}.from_pretrained("{place}")
"""
_SCORED_ADAPTER = """\
from peft import PeftConfig, PeftModel
from transformers import {model}, {processor}

from mmrl.score_head import sequence_classification_class

base = PeftConfig.from_pretrained("{place}")
policy = {model}.from_pretrained(base.base_model_name_or_path, revision=base.revision, dtype="auto")
policy.config.num_labels = 1
model = sequence_classification_class(policy.config)(policy.config).to(policy.dtype)
model.model = policy.model  # this class would read the names of a policy's weights otherwise
model = PeftModel.from_pretrained(model, "{place}").base_model.model
processor = {processor}.from_pretrained(base.base_model_name_or_path, revision=base.revision)
"""
_BASES = "from_pretrained(base.base_model_name_or_path, revision=base.revision)"
_ASK = """\
content = {content}
messages = [{{"role": "user", "content": content}}]
inputs = processor.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"{options}
).to(model.device)
answer = model.generate(**inputs, max_new_tokens=256)
print(processor.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""


_ASK_FOR_SCORE = """content = {content}
messages = [{{"role": "user", "content": content}}, {{"role": "assistant", "content": {answer}}}]
inputs = processor.apply_chat_template(
    messages, tokenize=True, return_dict=True, return_tensors="pt"{options}
).to(model.device)
last = model.base_model(**inputs).last_hidden_state[:, -1]
print(model.score(last).item())
"""


def usage(
    name: str,
    *,
    is_adapter: bool,
    reads_images: bool,
    scores: bool = False,
    options: Mapping[str, Any] | None = None,
    has_own_template: bool = False,
) -> str:
    """Python that loads the model called ``name``, a hub's or a folder's, and prints an answer, or the score of one.

    Args:
        scores: True for a reward model.
        options: Those of the chat template, with which the model was trained.
        has_own_template: True if it was trained with another chat template than its base's.
    """
    classes = {
        "model": "AutoModelForImageTextToText" if reads_images else "AutoModelForCausalLM",
        "processor": "AutoProcessor" if reads_images else "AutoTokenizer",
    }
    asked = '[{"type": "image", "image": Image.open("picture.png")}, {"type": "text", "text": "What is it?"}]'
    content = asked if reads_images else '"What is 12 + 30?"'
    whole, adapter = (_SCORED, _SCORED_ADAPTER) if scores else (_WHOLE, _ADAPTER)
    loaded = (adapter if is_adapter else whole).format(place=name, **classes)
    if is_adapter and has_own_template:
        loaded = loaded.replace(f"{classes['processor']}.{_BASES}", f'{classes["processor"]}.from_pretrained("{name}")')
    picture = "from PIL import Image\n" if reads_images else ""
    given = "".join(f", {key}={value!r}" for key, value in (options or {}).items() if value is not None)
    answer = '[{"type": "text", "text": "A cat."}]' if reads_images else '"It is 42."'
    ask = _ASK_FOR_SCORE if scores else _ASK
    return picture + loaded + ask.format(content=content, answer=answer, options=given)
