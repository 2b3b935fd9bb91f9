"""The model card of an exported folder: README.md, whose YAML the hub reads, and which people read on the hub.

It says what the weights began from, what they learned from, with which algorithm and rewards, how accuracy went, the
whole config, and how plain transformers loads them. Nothing in it names a path of this machine or a secret.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mmrl.commands.export.usage import usage
from mmrl.config.evaluation_names import sets_of
from mmrl.data.hub import redactor
from mmrl.errors import ConfigError, DataError, MMRLError, plural
from mmrl.runs.checkpoints import Checkpoint
from mmrl.runs.disk import sha256
from mmrl.runs.files import read_records_back, replace_file
from mmrl.runs.history import read_metrics
from mmrl.system.redaction import remember_secrets, without_paths, without_secrets
from mmrl.system.version import __version__
from mmrl.token_columns import CRITIC

CARD = "README.md"
PROVENANCE = "mmrl.json"
ADAPTER = "adapter_config.json"
ROWS = 12
"""Most steps in the table of a curve."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME."""
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
"""A model's folder in the hub's cache."""
_FILES = {".json", ".jsonl", ".parquet", ".csv", ".tsv", ".arrow", ".py", ".yaml", ".txt"}
"""Ends of names of files, which names on the hub do not have."""
_ACCURACY = re.compile(r"eval/(?:.+/)?accuracy")


class BaseModel(NamedTuple):
    """The model that training began from: its name, its commit, and whether the hub has it by that name."""

    name: str
    commit: str | None
    is_public: bool

    @classmethod
    def of(cls, name: str, fingerprint: str = "") -> BaseModel:
        """The base that a config or an adapter names.

        Args:
            fingerprint: The commit that a run used; any other text if it used a folder.
        """
        if found := _SNAPSHOT.search(name):
            return cls(f"{found[1]}/{found[2]}", found[3], True)
        if re.fullmatch("[0-9a-f]{40}", fingerprint) and HUB_NAME.fullmatch(name):
            return cls(name, fingerprint, True)
        return cls(Path(name).name, None, False)

    @property
    def facts(self) -> dict[str, str]:
        """For mmrl.json."""
        return {"name": self.name, "commit": self.commit} if self.commit else {"name": self.name}


def is_edited(folder: Path) -> bool:
    """True if the card of an exported folder is another one than the export, or its last push, has written."""
    written = json.loads((folder / PROVENANCE).read_text(encoding="ascii")).get("card_sha256")
    return bool(written != sha256(folder / CARD))


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The card of a folder that an export has written.

    Attributes:
        checkpoint: The checkpoint whose weights the folder has; None if they are no run's.
        base: The model that they began from; None if it is not known.
        folder: The folder, with its mmrl.json.
    """

    checkpoint: Checkpoint | None
    base: BaseModel | None
    folder: Path

    def text(self, name: str, licence: Mapping[str, str]) -> str:
        """The card, which calls the model by a name that transformers loads it by.

        Args:
            licence: The base's ``license``, and ``license_name`` and ``license_link`` if it has them.
        """
        facts = json.loads((self.folder / PROVENANCE).read_text(encoding="ascii"))
        is_adapter = (self.folder / ADAPTER).is_file()
        record = self.checkpoint.read_state("run.json") if self.checkpoint else None
        config = without_paths(without_secrets(record["config"])) if record else {}
        remember_secrets(record["config"] if record else {})  # they may stand in other keys too, such as an address
        loading = usage(
            name,
            is_adapter=is_adapter,
            reads_images=facts["reads_images"],
            scores=facts.get("scores", False),
            options=config["data"].get("template_options") if config else None,
            has_own_template=bool(config and config["model"].get("chat_template")),
        )
        title = name.rpartition("/")[2]
        parts = [f"# {title}", self._summary(facts, is_adapter), "## Load it", f"```python\n{loading}```"]
        if record and self.checkpoint:
            parts += ["## Training", _table(("", ""), list(self._training(record, config, facts)))]
            parts += [*_curves(self.checkpoint), "## Config", _config(config)]
        metadata = self._metadata(config, is_adapter, facts, record) | dict(licence)
        header = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
        return redactor()(f"---\n{header}---\n\n" + "\n\n".join(parts) + "\n")

    def write(self, name: str, licence: Mapping[str, str]) -> None:
        """Write the card as ``text`` has it, and its hash into mmrl.json, by which ``is_edited`` knows it.

        A card that says this already stays as it is.
        """
        card, provenance = self.folder / CARD, self.folder / PROVENANCE
        text = self.text(name, licence)
        if card.is_file() and card.read_text(encoding="utf-8") == text:
            return
        facts = json.loads(provenance.read_text(encoding="ascii"))
        facts["card_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        replace_file(card, text)
        replace_file(provenance, json.dumps(facts, indent=2) + "\n")

    @property
    def _began_in(self) -> Path:
        """The working folder of the run's last attempt, which paths of its data count from."""
        assert self.checkpoint is not None, "these weights are no run's"
        with suppress(MMRLError, OSError):
            attempts = read_records_back(self.checkpoint.path.parents[1] / "attempts.jsonl")
            return Path(next((str(each["folder"]) for each in attempts if "folder" in each), "."))
        return Path()

    def _metadata(
        self, config: Mapping[str, Any], is_adapter: bool, facts: Mapping[str, Any], record: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The hub's keys, which find the model by its base, its data and its use."""
        found: dict[str, Any] = {}
        if self.base and self.base.is_public:
            found["base_model"] = self.base.name
            found["base_model_relation"] = "adapter" if is_adapter else "finetune"
        found["library_name"] = "peft" if is_adapter else "transformers"
        writes = "image-text-to-text" if facts["reads_images"] else "text-generation"
        found["pipeline_tag"] = "text-classification" if facts.get("scores") else writes
        if record and (names := list(dict.fromkeys(_hub_datasets(record["config"], self._began_in)))):
            found["datasets"] = names
        algorithm = [_plain_name(config["algorithm"]["name"])] if config else []
        role = [CRITIC] if facts.get("role") == CRITIC else []
        found["tags"] = ["mmrl", *algorithm, *role, *(["lora"] if is_adapter else [])]
        return found

    def _summary(self, facts: Mapping[str, Any], is_adapter: bool) -> str:
        base = "" if self.base is None else f" of {_linked(self.base)}"
        kind = f"A LoRA adapter{base}" if is_adapter else f"Weights in {facts['dtype']}"
        if facts.get("role") == CRITIC:
            what = "A critic: its score at a token is the return that it expects of the policy from there on."
            kind = f"{what} {kind}"
        if not self.checkpoint:
            return f"{kind}, written by mmrl {__version__}."
        trained = "" if is_adapter or self.base is None else f" that began as {_linked(self.base)}"
        algorithm = _plain_name(facts["algorithm"])
        steps, version = plural(self.checkpoint.step, "step"), facts["trained_by"]["mmrl"]
        return f"{kind}{trained}, after {steps} of `{algorithm}` with mmrl {version}."

    def _training(
        self, record: Mapping[str, Any], config: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """The facts of a run that its readers ask for first, in pairs."""
        model, sampler, learner, trainer = (config[name] for name in ("model", "sampler", "learner", "trainer"))
        if self.base:
            yield "began from", _linked(self.base) + (f", commit `{self.base.commit[:12]}`" if self.base.commit else "")
        yield "algorithm", f"`{_plain_name(config['algorithm']['name'])}`{_options(config['algorithm'], ('name',))}"
        raw = record["config"]["data"]
        evaluated = ((f"evaluated on {name}".strip(), spec) for name, spec in sets_of(raw.get("eval")).items())
        given = [("learned from", raw["train"]), *(("", spec) for spec in raw.get("mix") or ())]
        for title, spec in [*given, *evaluated]:
            yield title, _dataset(spec, self._began_in)
        for reward in config.get("rewards") or ():
            yield "reward", f"`{_plain_name(reward['name'])}` x {reward.get('weight', 1)}"
        if config.get("environment"):
            yield "environment", f"`{_plain_name(config['environment']['name'])}`"
        if config["data"].get("system_prompt"):
            yield "system prompt", f"`{config['data']['system_prompt']}`"
        if config["data"].get("prompt_template"):
            yield "prompts", "as `data.prompt_template` in the config writes them"
        yield (
            "a step",
            (
                f"{trainer['prompts_per_step']} prompts x {sampler['group_size']} completions of up to "
                f"{sampler['max_new_tokens']} tokens, temperature {sampler['temperature']}"
            ),
        )
        yield "learning rate", f"{learner['lr']}, {learner['schedule']}"
        if lora := model.get("lora"):
            yield "adapters", f"rank {lora['rank']}, alpha {lora['alpha']}, on {', '.join(lora['targets'])}"
        if model.get("quantize"):
            yield "quantised", f"the adapted weights, in 4 bits ({model['quantize']})"
        if model.get("freeze"):
            yield "frozen", ", ".join(model["freeze"])
        yield "seed", str(trainer["seed"])
        by = ", ".join(f"{name} {version}" for name, version in facts["exported_by"].items())
        yield "versions", f"trained by mmrl {facts['trained_by']['mmrl']}; written by {by}"


def _curves(checkpoint: Checkpoint) -> Iterator[str]:
    """The table of held-out accuracy, or of the reward where nothing was evaluated, up to the checkpoint's step."""
    with suppress(MMRLError):  # an older or damaged history does not stop an export
        metrics = {step: each for step, each in _history(checkpoint).items() if step <= checkpoint.step}
        names = list(dict.fromkeys(name for each in metrics.values() for name in each if _ACCURACY.fullmatch(name)))
        title = "Held-out accuracy by step" if names else "Reward of the completions by step"
        names = names or ["reward/mean"]
        steps = [step for step, each in metrics.items() if any(name in each for name in names)]
        if steps:
            yield f"## {title}"
            shown = [steps[i * (len(steps) - 1) // (ROWS - 1)] for i in range(ROWS)] if len(steps) > ROWS else steps
            rows = [(str(step), *(_number(metrics[step].get(name)) for name in names)) for step in shown]
            yield _table(("step", *names), rows)


def _history(checkpoint: Checkpoint) -> Mapping[int, Mapping[str, float]]:
    try:
        return read_metrics(checkpoint.path.parents[1])
    except OSError as error:
        raise DataError(str(error)) from error


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _config(config: Mapping[str, Any]) -> str:
    """The config as YAML that can be unfolded."""
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    head = "<details>\n<summary>Every key. Paths are reduced to their last part.</summary>"
    return f"{head}\n\n{fence}yaml\n{text}{fence}\n\n</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def _dataset(spec: Mapping[str, Any], began_in: Path) -> str:
    """A dataset's plugin, with the hub's name or its files, and the licence that its publisher states."""
    name = f"`{_plain_name(spec['name'])}`"
    if published := _hub_name(spec, began_in):
        name = f"[{published}](https://huggingface.co/datasets/{published})"
    shown = without_paths(without_secrets(spec))
    keys = [key for key in ("path", "subset", "split", "revision") if shown.get(key) not in (None, published)]
    parts = [f"{key} `{shown[key]}`" for key in keys]
    licence = _licence_of_dataset(spec)
    return ", ".join([name, *parts, *([f"licence {licence}"] if licence else [])])


def _hub_datasets(config: Mapping[str, Any], began_in: Path) -> Iterator[str]:
    specs = [config["data"]["train"], *(config["data"].get("mix") or ())]
    yield from (name for spec in specs if (name := _hub_name(spec, began_in)))


def _hub_name(spec: Mapping[str, Any], began_in: Path) -> str | None:
    """The hub's name of a dataset: its loader's, or its path's if the run saw no file or folder that is called so."""
    path = spec.get("path")
    if isinstance(path, str):
        is_name = HUB_NAME.fullmatch(path) and Path(path).suffix not in _FILES
        return path if is_name and not (began_in / path).parent.exists() else None
    origin = _fact(spec, "origin")
    return origin if HUB_NAME.fullmatch(origin) else None


def _licence_of_dataset(spec: Mapping[str, Any]) -> str:
    licence = _fact(spec, "licence")
    return "" if licence == "not stated" else licence


def _fact(spec: Mapping[str, Any], name: str) -> str:
    """A fact of the dataset that a loader is made for; empty if it is made for any, or is not installed here."""
    from mmrl.plugin_host.registry import resolve

    with suppress(MMRLError, ImportError):
        facts = getattr(resolve("dataset", str(spec["name"])), "facts", None)
        return str(getattr(facts, name, ""))
    return ""


def _options(spec: Mapping[str, Any], left_out: Sequence[str]) -> str:
    """Options of a plugin that fit into a table's cell."""
    simple = {k: v for k, v in spec.items() if k not in left_out and isinstance(v, bool | int | float | str)}
    return "".join(f", {key} {value}" for key, value in simple.items())


def _plain_name(name: str) -> str:
    """A plugin's name without the file, the package or the distribution that it comes from."""
    return name.rpartition(":")[2]


def _linked(base: BaseModel) -> str:
    return f"[{base.name}](https://huggingface.co/{base.name})" if base.is_public else f"`{base.name}`"


def public_base(source: Path, base: str | None) -> BaseModel | None:
    """The base that an adapter's folder is to name, so that others can load it; None for a whole model.

    Args:
        base: The user's name for it, in place of the folder's.

    Raises:
        ConfigError: It is a folder of this machine.
    """
    if not (source / ADAPTER).is_file():
        return None
    config = json.loads((source / ADAPTER).read_text(encoding="utf-8"))
    name = base or str(config["base_model_name_or_path"])
    found = BaseModel.of(name)
    if found.is_public:
        return found
    if HUB_NAME.fullmatch(name) and not Path(name).exists():
        return BaseModel(name, None if base else config.get("revision"), True)
    raise ConfigError(
        f"the adapter adapts a folder of this machine, {found.name}, which nobody can load by that name",
        where=str(source / ADAPTER),
        possible="a base on the hub",
        remedy="--base OWNER/NAME if the hub has it, else push it first; or leave out --adapter, which merges the two",
    )
