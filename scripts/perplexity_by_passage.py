"""Perplexity of models over passages of different kinds, as ratios to the first model.

python scripts/perplexity_by_passage.py SOURCE.gguf MODEL... [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from deepinfer_core.llm import LLM
from deepinfer_core.quantize.perplexity import perplexity, public_domain_text

RECITED = Path(__file__).parents[1] / "tests" / "fixtures" / "recited_documents.txt"


def passages() -> dict[str, str]:
    """Return prose that no small model knows by heart, and documents that many do."""
    prose, recited = public_domain_text(), RECITED.read_text(encoding="utf-8")
    austen, thoreau = prose.index("It is a truth"), prose.index("When I wrote the following")
    declaration, constitution = recited.index("When in the Course"), recited.index("We the People")
    return {
        "prose": prose,
        "prose: Darwin": prose[:austen],
        "prose: Austen": prose[austen:thoreau],
        "prose: Thoreau": prose[thoreau:],
        "recited": recited,
        "recited: Gettysburg Address": recited[:declaration],
        "recited: Declaration": recited[declaration:constitution],
        "recited: Constitution": recited[constitution:],
    }


def main() -> None:
    """Print a line for each model and passage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="the source first")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, base = [], {}
    for path in arguments.models:
        model = LLM(path, dtype="float32", device="cpu", max_model_len=1024)
        for name, text in passages().items():
            value, scored = perplexity(model.score, model.tokenizer.encode(text))
            ratio = value / base.setdefault(name, value)
            rows.append(
                {"model": Path(path).name, "passage": name, "tokens": scored, "perplexity": value, "ratio": ratio}
            )
            print(f"{Path(path).name:32} {name:28} {scored:5} tokens  {value:8.3f}  {ratio:6.3f}x", flush=True)
    if arguments.json is not None:
        meta = {"torch": torch.__version__, "device": "cpu", "dtype": "float32"}
        arguments.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
