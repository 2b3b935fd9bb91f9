"""Token ids that may be sampled, and that end a completion: the same for sampler, learner and reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmrl.data.chat_messages import MARK, QUESTION, special_tokens
from mmrl.data.templates import bounded
from mmrl.engine.network.family import Family


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's token ids.

    Attributes:
        size: Rows of the embedding, padding included.
        banned: Ids that are never sampled, ascending: vision tokens, and rows without a token.
        eos: Every id that ends a completion.
        pad: An id that is safe to fill with.
        end_of_turn: The id with which the chat template ends a turn of the assistant, one of ``eos`` whether or not the
            folder's configs say so; None if the template ends turns with no special token.
    """

    size: int
    banned: tuple[int, ...]
    eos: tuple[int, ...]
    pad: int
    end_of_turn: int | None = None

    @classmethod
    def of(
        cls, family: Family, model_config: Any, generation_config: Any, tokenizer: Any, end_of_turn: int | None = None
    ) -> Vocabulary:
        """Collect the ids from a model folder's transformers objects.

        Args:
            end_of_turn: See ``template_end``.
        """
        size = int(model_config.get_text_config().vocab_size)
        known = {i for i in tokenizer.get_vocab().values() if i < size}
        vision = {tokenizer.convert_tokens_to_ids(t) for t in family.banned_tokens if t in tokenizer.get_vocab()}
        banned = (set(range(size)) - known) | vision
        sources = (
            generation_config.eos_token_id,
            model_config.get_text_config().eos_token_id,
            tokenizer.eos_token_id,
            end_of_turn,
        )
        eos = {int(i) for source in sources for i in ids_of(source)} - banned
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)
        end = end_of_turn if end_of_turn in eos else None
        return cls(size, tuple(sorted(banned)), tuple(sorted(eos)), int(pad), end)


def template_end(renderer: Any, tokenizer: Any, options: Mapping[str, Any], *, in_parts: bool) -> int | None:
    """The id of the special token with which a chat template ends a turn of the assistant; None if it writes none.

    It follows the turn's text at the end of a conversation and before a question alike, so the mark that begins the
    next message is none.

    Args:
        renderer: The processor, or the tokenizer of a text model.
        options: Values of the template's variables.
        in_parts: True for a template that reads a message as a list of parts.
    """

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}

    turns = [message("user", QUESTION), message("assistant", MARK)]
    special, found = special_tokens(tokenizer), set[int | None]()
    for messages in (turns, [*turns, message("user", QUESTION)]):
        try:
            with bounded():
                text = str(renderer.apply_chat_template(messages, tokenize=False, **options))
        except Exception:  # the template is the model's: it may take one turn only, or run for ever
            continue
        after = text.partition(MARK)[2].lstrip()
        names = sorted(filter(after.startswith, special), key=len)
        found.add(special[names[-1]] if names else None)
    return found.pop() if len(found) == 1 else None


def ids_of(value: int | list[int] | None) -> list[int]:
    """The ids that a config gives as one, several or none."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
