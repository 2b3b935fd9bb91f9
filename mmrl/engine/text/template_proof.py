"""Proof that a chat template can be used: it ends, it takes the run's options, and it writes what it is given.

The model folder's own template, without options, is looked at for the first alone: rows tell the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.data.chat_messages import Filled
from mmrl.data.templates import bounded
from mmrl.engine.network.template import OPTIONS, TemplateChoice
from mmrl.engine.text.chat_template import ChatTemplate
from mmrl.errors import ConfigError, DataError
from mmrl.types import IMAGE_PLACEHOLDER, Message

CONVERSATIONS = ("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool")
"""Roles of the conversations that are tried; a template need not take all of them."""
TEXT = 'What is "2 + 2" & <b>{{ x }}</b>, asked as number'
"""Begins each message: a template that escapes or fills texts changes it."""


def prove(template: ChatTemplate) -> None:
    """Fill the template with a few conversations; rows are not watched.

    Raises:
        ConfigError: The run's own template fails on all of them, or loses a text or an image; or the template refuses
            an option.
        DataError: The model folder's template runs for ever.
    """
    choice = template.folder.template
    failures = [_failure(template, roles) for roles in CONVERSATIONS]
    if choice.options:
        _prove_options(template, failures)
    if choice.text is None:
        return
    if all(failures):
        raise _rejected(template, f"it fails: {failures[0]}", "correct the file")
    for roles in (roles for roles, failure in zip(CONVERSATIONS, failures, strict=True) if failure is None):
        _prove_texts(template, roles)


def _failure(template: ChatTemplate, roles: Sequence[str]) -> Exception | None:
    """The template's exception on a conversation of these roles."""
    try:
        with bounded():
            template.fill(_conversation(template, roles))
    except OverflowError as error:
        if template.folder.template.text is not None:
            raise _rejected(template, f"it fails: {error}", "correct the file") from error
        raise DataError(
            f"the model's chat template fails: {error}",
            where=template.folder.path,
            remedy="mend chat_template.jinja there, name another template (model.chat_template), or choose another "
            "model",
        ) from error
    except Exception as error:  # the template is the model's, or the user's: any exception is its own
        return error
    return None


def _prove_options(template: ChatTemplate, failures: Sequence[Exception | None]) -> None:
    """Raise ConfigError if the template fails only because of its options."""
    folder = template.folder
    plain = ChatTemplate(replace(folder, template=TemplateChoice(folder.template.text, file=folder.template.file)))
    for roles, failure in zip(CONVERSATIONS, failures, strict=True):
        if failure is not None and _failure(plain, roles) is None:
            given = ", ".join(f"{name}: {value}" for name, value in folder.template.options.items())
            raise ConfigError(
                f"the model's chat template refuses the options that it is given: {failure}",
                where=f"{OPTIONS}: {{{given}}}, {template.where}",
                possible=f"values that the template knows, of {', '.join(folder.template_options)}",
                remedy="change the option's value, or remove it",
            )


def _prove_texts(template: ChatTemplate, roles: Sequence[str]) -> None:
    """Raise ConfigError unless the run's own template writes each text of a conversation as it is, and each image."""
    text = template.fill(_conversation(template, roles))
    for number, role in enumerate(roles):
        if role != "tool" and f"{TEXT} {number}" not in text:
            remedy = f"write the content of messages of role {role}, unescaped, or raise_exception(...) for this role"
            raise _rejected(template, f"it drops or rewrites the text of a message of role {role}", remedy)
    if not template.folder.family.vision:
        return
    found, expected = template.tokenize(text, template.where).count(template.folder.image_token_id), len(roles)
    if roles == CONVERSATIONS[0] and found != expected:
        mark = template.names([template.folder.image_token_id])[0]
        remedy = f"write the model's own tokens of an image, with one {mark}, for a part of type image"
        raise _rejected(template, f"it makes {found} of {expected} image", remedy)


def _conversation(template: ChatTemplate, roles: Sequence[str]) -> list[Filled]:
    """Messages with a text that tells them apart; the first of the user's has an image if the model reads images."""
    image = IMAGE_PLACEHOLDER if template.folder.family.vision else ""
    texts = [f"{image if role == 'user' and number == 0 else ''}{TEXT} {number}" for number, role in enumerate(roles)]
    return [template.read(Message(role, text)) for role, text in zip(roles, texts, strict=True)]


def _rejected(template: ChatTemplate, what: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"the chat template cannot be used: {what}",
        where=template.where,
        possible="a template that writes each message's content as it is",
        remedy=f"{remedy}, or remove model.chat_template to keep the model's own",
    )
