"""Say what a drafter folder is: layout, target, what is missing or suspicious, and which servers would load it.

python scripts/describe.py runs/smollm2-eagle3
python scripts/describe.py DIR --target smollm2-135m
"""

import argparse

from drafters.describe import describe
from drafters.errors import cli
from drafters.target import load_target


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Describe a drafter folder, ours or a published one.")
    p.add_argument("folder", metavar="DIR", help="folder of the drafter")
    p.add_argument("--target", help="hub id, folder or GGUF file: load the drafter for it too")
    return p


def main() -> None:
    """Prints the description."""
    args = parser().parse_args()
    describe(args.folder)  # a folder that is no drafter should fail before a target is loaded
    target = load_target(args.target, pack=False) if args.target else None
    print("\n".join(describe(args.folder, target)))


if __name__ == "__main__":
    cli(main)()
