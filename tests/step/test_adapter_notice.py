"""The notice of young adapters."""

from __future__ import annotations

from mmrl.ops.metrics import ADAPTER_KEPT
from mmrl.step.adapter_notice import AdapterNotice


def test_a_run_is_told_once_that_little_of_its_adapters_is_left():
    told = list[tuple[str, dict[str, object]]]()
    notice = AdapterNotice("bfloat16", lambda kind, **fields: told.append((kind, fields)))
    for step, metrics in enumerate([{}, {ADAPTER_KEPT: 0.9}, {ADAPTER_KEPT: 0.27}, {ADAPTER_KEPT: 0.3}], start=1):
        notice.look(step, metrics)
    ((kind, fields),) = told
    assert kind == "adapters" and fields["step"] == 3 and fields["kept"] == 0.27
    message = str(fields["message"])
    assert message.startswith("step 3: 27% of the adapters' change is left after rounding to bfloat16")
    assert message.endswith("raise learner.lr if the share stays low")
