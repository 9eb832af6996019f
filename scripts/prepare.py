"""Prepares a recipe's training text and shows what will be trained on.

    python scripts/prepare.py recipes/smollm2-medusa1.yaml --preview

With `data.source=synthesis` the target writes the text first; run it again to continue after an interruption.
"""

import argparse
from dataclasses import replace

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafters.errors import cli
from drafters.target import load_target
from train.data import EncodedData, load_rows
from train.recipe import load_recipe
from train.synthesis import synthesize


def preview(data: EncodedData, tokenizer: PreTrainedTokenizerBase, rows: int, console: Console) -> None:
    """Prints the first rows: what is trained on in green, the rest dim; in a file between ‹ and ›."""
    for number in range(min(rows, len(data))):
        row, text = data[number], Text()
        start, ids, mask = 0, row["input_ids"], row["loss_mask"]
        for stop in range(1, len(ids) + 1):
            # Spans of equal mask, not single tokens: one character may be spread over several.
            if stop == len(ids) or mask[stop] != mask[start]:
                span = str(tokenizer.decode(ids[start:stop]))
                span = f"‹{span}›" if mask[start] and not console.is_terminal else span
                text.append(span, style="bold green" if mask[start] else "dim")
                start = stop
        console.rule(f"row {number}: {len(ids)} tokens, {sum(mask)} trained on")
        console.print(text)


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("recipe", help="YAML file")
    p.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings put over the recipe's")
    p.add_argument(
        "--preview",
        action="store_true",
        help="only show which tokens of a few rows are trained on; where there is no text yet, some is written first",
    )
    p.add_argument("--rows", type=int, default=3, help="rows of the preview (default: 3)")
    return p


def main() -> None:
    """Prepares the data, prints the report and the preview."""
    args = parser().parse_intermixed_args()
    recipe = load_recipe(args.recipe, args.overrides)
    if args.preview:  # a first look needs no more than one shard of the target's own text
        recipe = replace(
            recipe, synthesis=replace(recipe.synthesis, tokens=1), data=replace(recipe.data, validation_rows=0)
        )
    options = recipe.target
    target = load_target(
        options.name, options.dtype, options.device, options.attention, trust_remote_code=options.trust_remote_code
    )
    if recipe.data.source == "synthesis":
        synthesize(recipe, target)
    train, validation, report = load_rows(
        recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions
    )
    console = Console(highlight=False)
    console.print(str(report), markup=False)
    if not args.preview:
        console.print(f"  {len(train):,} rows for training, {len(validation):,} for validation")
    else:
        preview(train, target.tokenizer, args.rows, console)


if __name__ == "__main__":
    cli(main)()
