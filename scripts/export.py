"""Write a trained drafter in the layout that a server loads, and check it from its files.

python scripts/export.py runs/smollm2-eagle3 --to vllm --out runs/exports/vllm
python scripts/export.py runs/smollm2-eagle3 --to hub --report runs/eval --out runs/exports/hub
"""

import argparse
import contextlib
import sys
from typing import Any

from drafters.adapter import ADAPTER
from drafters.card import publish, save_pretrained
from drafters.errors import UserError, cli
from drafters.export import DTYPES, export, fresh_folder
from drafters.files import CONFIG, read_folder, read_json
from drafters.locate import resolve_path
from drafters.readers import TAPS, read_checkpoint
from drafters.servers import HOT_TOKENS, SUPPORT, check_pair, launch
from drafters.target import load_target


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Export a drafter to a server's layout, or as a folder for the Hub.")
    p.add_argument("run", metavar="RUN_DIR", help="folder of the drafter")
    p.add_argument("--to", required=True, metavar="SERVER", help=f"one of {', '.join(SUPPORT)}, hub")
    p.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    p.add_argument("--target", help="hub id, folder or GGUF file; default: the one the drafter was trained for")
    p.add_argument("--dtype", default="float32", choices=tuple(DTYPES), help="of the written weights")
    p.add_argument("--report", metavar="DIR", help="hub: folder of an evaluation, whose figures the card states")
    p.add_argument("--push", metavar="REPO", help="hub: upload the folder there, as a private repository if it is new")
    return p


def main() -> None:
    """Exports, checks and says how to serve it."""
    args = parser().parse_args()
    if args.to != "hub" and (args.push or args.report):
        raise UserError("--push and --report belong to --to hub")
    fresh_folder(args.out)
    found = read_checkpoint(read_folder(args.run))
    if args.to != "hub":
        check_pair(args.to, found.kind, found.config, found.weights)  # before the target is loaded
    name = args.target or (found.meta.get("target") or {}).get("name") or found.meta.get("made_for")
    if not name:
        raise UserError(f"{args.run} does not say which target it is for; name it with --target")
    target = load_target(name, "float32", pack=False)
    if args.to == "hub":
        out = save_pretrained(args.run, args.out, target, args.report)
        _tell_limit(found.config, read_json(out / CONFIG))
        print(f"wrote {out} with its model card")
        if args.push:
            print(f"pushed to {publish(out, args.push)}")
        return
    out = export(args.run, args.to, args.out, target, args.dtype)
    _tell_limit(found.config, read_json(out / CONFIG))
    files = ", ".join(sorted(p.name for p in out.iterdir()))
    print(f"wrote {out} ({files}); names, shapes, origin, vocabulary and logits checked from the files")
    if (out / ADAPTER).is_dir():
        print(
            f"serve the target with {out / ADAPTER} merged into it: these heads were trained together with that adapter"
        )
    with contextlib.suppress(UserError):  # a converter's input has no launch line
        taps, mapped = found.config.get(TAPS) or target.default_taps(), (out / HOT_TOKENS).exists()
        print(launch(args.to, found.kind, resolve_path(name), out, 3, taps, mapped))


def _tell_limit(before: dict[str, Any], written: dict[str, Any]) -> None:
    """Servers go by the limit in a drafter's config, so an export carries the target's."""
    key = "max_position_embeddings"
    now = written.get("transformer_layer_config", written).get(key)
    if before.get(key) != now:
        print(f"note: {key} {before.get(key)} became the target's {now}", file=sys.stderr)


if __name__ == "__main__":
    cli(main)()
