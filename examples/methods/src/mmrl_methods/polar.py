r"""POLAR: the reward of a policy discriminator (arXiv:2507.05197, section 3).

A POLAR model reads a question with two replies, a reference and the completion, and gives a number that is the higher,
the more alike the policies are that wrote them. It is asked for by a server, in the form of the released code:

    q \n reference <|reward|> q \n completion [UNUSED_TOKEN_130]

``q`` is the text of all turns of the prompt, one to a line. The number is a logit: it is comparable within a prompt, as
the reference is the same. Thinking in think tags is left out of the completion. Serve a released model with one of

    vllm serve internlm/POLAR-7B --trust-remote-code                                (server: vllm)
    python -m sglang.launch_server --model-path internlm/POLAR-7B --is-embedding    (server: sglang)
    lmdeploy serve api_server internlm/POLAR-7B                                     (server: lmdeploy)

The reference is the row's ``answer``, or the column that ``reference`` names: the reply of the policy that this one
should be like. A row without one is unscored.

Deviations from the released code, and why:

- It cuts a reply at 4096 of the model's tokens. Here a longer one, in characters, is unscored: a part is another reply.
- Marks of the form in the texts are broken up, so that a completion cannot end its own turn and write the reference's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from mmrl.interfaces import Reward
from mmrl.types import THOUGHT_NAMES, Rollout, Score, Unscored
from mmrl_methods.served import ServedConfig, answers, inert, unreadable

_BETWEEN, _END = "<|reward|>", "[UNUSED_TOKEN_130]"
_UNUSED = re.compile(r"\[(?=UNUSED_TOKEN_)")
_OPENED = re.compile(rf"<(?:{THOUGHT_NAMES})>", re.IGNORECASE)
_OPENED_AT_END = re.compile(rf"{_OPENED.pattern}\s*\Z", re.IGNORECASE)
_CLOSED = re.compile(rf"</(?:{THOUGHT_NAMES})>", re.IGNORECASE)
_LONGEST_TAG = 30
_PATHS = {"vllm": "/pooling", "sglang": "/classify", "lmdeploy": "/pooling"}


class POLAR(Reward):
    workers = 1
    groups_per_call = 16
    secrets = ("api_key_env",)

    class Config(ServedConfig):
        url: str
        """Address of the server, such as http://127.0.0.1:8000."""
        server: Literal["vllm", "sglang", "lmdeploy"] = "vllm"
        """The kind of the server, whose forms of requests differ."""
        reference: str | None = None
        """Column with the reference reply; null is the row's reference answer."""
        max_characters: int = Field(default=32_768, gt=0)
        """Longest text that is sent; a longer one is unscored."""

    config: Config

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score | Unscored | None]:
        scores: list[Score | Unscored | None] = [self._refused(rollout) for rollout in rollouts]
        places = [place for place, score in enumerate(scores) if score is None]
        texts = [self._text(rollouts[place]) for place in places]
        key = "text" if self.config.server == "sglang" else "input"
        path = _PATHS[self.config.server]
        given = await answers(self.config, path, [{key: [text]} for text in texts])
        for place, answer in zip(places, given, strict=True):
            scores[place] = self._read(answer)
        return scores

    def _refused(self, rollout: Rollout) -> Unscored | None:
        if not self._reference(rollout):
            column = self.config.reference
            return Unscored("has no reference reply" if column is None else f"has no reference in column {column!r}")
        length = len(self._text(rollout))
        if length > self.config.max_characters:
            return Unscored(f"reads at most {self.config.max_characters} characters, and there are {length}")
        return None

    def _reference(self, rollout: Rollout) -> str:
        column = self.config.reference
        found = rollout.answer if column is None else rollout.columns.get(column)
        return found if isinstance(found, str) else "" if found is None else str(found)

    def _text(self, rollout: Rollout) -> str:
        question = _plain("\n".join(message.content for message in rollout.messages))
        replies = self._reference(rollout), _reply(rollout)
        reference, completion = (f"{question}\n{_plain(reply)}" for reply in replies)
        return f"{reference}{_BETWEEN}{completion}{_END}"

    def _read(self, answer: Any) -> float:
        try:
            if self.config.server == "sglang":
                return float(answer[0]["embedding"][0])
            data = answer["data"][0]["data"]
            return float(data[-1][0] if self.config.server == "vllm" else data)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise unreadable(self.config.url + _PATHS[self.config.server], answer) from error


def _reply(rollout: Rollout) -> str:
    """The completion after its thinking, which the prompt may have opened; "" while it still thinks."""
    *thinking, reply = _CLOSED.split(rollout.text)
    is_open = _OPENED.search(reply) or (not thinking and _OPENED_AT_END.search(rollout.prompt.text[-_LONGEST_TAG:]))
    return "" if is_open else reply.strip() if thinking else reply


def _plain(text: str) -> str:
    return _UNUSED.sub("[ ", inert(text))
