"""A ragged batch, slopes of a loss by central differences, a server, and tiny models, for the tests of all methods."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmrl.testing import replay

Array = np.ndarray[Any, Any]
STEP = 1e-5


@pytest.fixture
def ragged() -> dict[str, Any]:
    """Seven rows of two groups, interleaved, and of a group of one; two rows have a hole, one cannot be scored."""
    rng = np.random.default_rng(7)
    lengths = np.array([3, 5, 2, 4, 1, 5, 4])
    mask = np.arange(5) < lengths[:, None]
    mask[1, 2] = mask[5, 0] = False
    old = -rng.exponential(1.0, mask.shape)
    return {
        "group_ids": np.array([4, 9, 4, 9, 4, 9, 7]),
        "rewards": np.array([1.0, 0.2, -0.5, 0.9, 0.3, 0.0, 0.6]),
        "reward_valid": np.array([1, 1, 1, 1, 1, 0, 1], bool),
        "truncated": np.array([0, 1, 0, 0, 0, 1, 0], bool),
        "response_mask": mask,
        "old_log_probs": old,
        "log_probs": np.minimum(old + rng.normal(0, 0.3, mask.shape), 0.0),
        "ref_log_probs": np.minimum(old + rng.normal(0, 0.3, mask.shape), 0.0),
        "rollout_log_probs": old,
        "entropy": rng.exponential(1.0, mask.shape),
    }


Slopes = Callable[..., Array]


@pytest.fixture
def slopes() -> Slopes:
    """Derivatives of an algorithm's loss in each log-prob, (B, T), by central differences."""

    def found(algorithm: str, batch: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Array:
        gradient = np.zeros(np.shape(batch["log_probs"]))
        for place in np.argwhere(np.asarray(batch["response_mask"], bool)):
            values = []
            for sign in (1, -1):
                moved = np.array(batch["log_probs"], np.float64)
                moved[tuple(place)] += sign * STEP
                values.append(replay(algorithm, {**batch, "log_probs": moved}, options=options).loss)
            gradient[tuple(place)] = (values[0] - values[1]) / (2 * STEP)
        return gradient

    return found


Answering = Callable[[Callable[[str, dict[str, Any]], Any]], AbstractContextManager[str]]


@pytest.fixture
def answering() -> Answering:
    """Starts a server on the loopback, and gives its address until the end of the block.

    It takes a function that makes the JSON answer of a path and a body; a number is the status of a refusal.
    """

    @contextmanager
    def started(answer: Callable[[str, dict[str, Any]], Any]) -> Iterator[str]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version, wbufsize, disable_nagle_algorithm = "HTTP/1.1", 2**16, True  # one packet an answer

            def do_POST(self) -> None:
                given = answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, text = (given, b"no") if isinstance(given, int) else (200, json.dumps(given).encode())
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()

    return started


WORDS = ("</s>", "?", "question:", "answer:", "+", "-", "#", *"abcdeQ123", ".", ",", ";")
WriteModel = Callable[..., Path]


@pytest.fixture(scope="module")
def write_model(tmp_path_factory: pytest.TempPathFactory) -> WriteModel:
    """Writes a random model of one layer, ``CausalLM`` or ``TokenClassification``, with a tokenizer of whole words."""

    def written(head: str, *, vocabulary: int = len(WORDS), **config: Any) -> Path:
        import torch
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers

        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = transformers.StableLmConfig(vocab_size=vocabulary, num_key_value_heads=2, **shape, **config)
        model = getattr(transformers, f"StableLmFor{head}")(made)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5)  # else all answers are nearly alike
        words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        folder = tmp_path_factory.mktemp(head)
        model.save_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="</s>")
        tokenizer.save_pretrained(folder)
        return folder

    return written
