"""What tests share: tiny models, prompts with images, one real engine, and a second opinion on log-probs."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

os.environ.update(
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    HF_HUB_OFFLINE="1",
    RAY_AUTH_MODE="disabled",
    RAY_worker_niceness="0",  # else ranks wait for the tests beside them
    OMP_NUM_THREADS="1",  # tiny layers: threads that wait for each other on busy cores cost a hundred times more
    TOKENIZERS_PARALLELISM="false",
    TORCHDYNAMO_DISABLE="1",
    TRANSFORMERS_VERBOSITY="error",
    VLLM_LOGGING_LEVEL="ERROR",
)

if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it has found none

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from mmrl.config.load import from_mapping
from mmrl.config.sections import Config
from mmrl.types import EncodedPrompt, Message, Prompt, RawImage, Rollout, Sample, Segment
from tests.cluster.process_ranks import ranks_forked_from
from tests.faults.harness import Nursery
from tests.proofs import RESULTS, Notary, note
from tests.warm_workers import Template, forked_from, freeze

if TYPE_CHECKING:
    import torch

    from mmrl.cluster.group import RankGroup
    from mmrl.data.images import MediaStore
    from mmrl.engine.network.family import Family
    from mmrl.engine.network.folder import ModelFolder
    from mmrl.engine.rank import RankEngine
    from mmrl.engine.spec import EngineSpec
    from mmrl.engine.text.encoding import Encoder

TEMPERATURE = 0.8
BANNED_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
BANNED_OF = {
    "internvl": (*BANNED_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "gemma4": ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>"),
}
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each file, by tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--store-durations", action="store_true", help=f"write the files' seconds to {DURATIONS.name}")
    parser.addoption("--store-proofs", action="store_true", help=f"write what was proven to {RESULTS.name}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--store-durations") and not is_worker(config):
        config.pluginmanager.register(Stopwatch(config))
    if config.getoption("--store-proofs") and not is_worker(config):
        config.pluginmanager.register(Notary())
    for module in ("torch", "vllm", "deepspeed", "transformers", "importlib", "swig"):
        for category in ("FutureWarning", "DeprecationWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{category}:{module}.*")
    config.addinivalue_line("filterwarnings", "ignore:builtin type .*:DeprecationWarning")


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def tier(config: pytest.Config) -> str:
    return "short" if "not full" in config.option.markexpr else "full"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells of a failure at once: a log may be cut before pytest's summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(
            f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", report.longreprtext[-2000:], sep="\n"
        )


def stored_durations() -> dict[str, dict[str, float]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers the files that take longest go first, so that none of them is begun when others end."""
    for item in items:
        note(item)
    if is_worker(config):
        known = stored_durations().get(tier(config), {})
        items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], 0.0))


class Stopwatch:
    """Adds up the files' seconds, and at the end stores those of the files that took one or more."""

    def __init__(self, config: pytest.Config) -> None:
        self._tier = tier(config)
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = {file: round(seconds) for file, seconds in self._seconds.most_common() if seconds >= 1}
        stored = stored_durations()
        stored[self._tier] = stored.get(self._tier, {}) | found
        DURATIONS.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def template_of_workers() -> Iterator[Template]:
    """The process that workers of rewards and environments are forked from."""
    template = Template()
    yield template
    template.close()


@pytest.fixture(scope="module", autouse=True)
def warm_workers(request: pytest.FixtureRequest, template_of_workers: Template) -> Iterator[None]:
    """Workers start in milliseconds, but for modules that are marked with ``fresh_workers``."""
    with nullcontext() if request.node.get_closest_marker("fresh_workers") else forked_from(template_of_workers):
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One worker at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def models(pytestconfig: pytest.Config) -> Callable[..., Path]:
    """The folder of a family's tiny model, plain or as on the hub; no test changes it.

    It is written when it is first asked for, once for all workers and later runs, until what writes it changes.
    """
    from mmrl.engine.aids import tiny_model, tiny_templates

    sources = [Path(__file__).with_name("as_on_hub.py"), Path(tiny_model.__file__), Path(tiny_templates.__file__)]
    age = runpy.run_path(str(sources[0]))["age"]
    parts = [path.read_bytes() for path in sources]
    parts += [importlib.metadata.version(name).encode() for name in ("torch", "transformers", "tokenizers")]
    folder = pytestconfig.rootpath / ".pytest_cache" / "models" / hashlib.sha256(b" ".join(parts)).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)

    @cache
    def write(family: str, as_on_hub: bool = False) -> Path:
        place = folder / ("as_on_hub" if as_on_hub else "plain") / family
        with locked(folder / "lock"):
            if not place.exists():
                place.parent.mkdir(exist_ok=True)
                shutil.rmtree(folder / "unfinished", ignore_errors=True)
                written = tiny_model.write_model(folder / "unfinished" / family, family)
                (age(written, family) if as_on_hub else written).rename(place)
        return place

    return write


@pytest.fixture(scope="session")
def published(pytestconfig: pytest.Config) -> Path:
    """The folder of a published model of 135 million parameters, as ``examples/published_model.py`` writes it.

    Tests that use it are skipped where the package index is not within reach. No test changes it.
    """
    examples = Path(__file__).parents[1] / "examples"
    script, lock = examples / "published_model.py", examples / "setup" / "published.lock"
    written = hashlib.sha256(script.read_bytes() + lock.read_bytes()).hexdigest()[:16]
    folder = pytestconfig.rootpath / ".pytest_cache" / "published" / written
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "lock"):
        done = subprocess.run([sys.executable, script, folder / "model"], capture_output=True, text=True, check=False)
    if done.returncode == runpy.run_path(str(script))["NO_PACKAGES"] and "HASHES" not in done.stderr:
        pytest.skip(f"the published model cannot be installed: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
    return folder / "model"


def noise(width: int, height: int, seed: int = 0) -> RawImage:
    """Noise of a given size, as an encoded image."""
    from PIL import Image

    pixels = np.random.default_rng([width, height, seed]).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return RawImage(buffer.getvalue(), f"{width}x{height} noise {seed}")


@pytest.fixture(scope="session")
def picture() -> Callable[..., RawImage]:
    """``noise``."""
    return noise


@dataclass(frozen=True)
class Bench:
    """A model folder with everything that turns prompts into samples.

    Attributes:
        prompts: Text; for a vision-language model also one image, and two images of other sizes.
    """

    folder: ModelFolder
    media: MediaStore
    encoder: Encoder
    prompts: tuple[EncodedPrompt, ...]

    def config(self, **sections: Any) -> Config:
        """A config for the model; sections as in YAML."""
        base: dict[str, Any] = {
            "model": {"path": self.folder.path, "dtype": "float32"},
            "data": {"train": {"name": "table"}, "max_prompt_tokens": 256},
            "algorithm": {"name": "grpo"},
            "sampler": {"max_new_tokens": 24, "temperature": TEMPERATURE},
            "learner": {"lr": 1e-3},
        }
        return from_mapping(base | {key: base.get(key, {}) | value for key, value in sections.items()})

    def samples(self, lengths: Sequence[int], seed: int = 0) -> list[Rollout]:
        """Random completions of the given lengths, prompt by prompt in turn."""
        rng = np.random.default_rng(seed)
        allowed = np.setdiff1d(np.arange(self.folder.vocabulary.size), self.folder.vocabulary.banned)
        samples = []
        for index, length in enumerate(lengths):
            segment = Segment(rng.choice(allowed, length).astype(np.int32), True, np.zeros(length, np.float32))
            prompt = self.prompts[index % len(self.prompts)]
            samples.append(Rollout(prompt, (segment,), index=0, text="", finish_reason="stop", weight_version=0))
        return samples

    def episode(self, prompt: int, *parts: int | tuple[str, Sequence[RawImage]], seed: int = 0) -> Rollout:
        """An episode after a prompt: random tokens of the policy where a part is a number, and else an observation.

        An observation is rendered as a conversation of its own.
        """
        rng = np.random.default_rng(seed)
        allowed = np.setdiff1d(np.arange(self.folder.vocabulary.size), self.folder.vocabulary.banned)
        segments = []
        for part in parts:
            if isinstance(part, int):
                ids, images, role = rng.choice(allowed, part).astype(np.int32), (), "assistant"
            else:
                shown = self.encoder.encode(Prompt("shown", (Message("user", part[0]),), tuple(part[1])))
                ids, images, role = shown.token_ids, shown.images, "user"
            segments.append(Segment(ids, isinstance(part, int), np.zeros(len(ids), np.float32), None, images, role))
        return Rollout(self.prompts[prompt], tuple(segments), index=0, text="", finish_reason="stop", weight_version=0)

    def episodes(self) -> list[Rollout]:
        """Ragged episodes of a vision-language model, with images in their observations or without.

        Some show several images, adjacent ones, the prompt's own or one that another episode has seen, or are the first
        to show any. Episodes of a prompt lie apart.
        """
        own, wide, tall = noise(56, 56), noise(84, 56, 1), noise(56, 84, 2)
        played: list[tuple[int, list[Any]]] = [
            (1, [4, ("<image>Look here.", [wide]), 3]),
            (0, [2, ("Here it is: <image>", [tall]), 6]),
            (1, [2, ("<image><image>", [tall, wide]), 5, ("No image.", []), 1]),
            (2, [3, ("<image>", [tall]), 7]),
            (1, [6]),
            (0, [5]),
            (1, [3, ("<image>once more", [own]), 1, ("<image>", [wide]), 1, ("<image>", [wide]), 4]),
            (0, [1, ("Yes.", []), 8]),
        ]
        return [self.episode(prompt, *parts, seed=seed) for seed, (prompt, parts) in enumerate(played)]


@pytest.fixture(scope="session")
def bench(
    models: Callable[..., Path], picture: Callable[..., RawImage], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bench]:
    """A family's ``Bench``."""

    @cache
    def build(family: str, as_on_hub: bool = False) -> Bench:
        from mmrl.data.images import MediaStore
        from mmrl.engine.network.folder import ModelFolder
        from mmrl.engine.text.encoding import Encoder

        folder = ModelFolder.open(str(models(family, as_on_hub)))
        media = MediaStore(tmp_path_factory.mktemp("media"), folder.image_sizes(3136, 50176))
        encoder = Encoder(folder, media)
        prompts = [Prompt("text", (Message("user", "what is 3+4?"),))]
        if folder.family.vision:
            pair = (picture(60, 90), picture(150, 110))
            prompts += [
                Prompt("one", (Message("user", "<image>What digit is this?"),), (picture(56, 56),)),
                Prompt("two", (Message("user", "<image> and <image>, what is the sum?"),), pair),
            ]
        return Bench(folder, media, encoder, tuple(encoder.encode(prompt) for prompt in prompts))

    return build


def tower_passes(model: torch.nn.Module, family: Family) -> list[int]:
    """How many patches (or tiles) each later pass through a model's vision tower has."""
    import torch

    passes: list[int] = []

    def note(_: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        if (places := options.get("pixel_position_ids")) is not None:  # images are padded
            passes.append(int((places[..., 0] >= 0).sum()))
            return
        passes.append(len(next(value for value in (*args, *options.values()) if isinstance(value, torch.Tensor))))

    tower = model.get_submodule(family.parts["vision"][0].rstrip("."))
    tower.register_forward_pre_hook(note, with_kwargs=True)
    return passes


class Plain:
    """A model folder in nothing but transformers: one unpacked sample at a time, the whole logits, default attention.

    Args:
        folder: Read with the Auto classes, as any user would.
        dtype: Name of torch's.
    """

    def __init__(self, folder: Path | str, dtype: str = "float32") -> None:
        import torch
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        vision = hasattr(config, "vision_config")
        auto = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
        self.model = auto.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.processor = (transformers.AutoProcessor if vision else transformers.AutoTokenizer).from_pretrained(folder)
        tokenizer = self.processor.tokenizer if vision else self.processor
        self.banned = list(range(len(tokenizer), config.get_text_config().vocab_size))
        words = BANNED_OF.get(config.model_type, BANNED_TOKENS) if vision else ()
        self.banned += tokenizer.convert_tokens_to_ids(list(words))

    def _inputs(self, text: str, images: Sequence[Any]) -> dict[str, torch.Tensor]:
        pictures = {"images": list(images)} if images else {}
        # The chat template has written all special tokens already.
        inputs = dict(self.processor(text=[text], **pictures, add_special_tokens=False, return_tensors="pt"))
        inputs.pop("token_type_ids", None)
        return inputs

    def logits(
        self, text: str, images: Sequence[Any], completion: Sequence[int], shown: Sequence[Any] = ()
    ) -> torch.Tensor:
        """(T + 1, V) logits, in float32 at least, that predict each completion token, and the one after; unmasked.

        Args:
            shown: The images whose tokens are in the completion.
        """
        import torch

        inputs = self._inputs(text, images)
        prompt_length = inputs["input_ids"].shape[1]
        tail = torch.tensor([list(map(int, completion))], dtype=torch.int64)
        fills = {
            "input_ids": tail,
            "attention_mask": torch.ones_like(tail),
            "mm_token_type_ids": (tail == getattr(self.model.config, "image_token_id", -1)).to(torch.int64),
        }
        if shown:
            others = self._inputs(self.processor.image_token * len(shown), shown)
            pixels = {name: values for name, values in others.items() if name not in fills}
            inputs |= {name: torch.cat([inputs[name], v]) if name in inputs else v for name, v in pixels.items()}
        for name in fills.keys() & inputs.keys():
            inputs[name] = torch.cat([inputs[name], fills[name]], 1)
        self.prompt_ids = inputs["input_ids"][0, :prompt_length].tolist()
        logits = self.model(**inputs).logits[0, prompt_length - 1 :]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def distribution(
        self,
        text: str,
        images: Sequence[Any],
        completion: Sequence[int],
        temperature: float = TEMPERATURE,
        shown: Sequence[Any] = (),
    ) -> torch.Tensor:
        """(T + 1, V) log-probs under the sampler's distribution."""
        logits = self.logits(text, images, completion, shown) / temperature
        return logits.index_fill(1, logits.new_tensor(self.banned).long(), float("-inf")).log_softmax(-1)

    def logprobs(self, sample: Sample, media: MediaStore, temperature: float = TEMPERATURE) -> torch.Tensor:
        """(T,) log-probs of a sample's completion, 0 where others wrote; the prompt is tokenised anew."""
        import torch

        images = [media.load(ref) for ref in sample.all_images]
        count = len(sample.prompt.images)
        table = self.distribution(
            sample.prompt.text, images[:count], sample.token_ids.tolist(), temperature, images[count:]
        )
        assert self.prompt_ids == sample.prompt.token_ids.tolist()
        found = table[:-1].gather(1, torch.from_numpy(sample.token_ids.astype(np.int64))[:, None])[:, 0]
        return torch.where(torch.from_numpy(sample.mask), found, torch.zeros(()))


@pytest.fixture(scope="session")
def mmrl() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as a user would, on one core, without this process's settings."""
    kept = ("PATH", "HOME", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
    household = Household({name: os.environ[name] for name in kept if name in os.environ})
    return lambda *words: household.run(*map(str, words), folder=Path.cwd())


@pytest.fixture(scope="session")
def warm_engines() -> Iterator[Template]:
    """A process that has imported vLLM and DeepSpeed, which takes longer than a tiny run; the ranks' template."""
    template = Template(["tests.warm_engines"])
    yield template
    template.close()


@pytest.fixture(scope="session")
def nursery(
    warm_engines: Template, models: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nursery]:
    """A fork of the template that forks itself for each run."""
    folder = tmp_path_factory.mktemp("nursery")
    with Nursery(folder, models("qwen2"), real=True, template=warm_engines) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def start_ranks(warm_engines: Template) -> Callable[[EngineSpec], RankGroup]:
    """``start_engine`` for the config of a cluster, whose ranks are forks of the template."""
    from mmrl.cluster.launch import start_engine

    def start(spec: EngineSpec) -> RankGroup:
        with ranks_forked_from(warm_engines):
            return cast("RankGroup", start_engine(spec))

    return start


@pytest.fixture(scope="session")
def warm_mmrl(nursery: Nursery) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``mmrl`` in a fork of the nursery."""
    return nursery.command


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Installs a package of one module, for the length of a test; returns the module's name."""

    def install(
        code: str, entries: str = "length = {module}:Length", name: str = "thirdparty", group: str = "rewards"
    ) -> str:
        site = tmp_path / name
        module = f"{name.replace('-', '_')}_module"
        info = site / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[mmrl.{group}]\n{entries.format(module=module)}\n")
        (site / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return install


@pytest.fixture(scope="session")
def compare() -> ModuleType:
    """``examples/compare_algorithms.py``."""
    path = Path(__file__).parents[1] / "examples" / "compare_algorithms.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plain() -> type[Plain]:
    return Plain


@pytest.fixture(scope="session")
def vision(bench: Callable[[str], Bench]) -> Bench:
    """The bench of the family that most tests use."""
    return bench("qwen2_5_vl")


@pytest.fixture(scope="session")
def start(vision: Bench) -> Iterator[Callable[..., RankEngine]]:
    """Builds a rank's engine in this process: as many learners and ``hf`` samplers as wanted, but one vLLM."""
    import deepspeed  # noqa: F401 - before the freeze

    import mmrl.engine.rank  # noqa: F401
    from mmrl.cluster.local import start_engine
    from mmrl.engine.spec import EngineSpec
    from mmrl.interfaces import Algorithm
    from mmrl_algorithms.grpo import GRPO

    freeze()
    sampled = []

    def build(
        with_sampler: bool = False,
        algorithm: Any = None,
        checkpoint: Path | None = None,
        bench: Bench = vision,
        **sections: Any,
    ) -> RankEngine:
        """``algorithm``: an object, or options of GRPO."""
        config = bench.config(**sections)
        sampled.append(with_sampler and config.sampler.name == "vllm")
        if not isinstance(algorithm, Algorithm):
            algorithm = GRPO(GRPO.Config.model_validate(algorithm or {}))
        return start_engine(
            EngineSpec(config, bench.folder, bench.media, algorithm, 2, with_sampler, checkpoint=checkpoint)
        )

    yield build
    import torch

    if torch.distributed.is_initialized() and not any(sampled):  # vLLM leaves the group by itself
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def engine(start: Callable[..., RankEngine]) -> RankEngine:
    """The one engine with vLLM; its weights change from test to test."""
    return start(with_sampler=True)


@dataclass
class Household:
    """Commands whose descendants can all be found again, by a mark in their environment.

    Attributes:
        variables: The environment but the mark; None for this process's.
    """

    variables: Mapping[str, str] | None = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def environment(self) -> dict[str, str]:
        return {**(os.environ if self.variables is None else self.variables), "MMRL_TEST_MARK": self.mark}

    def run(self, *arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        """``mmrl`` with these arguments, to its end."""
        return self.call("-m", "mmrl", *arguments, folder=folder, **environment)

    def call(
        self, *arguments: str, folder: Path, timeout_s: float = 480, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Python with these arguments, to its end."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = self.environment | environment
        with subprocess.Popen([sys.executable, *arguments], cwd=folder, env=env, **pipes) as process:
            try:
                output, errors = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()  # all of them: the pipes end with the last process that has them
                output, errors = process.communicate()
                pytest.fail(f"{arguments} took longer than {timeout_s:.0f} s:\n{output[-2000:]}\n{errors[-4000:]}")
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=self.environment, **options)

    def members(self) -> dict[int, str]:
        """Process id and command of every descendant that is alive."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def members_after(self, seconds: float) -> dict[int, str]:
        """The same, when none is left or the time is over."""
        deadline = time.monotonic() + seconds
        while (found := self.members()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def kill(self) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def household() -> Iterator[Household]:
    household = Household()
    yield household
    household.kill()


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of two processors; this process, large by now, could not fork one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        household, address = Household(), f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["start", "--head", "--port", address.partition(":")[2], "--num-cpus", "2", "--block"]
    words += ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false", "--disable-usage-stats"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    household.start(sys.executable, "-m", "ray.scripts.scripts", *words, **quiet)
    deadline = time.monotonic() + 60
    while subprocess.run([sys.executable, "-c", f"import ray; ray.init({address!r})"], **quiet).returncode:
        assert time.monotonic() < deadline, "Ray does not start"
    yield address
    household.kill()


@pytest.fixture
def fake_runs(tmp_path: Path, models: Callable[[str], Path]) -> Iterator[Any]:
    """Runs whose engine is ``tests/faults/fake_engine.py``, in this process: a ``tests.faults.runs.Runs``."""
    from tests.faults.runs import fake

    with fake(tmp_path, models("qwen2")) as runs:
        yield runs
