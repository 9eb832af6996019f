"""Talk to a target that a drafter speeds up; the tokens that the drafter guessed right are marked.

    python scripts/chat.py --target smollm2-135m --drafter runs/smollm2-eagle3
    python scripts/chat.py --target smollm2-135m --drafter runs/smollm2-eagle3 --prompt "Why is the sky blue?"

Ctrl-C stops an answer, Ctrl-D quits. On a terminal accepted draft tokens are green and underlined; elsewhere they
stand in ‹brackets›.
"""

import argparse
import time
from collections.abc import Iterator

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decode.adapt import POLICIES, build_policy
from decode.engine import DraftSettings, Generation, generate
from decode.sampling import SamplingParams
from drafters.adapter import adapted
from drafters.base import Drafter
from drafters.errors import UserError, cli
from drafters.named import make_drafter
from drafters.target import Target, load_target

Piece = tuple[str, bool]
"""Text to print and whether the drafter wrote it."""


def parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    p = argparse.ArgumentParser(description="Chat with a target; accepted draft tokens are marked.")
    p.add_argument("--target", default="smollm2-135m", help="hub id, folder or GGUF file of the target")
    p.add_argument(
        "--drafter",
        help="folder, lookup, suffix[:FILE], lookahead, model:NAME_OR_DIR, router:A+B, merged:A+B; default: none",
    )
    p.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float16", "float32"))
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=0, help="0 keeps the whole vocabulary")
    p.add_argument("--max-new-tokens", type=int, default=256)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--policy", choices=POLICIES, help="how much to draft; default: adaptive, fixed with a shape")
    shape = p.add_mutually_exclusive_group()
    shape.add_argument("--chain", metavar="LENGTH", help="draft one chain of LENGTH tokens")
    shape.add_argument("--tree", metavar="TOTAL,DEPTH,TOPK", help="draft a tree of TOTAL nodes")
    p.add_argument("--prompt", help="answer this one prompt and exit")
    return p


class TextStream:
    """Turns tokens into text as they come, holding back a character until its last byte is there.

    Only a short window is decoded again at each token: the previous piece, because some tokenizers drop a leading
    space without it, and what was held back since.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # tokens at the front of _ids whose text is out already
        self._drafted = True  # whether all tokens that are held back were drafted

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, tokens: list[int], accepted: int) -> Iterator[Piece]:
        """Yields the text that one round completes.

        Args:
            tokens: the round's new token ids; the first `accepted` of them were drafted.
            accepted: number of accepted draft tokens.

        Yields:
            Pieces of text; a character spread over several tokens counts as drafted if all of them were.
        """
        held = ""
        held_drafted = False
        for index, token in enumerate(tokens):
            self._ids.append(token)
            self._drafted &= index < accepted
            before = self._decode(self._ids[: self._shown])
            text = self._decode(self._ids)
            if text.endswith("\ufffd"):  # what an unfinished character decodes to
                continue
            piece, drafted = text[len(before) :], self._drafted
            if held and drafted != held_drafted:
                yield held, held_drafted
                held = ""
            held, held_drafted = held + piece, drafted
            self._restart()
        if held:
            yield held, held_drafted

    def flush(self) -> Iterator[Piece]:
        """Yields what is still held back when the answer ended inside a character."""
        piece = self._decode(self._ids)[len(self._decode(self._ids[: self._shown])) :]
        if piece:
            yield piece, self._drafted
        self._restart()

    def _restart(self) -> None:
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        self._drafted = True


def show(console: Console, pieces: Iterator[Piece]) -> str:
    """Prints pieces of text, drafted ones marked; returns the text without the marks."""
    text = ""
    for piece, drafted in pieces:
        text += piece
        if drafted and console.is_terminal:
            console.out(piece, style="green underline", highlight=False, end="")
        else:
            console.out(f"‹{piece}›" if drafted else piece, highlight=False, end="")
    console.file.flush()
    return text


def summary(generation: Generation) -> str:
    """Says in one line how fast an answer came; the first token belongs to the prefill and is timed apart."""
    rate = (len(generation.tokens) - 1) / generation.decode_s if generation.decode_s > 0 else 0.0
    return (
        f"[acceptance length {generation.acceptance_length:.2f}, {rate:.1f} tokens/s, "
        f"{len(generation.tokens)} tokens, first after {generation.ttft_s:.2f} s, ended by {generation.finish}]"
    )


def answer(
    console: Console, target: Target, drafter: Drafter | None, messages: list[dict[str, str]], args: argparse.Namespace
) -> str:
    """Streams one answer to the screen; Ctrl-C ends it early.

    Args:
        console: where to print.
        target: the model that answers.
        drafter: its drafter, or None.
        messages: the conversation so far, a user's message last.
        args: the command line.

    Returns:
        The answer's text, as far as it came.
    """
    stream = TextStream(target.tokenizer)
    text, count, start = "", 0, time.perf_counter()

    def on_round(tokens: list[int], accepted: int) -> None:
        nonlocal text, count
        text += show(console, stream.push(tokens, accepted))
        count += len(tokens)

    try:
        generation = generate(
            target,
            drafter,
            messages,
            max_new_tokens=args.max_new_tokens,
            settings=args.settings,
            sampling=SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed),
            callback=on_round,
        )
        closing = summary(generation)
    except KeyboardInterrupt:
        closing = f"[stopped after {count} tokens, {count / (time.perf_counter() - start):.1f} tokens/s]"
    text += show(console, stream.flush())
    console.out(f"\n{closing}", style="dim", highlight=False)
    return text


def converse(console: Console, target: Target, drafter: Drafter | None, args: argparse.Namespace) -> None:
    """Reads prompts and answers them, with all earlier turns in view, until the input ends."""
    console.out("Ctrl-C stops an answer, Ctrl-D quits.", style="dim", highlight=False)
    messages: list[dict[str, str]] = []
    while True:
        try:
            prompt = input("> ").strip()
        except KeyboardInterrupt:  # at the prompt it only clears the line
            console.out("")
            continue
        except EOFError:
            console.out("")
            return
        if not prompt:
            continue
        asked: list[dict[str, str]] = [*messages, {"role": "user", "content": prompt}]
        try:
            text = answer(console, target, drafter, asked, args)
        except UserError as error:  # such as a conversation grown too long: say so and let the user go on
            console.out(f"error: {error}", style="red", highlight=False)
            continue
        messages = [*asked, {"role": "assistant", "content": text}]


def main() -> None:
    """Loads target and drafter, then answers one prompt or holds a conversation."""
    args = parser().parse_args()
    fixed = DraftSettings.from_flags(args.chain, args.tree)  # a bad shape should fail before the models load
    console = Console()
    target = load_target(args.target, dtype=args.dtype)
    drafter = make_drafter(args.drafter, target) if args.drafter else None
    args.settings = None if drafter is None else build_policy(args.policy, target, drafter, fixed)
    if getattr(drafter, "adapter", None) is not None:
        print("this drafter was trained with an adapter on the target: you talk to the adapted target")
    with adapted(drafter):
        if args.prompt is not None:
            answer(console, target, drafter, [{"role": "user", "content": args.prompt}], args)
        else:
            converse(console, target, drafter, args)


if __name__ == "__main__":
    cli(main)()
