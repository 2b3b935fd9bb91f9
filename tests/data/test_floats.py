"""Columns of narrow floats, in each type that holds some, mean their shortest decimals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.api.rows import write_rows
from mmrl_datasets.table import Table

F, H = pa.float32(), pa.float16()
TYPES: dict[str, tuple[pa.DataType, Any]] = {
    "float32": (F, 0.1),
    "float16": (H, 0.1),
    "large and small": (F, 1.2e-7),
    "a whole number": (F, 3.0),
    "float64 is as it is": (pa.float64(), 0.1 + 0.2),
    "a list": (pa.list_(F), [0.1, None, 29.7]),
    "an empty list": (pa.list_(F), []),
    "a list of float16": (pa.list_(H), [0.1, 29.7]),
    "a large list": (pa.large_list(F), [0.1]),
    "a list of fixed size": (pa.list_(F, 2), [0.1, 0.3]),
    "a list of lists": (pa.list_(pa.list_(F)), [[0.1], [], None]),
    "a struct": (pa.struct({"x": F, "y": pa.string()}), {"x": 0.1, "y": "b"}),
    "a list of structs": (pa.list_(pa.struct({"x": F})), [{"x": 0.7}, None]),
    "a struct of lists": (pa.struct({"box": pa.list_(F)}), {"box": [0.1, 0.2]}),
}


@pytest.mark.parametrize("name", TYPES)
def test_a_narrow_float_is_its_shortest_decimal(name: str, tmp_path: Path) -> None:
    import datasets

    kind, value = TYPES[name]
    if name == "a list of float16":
        column = pa.array([np.array(value, np.float16).tolist()], pa.list_(pa.float64())).cast(kind)
    else:
        column = pa.array([np.float16(value) if kind == H else value], kind)
    rows = pa.table({"problem": ["?"], "answer": column})
    pq.write_table(rows, tmp_path / "t.parquet")
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    datasets.Dataset(rows).save_to_disk(tmp_path / "saved")
    for path in ("t.parquet", "t.arrow", "saved"):
        [prompt] = Table(Table.Config(path=str(tmp_path / path))).load()
        assert prompt.answer == value and prompt.columns["answer"] == value, path


def test_rows_of_a_program_keep_their_decimals(tmp_path: Path) -> None:
    box = np.array([[0.1, 0.25]], np.float32)
    path = write_rows([{"problem": "?", "answer": np.float32(0.1), "box": box, "half": np.float16(0.3)}], tmp_path)
    [prompt] = Table(Table.Config(path=str(path))).load()
    assert (prompt.answer, prompt.columns["box"], prompt.columns["half"]) == (0.1, [[0.1, 0.25]], 0.3)
