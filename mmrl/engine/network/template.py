"""The chat template that a run asks for: a file's in place of the model folder's own, and the options of either."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrl.config.problems import suggestion
from mmrl.config.sections import Config
from mmrl.errors import ConfigError

OPTIONS = "data.template_options"
_FILE = "chat_template.jinja"
_GIVEN = frozenset(
    {"messages", "raise_exception", "strftime_now", "loop", "self", "super", "caller", "varargs", "kwargs"}
)
"""Variables that transformers and Jinja give to each template, beside arguments and the special tokens' names."""


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """A run's choice of its chat template.

    Attributes:
        text: Jinja in place of the model folder's own template; None keeps that.
        options: Values of the template's variables, such as ``{"enable_thinking": False}``.
        file: The file of the text, as the config names it.
    """

    text: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    @classmethod
    def of(cls, config: Config) -> TemplateChoice:
        """The choice of a run's config: ``model.chat_template`` and ``data.template_options``.

        Raises:
            ConfigError: The file is missing, cannot be read, is empty, or is not valid Jinja.
        """
        file = config.model.chat_template
        options = {key: value for key, value in config.data.template_options.items() if value is not None}
        return cls(None if file is None else _read(file), options, file or "")

    @property
    def where(self) -> str:
        """The key and the file of a template of one's own; empty for the model folder's."""
        return "" if self.text is None else f"model.chat_template: {self.file}"

    def put_into(self, processor: Any, tokenizer: Any) -> None:
        """Give the text to a model's tokenizer, and to its processor if it has one."""
        if self.text is not None:
            processor.chat_template = tokenizer.chat_template = self.text

    def check_options(self, renderer: Any, tokenizer: Any, where: str) -> None:
        """Check that the template reads each option.

        Args:
            renderer: The processor, or the tokenizer of a text model.
            where: The model, for messages.

        Raises:
            ConfigError: It reads no variable of that name.
        """
        if not self.options:
            return
        known = options_of(renderer, tokenizer)
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"the model's chat template reads no option {name!r}",
                    where=f"{OPTIONS}.{name}, {self.where or where}",
                    possible=", ".join(known) or "none: this template has no options",
                    remedy=suggestion(name, known)
                    or "remove the option, or name a template that reads it (model.chat_template)",
                )

    def write(self, folder: Path) -> None:
        """Write the text into a saved model's folder, in place of all that its files say of a chat template.

        Readers differ in the file that they prefer, so there is one text and no other.
        """
        if self.text is None:
            return
        (folder / _FILE).write_text(self.text, encoding="utf-8")
        (folder / "chat_template.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
        for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
            file = folder / name
            settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            if "chat_template" in settings:
                del settings["chat_template"]
                # Old readers know the tokenizer's alone.
                kept = {"chat_template": self.text} if name.startswith("tokenizer") else {}
                file.write_text(json.dumps(settings | kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def options_of(renderer: Any, tokenizer: Any) -> list[str]:
    """Names of the variables that a chat template reads, and that a run may set, such as ``enable_thinking``.

    Args:
        renderer: The processor, or the tokenizer of a text model.
    """
    written = getattr(renderer, "chat_template", None) or tokenizer.chat_template
    parameters = (inspect.signature(each.apply_chat_template).parameters for each in (renderer, tokenizer))
    given, read = _GIVEN.union(_ENVIRONMENT.globals, *parameters), set[str]()
    for source in written.values() if isinstance(written, dict) else [written]:
        try:
            parsed = _ENVIRONMENT.parse(str(source))
        except (TemplateError, OverflowError, RecursionError):  # filling it tells what is wrong with it
            continue
        # Not ``find_undeclared_variables``: it leaves out those that a template gives a default, and counts some of its
        # own.
        first = {name.name: name.ctx for name in reversed(list(_names(parsed)))}
        own = {macro.name for macro in parsed.find_all(nodes.Macro)}
        read |= {name for name, way in first.items() if way == "load"} - own
    return sorted(name for name in read - given if not name.endswith("_token"))


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """The variables in a template, in the order in which they are read and set."""
    if isinstance(node, nodes.Name):
        yield node
    children = list(node.iter_child_nodes())
    value = node.node if isinstance(node, nodes.Assign) else node.iter if isinstance(node, nodes.For) else None
    for child in sorted(children, key=lambda each: each is not value):  # a value is read before its name is set
        yield from _names(child)


def _read(file: str) -> str:
    """The text of a template's file."""
    where, possible = f"model.chat_template: {file:.200}", "a file with a Jinja template, such as chat.jinja"
    if re.search(r"\{[{%#]|\n", file):
        raise ConfigError(
            "model.chat_template is the template itself, and not a file",
            where=where,
            possible=possible,
            remedy="write the template into a file, and name that",
        )
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template cannot be read: {getattr(error, 'strerror', None) or error}",
            where=where,
            possible=possible,
            remedy="check the path; a run that used it has it in model/chat_template.jinja of its checkpoints",
        ) from error
    if not text.strip():
        raise ConfigError("the chat template is empty", where=where, possible=possible)
    try:
        _ENVIRONMENT.parse(text)
    except (TemplateError, OverflowError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"the chat template is not valid Jinja: {error}",
            where=where if line is None else f"{where}, line {line}",
            possible=possible,
            remedy="correct the file, or remove model.chat_template to keep the model's own",
        ) from error
    return text


class _Generation(Extension):
    """``{% generation %}`` of transformers, which marks what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols", _Generation])
"""The environment in which transformers fills chat templates, as far as their syntax goes."""
