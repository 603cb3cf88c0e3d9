"""Training on a machine that has nothing but torch, numpy, safetensors and tqdm, a rented GPU for instance.

    python -m models nanogpt --data tinyshakespeare.txt --out nanogpt

`workbench train` is the same and writes the model card too; here `workbench card DIR` does that afterwards, elsewhere.
"""

from __future__ import annotations

import argparse
import sys

from models import corpus, training
from models.config import PRESETS
from models.errors import WorkbenchError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m models", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("--data", help="a UTF-8 text; Tiny Shakespeare from the cache unless given")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--precision", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--resume", action="store_true", help="go on from the last save in the folder")
    parser.add_argument("--film", action="store_true", help="keep the preset's moments too, in OUT-film")
    options = {
        "iterations": int, "optimiser": str, "seed": int, "batch_size": int, "dropout": float, "dropout_attention": float,
    }  # fmt: skip
    for name, kind in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help="the preset's own unless given")
    given = parser.parse_args()
    config, recipe = training.with_options(*PRESETS[given.preset], **{name: getattr(given, name) for name in options})
    training.train(
        config, recipe, corpus.load(given.data), given.out, preset=given.preset, device=given.device, precision=given.precision,
        resume=given.resume, film=given.film,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except WorkbenchError as error:
        print(f"python -m models: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
