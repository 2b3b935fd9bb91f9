"""MLflow, offline unless a server is named: RUN/mlruns/mlflow.db holds the run.

``mlflow ui --backend-store-uri sqlite:///RUN/mlruns/mlflow.db`` shows it; that command is in the full ``mlflow``
package, while ``mlflow-skinny`` with SQLAlchemy is all that a run needs. MLflow's own file store, RUN/mlruns without a
database, has been closed to new data by its authors. MLflow's reports on its use to its authors are off.

A run that goes on keeps its id, and so its place; steps after the checkpoint that it goes on from are there twice, as
MLflow forgets nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from mmrl.interfaces import PluginConfig, RunFacts, ShownRollout
from mmrl.types import FloatArray
from mmrl_trackers.services import NumberedTracker, pictures_of, require, text_of

PARAMS_PER_CALL = 100
KEY_CHARACTERS, PARAM_CHARACTERS = 250, 6000
"""Most characters that MLflow takes."""


class MLflow(NumberedTracker):
    """Every metric as a metric, alarms as tags, rollouts as artifacts, no histograms; only values that are finite."""

    class Config(PluginConfig):
        tracking_uri: str | None = None
        """An MLflow server, such as http://host:5000, whose login MLflow reads from MLFLOW_TRACKING_USERNAME and
        MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; RUN/mlruns/mlflow.db if not given."""
        experiment: str = "mmrl"
        """MLflow experiment; made if there is none."""
        run: str | None = None
        """The run's name; the run directory's if not given."""

    def check(self, run: RunFacts) -> Sequence[str]:
        require("mlflow.tracking", "mlflow")
        if self.config.tracking_uri is None:
            require("sqlalchemy", "mlflow")
        return ()

    def start(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of every table that it makes
        folder = (run_dir / "mlruns").absolute()
        uri, artifacts = self.config.tracking_uri, None
        if uri is None:
            folder.mkdir(exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        if self._id is not None and self._is_there(self._id):
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self.config.experiment)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(self.config.experiment, artifact_location=artifacts)
        )
        self._id = self._client.create_run(number, run_name=self.config.run or run_dir.name).info.run_id
        params = [Param(key, value) for key, value in params_of(config).items()]
        for first in range(0, len(params), PARAMS_PER_CALL):
            try:
                self._client.log_batch(self._id, params=params[first : first + PARAMS_PER_CALL])
            except MlflowException as error:  # RUN/config.yaml has them too; metrics go on
                warnings.warn(f"MLflow has not taken the config: {error}", stacklevel=2)
                break

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in finite.items()])

    def alarm(self, step: int, monitor: str, message: str) -> None:
        self._client.set_tag(self._id, f"alarm/{step:06d}/{monitor}"[:KEY_CHARACTERS], message[:PARAM_CHARACTERS])

    def evaluation(self, step: int, rollouts: Sequence[ShownRollout], histograms: Mapping[str, FloatArray]) -> None:
        for number, rollout in enumerate(rollouts, 1):
            name = f"rollouts/step_{step:06d}/{number}"
            self._client.log_text(self._id, text_of(rollout), f"{name}.txt")
            for index, picture in enumerate(pictures_of(rollout), 1):
                self._client.log_image(self._id, picture, f"{name}_image_{index}.png")

    def finish(self) -> None:
        self._client.set_terminated(self._id, "FINISHED")

    def _is_there(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise
        return True


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Every value by its dotted key, both in MLflow's form; keys that it cannot tell apart are numbered."""
    found: dict[str, str] = {}
    for key, value in _flat(config):
        name = _key(key)
        for number in count(2):
            if name not in found:
                break
            name = _key(key, f"_{number}")
        found[name] = value[:PARAM_CHARACTERS]
    return found


def _key(key: str, end: str = "") -> str:
    """A key in MLflow's characters, changed if it is a path that MLflow would write otherwise (``a//b``, ``../a``)."""
    parts = re.sub(r"[^\w\-. /:]", "_", key).split("/")
    path = "/".join(part for part in parts if part.strip(".")).lstrip(".") or "_"
    return path[: KEY_CHARACTERS - len(end)].rstrip("/") + end


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield key, str(value)
        return
    for name, item in items:
        yield from _flat(item, f"{key}.{name}" if key else str(name))
