"""The views of a step's prompts: images in another form, as the algorithm's needs have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from mmrl.config.sections import Config
from mmrl.data.order import view_seed
from mmrl.engine_api import PromptEncoder
from mmrl.errors import DataError
from mmrl.interfaces import Algorithm, View
from mmrl.interfaces.views import changed, strength_of
from mmrl.types import EncodedPrompt, ImageArray


class ViewMaker:
    """Makes the views of prompts.

    A view is the same in every process and in a run that goes on: its seed follows from the run's, the epoch, the
    prompt and the view's name.
    """

    def __init__(self, config: Config, algorithm: Algorithm, encoder: PromptEncoder) -> None:
        self._config, self._algorithm, self._encoder = config, algorithm, encoder
        self._views = algorithm.needs().views

    def __call__(self, prompt: EncodedPrompt, step: int) -> EncodedPrompt:
        """The prompt of an epoch with its views in a step; one without images has none.

        Raises:
            PluginError: A view fails, or changes the size of an image though it is scored.
            DataError: The prompt is too long with the images of a view.
        """
        if not (self._views and prompt.images):
            return prompt
        return replace(prompt, views={view.name: self._view(prompt, view, step) for view in self._views})

    def metrics(self, step: int) -> Mapping[str, float]:
        """``views/<name>_strength`` of the step."""
        return {f"views/{view.name}_strength": self._strength(view, step) for view in self._views}

    def _strength(self, view: View, step: int) -> float:
        return strength_of(self._algorithm, view, step, self._config.trainer.steps)

    def _view(self, prompt: EncodedPrompt, view: View, step: int) -> EncodedPrompt:
        strength, seed = self._strength(view, step), self._config.trainer.seed

        def change(place: int, image: ImageArray) -> ImageArray:
            rng = np.random.default_rng(view_seed(seed, prompt.epoch, prompt.id, view.name, place))
            return changed(self._algorithm, view, image, rng, strength)

        found = self._encoder.viewed(prompt, change)
        longest = self._config.data.max_prompt_tokens
        if len(found.token_ids) > max(longest, len(prompt.token_ids)):
            raise DataError(
                f"the prompt has {len(found.token_ids)} tokens with the images of view {view.name!r}",
                where=prompt.id,
                possible=f"data.max_prompt_tokens: {longest}",
                remedy="raise data.max_prompt_tokens, or let the view keep the size of images",
            )
        return found
