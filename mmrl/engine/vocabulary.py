"""Token ids that may be sampled, and that end a completion: the same for sampler, learner and reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmrl.engine.family import Family


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's token ids.

    Attributes:
        size: Rows of the embedding, padding included.
        banned: Ids that are never sampled, ascending: vision tokens, and rows without a token.
        eos: Every id that ends a completion.
        pad: An id that is safe to fill with.
    """

    size: int
    banned: tuple[int, ...]
    eos: tuple[int, ...]
    pad: int

    @classmethod
    def of(cls, family: Family, model_config: Any, generation_config: Any, tokenizer: Any) -> Vocabulary:
        """Collect the ids from a model folder's transformers objects."""
        size = int(model_config.get_text_config().vocab_size)
        known = {i for i in tokenizer.get_vocab().values() if i < size}
        vision = {tokenizer.convert_tokens_to_ids(t) for t in family.banned_tokens if t in tokenizer.get_vocab()}
        banned = (set(range(size)) - known) | vision
        sources = (
            generation_config.eos_token_id,
            model_config.get_text_config().eos_token_id,
            tokenizer.eos_token_id,
        )
        eos = {int(i) for source in sources for i in _ids(source)} - banned
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)
        return cls(size, tuple(sorted(banned)), tuple(sorted(eos)), int(pad))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
