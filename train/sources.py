"""Where rows come from (JSONL files, the hub, the target's own text), and where encoded rows are kept."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value, load_dataset
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from drafters.errors import UserError
from train.recipe import Recipe

VERSION = 1
"""Part of every key: raise it when the same text is encoded differently than before."""


def read_rows(recipe: Recipe) -> Iterator[dict[str, Any] | None]:
    """Yields the rows of the recipe's source, at most `data.max_rows`; None is a line without a JSON object."""
    options = recipe.data
    if options.source.startswith("hub:"):
        rows: Iterator[dict[str, Any] | None] = iter(_hub(recipe))
    else:
        rows = (row for path in source_files(recipe) for row in read_jsonl(path))
    return islice(rows, options.max_rows)


def source_files(recipe: Recipe) -> list[Path]:
    """Returns the JSONL files of a local source.

    Raises:
        UserError: there are none.
    """
    if recipe.data.source == "synthesis":
        files = sorted(Path(recipe.synthesis.folder).glob("shard-*.jsonl"))
        if not files:
            raise UserError(
                f"synthesis.folder={recipe.synthesis.folder} holds no shard-*.jsonl; run scripts/prepare.py first"
            )
        return files
    path = Path(recipe.data.source)
    if not path.is_file():
        raise UserError(f"data.source={path} is no file; give the path of a .jsonl file, hub:ID or synthesis")
    return [path]


def content_key(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, settings: tuple[Any, ...]) -> str:
    """Returns a hash of all that encoded rows depend on: the text, the tokenizer, its template, and `settings`."""
    digest = hashlib.sha256(repr((VERSION, settings, tokenizer.chat_template)).encode())
    # The backend also holds merges, normalizer and pre-tokenizer; a slow tokenizer has only its vocabulary.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else repr(sorted(tokenizer.get_vocab().items()))
    digest.update(repr((vocabulary, tokenizer.special_tokens_map)).encode())
    if recipe.data.source.startswith("hub:"):
        digest.update(_hub(recipe)._fingerprint.encode())
    else:
        for path in source_files(recipe):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def cached(
    folder: str | Path, rows: Callable[[], Iterator[dict[str, Any]]], facts: Callable[[], dict[str, Any]]
) -> tuple[Dataset, dict[str, Any]]:
    """Returns the rows kept in `folder`, writing them first if they are not there.

    Args:
        folder: its name must change whenever `rows` would.
        rows: makes the rows, `input_ids` and `loss_mask` each.
        facts: what is to be kept beside them; called after the last row.

    Returns:
        The rows, memory-mapped, and the facts.
    """
    folder = Path(folder)
    if not (folder / "report.json").is_file():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
        scratch.mkdir(parents=True, exist_ok=True)
        features = Features({"input_ids": List(Value("int32")), "loss_mask": List(Value("bool"))})
        try:
            with ArrowWriter(path=str(scratch / "rows.arrow"), features=features) as writer:
                for row in rows():
                    writer.write(row)
                writer.finalize()
            (scratch / "report.json").write_text(json.dumps(facts(), indent=1))
            # All or nothing: a killed run leaves no folder that looks complete.
            shutil.rmtree(folder, ignore_errors=True)
            scratch.replace(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return Dataset.from_file(str(folder / "rows.arrow")), json.loads((folder / "report.json").read_text())


def read_jsonl(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the objects of a JSONL file; None is a line that holds none."""
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # no JSON, nested without end, or not UTF-8; the caller counts it
                row = None
            yield row if isinstance(row, dict) else None


def _hub(recipe: Recipe) -> Dataset:
    name, split = recipe.data.source.removeprefix("hub:"), recipe.data.split
    try:
        return load_dataset(name, split=split)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.source=hub:{name} (data.split={split}) can't be loaded: {reason}") from error
