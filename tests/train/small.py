"""Small rows and recipes that the tests of training share."""

import json
from pathlib import Path

import torch
from datasets import Dataset

from drafters.target import Target
from train.data import EncodedData
from train.recipe import Recipe, recipe_from_dict


def encoded_rows(count: int, seed: int = 0, low: int = 12, high: int = 32, vocab: int = 512) -> list[dict]:
    """Random token ids of unequal lengths; what is supervised is a span of its own length in each row."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length, start = (int(torch.randint(a, b, (), generator=generator)) for a, b in ((low, high), (2, low - 2)))
        ids = torch.randint(20, vocab, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": [int(start <= t < length - 1) for t in range(length)]})
    return rows


def as_data(rows: list[dict], key: str = "rows") -> EncodedData:
    """The rows as `load_rows` would give them."""
    return EncodedData(Dataset.from_list(rows), key)


def small_recipe(folder: Path, kind: str = "eagle3", rows: int = 12, name: str = "run", **sections: dict) -> Recipe:
    """A recipe over random rows on disk: float32, every step logged, saved only at the end; sections go over it."""
    path = folder / f"rows-{rows}.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in encoded_rows(rows)))
    raw = {
        "output": str(folder / name),
        "target": {"device": "cpu", "dtype": "float32"},
        "drafter": {"kind": kind, "draft_vocab": 100},
        "data": {"source": str(path), "validation_rows": 3, "max_length": 64},
        "train": {
            "epochs": 2,
            "global_batch": 4,
            "micro_batch": 4,
            "mixed_precision": "no",
            "eval_every": 0,
            "log_every": 1,
            "save_every_seconds": 1e9,
        },
    }
    for section, values in sections.items():
        raw[section] = {**raw.get(section, {}), **values} if isinstance(values, dict) else values
    return recipe_from_dict(raw)


def target_hash(target: Target) -> str:
    """Changes when any weight of the target does."""
    return str([(name, weight.double().sum().item()) for name, weight in target.model.named_parameters()])


def metrics(recipe: Recipe) -> list[dict]:
    """What the run logged, without the clock."""
    lines = (Path(recipe.output) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]
