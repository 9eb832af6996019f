"""The training command.

Run: accelerate launch -m train recipes/smollm2-eagle3.yaml [section.key=value ...]
 or: python -m train recipes/smollm2-eagle3.yaml [section.key=value ...]
"""

import argparse
import os

from drafters.errors import cli
from train.recipe import load_recipe


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m train", description="Train a drafter by a recipe; continues an interrupted run."
    )
    p.add_argument("recipe", help="YAML file, see recipes/")
    p.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="put over the recipe's values")
    return p


def _use_all_cores() -> None:
    """`accelerate launch` gives a lone CPU process one thread; it means to share the cores among several processes."""
    import psutil
    import torch

    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) == 1
    if launched and not torch.cuda.is_available():
        torch.set_num_threads(psutil.cpu_count(logical=False) or torch.get_num_threads())


def main() -> None:
    """Loads the recipe and the target, and trains."""
    arguments = parser().parse_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides)  # before the slow imports: a typo answers at once

    # An entry point may hand the decoder to the trainer; nothing else in this package knows of it.
    from decode.validation import acceptance_length
    from drafters.target import load_target
    from train.loop import train

    _use_all_cores()
    options = recipe.target
    target = load_target(options.name, options.dtype, options.device, options.attention, options.trust_remote_code)
    train(recipe, target, acceptance_length)


run = cli(main)

if __name__ == "__main__":
    run()
