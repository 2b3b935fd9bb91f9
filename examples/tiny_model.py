"""Write a tiny random model with its tokenizer and processor, as a Hugging Face folder.

    python examples/tiny_model.py OUT [--family qwen2_5_vl] [--size tiny] [--seed 0] [--words left,right]
        [--gain 1]

Nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.engine.aids.tiny_model import SIZES, write_model
from mmrl.engine.network.family import FAMILIES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", default="qwen2_5_vl", choices=FAMILIES)
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", default="", help="further words of one token each, with commas between them")
    parser.add_argument("--gain", type=float, default=1.0, help="factor on the layers' random matrices")
    args = parser.parse_args()
    words = args.words.split(",") if args.words else ()
    options = {"size": args.size, "seed": args.seed, "words": words, "gain": args.gain}
    print(write_model(args.out, args.family, **options))


if __name__ == "__main__":
    main()
