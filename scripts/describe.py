"""Say what a drafter folder is: layout, target, what is missing or suspicious, and which servers would load it.

python scripts/describe.py runs/smollm2-eagle3
python scripts/describe.py DIR --target smollm2-135m
"""

import argparse

from drafters.describe import describe, is_broken
from drafters.errors import cli
from drafters.target import load_target


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Describe a drafter folder, ours or a published one.")
    p.add_argument("folder", metavar="DIR", help="folder of the drafter")
    p.add_argument("--target", help="hub id, folder or GGUF file: load the drafter for it too")
    return p


def main() -> int:
    """Prints the description; exit status 1 where the drafter can't be used."""
    args = parser().parse_args()
    describe(args.folder)  # a folder that is no drafter should fail before a target is loaded
    target = load_target(args.target, pack=False) if args.target else None
    lines = describe(args.folder, target)
    print("\n".join(lines))
    return int(is_broken(lines))


if __name__ == "__main__":
    cli(main)()
