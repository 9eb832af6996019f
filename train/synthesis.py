"""The target writes its own training text: both sides of a conversation, or the answers to given prompts.

A block is a batch of rows that share one KV cache and advance in lockstep, one column a step. Tokens that the template
dictates are forced, all others sampled, so rows in different phases never wait for each other and nothing is padded. A
row whose conversation ends starts the next one in the column where it stands: its mask begins there and its positions
at 0. A block is one shard on disk; with the same seed it always holds the same text. What the target thought while it
wrote lies beside it (`train.features`), so that it need not read its text again.

Run: python scripts/prepare.py recipes/smollm2-eagle3.yaml
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from drafters.errors import UserError
from drafters.files import alone_in, replacing
from drafters.target import Target
from train.features import save_written, taps_to_keep
from train.recipe import Recipe, SynthesisOptions
from train.sources import read_jsonl

PLACEHOLDER = "HEADSTARTUSERTURN"
MANIFEST = "manifest.json"
LEAST_ROOM = 48  # columns that must be left for a new conversation to be worth starting


@dataclass
class Conversation:
    """One row's conversation while it is written."""

    messages: list[dict[str, str]]
    given: list[str] | None
    """User turns still to come; None: the target writes them."""
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 where the target wrote as assistant, 2 where it wrote as user."""
    read: int = 0
    """How many of `ids` the target has read; what lies behind is dictated by the template."""
    role: str = "user"
    turn: list[int] = field(default_factory=list)
    """Tokens sampled in the current turn."""
    opener: str = ""
    """What the current turn began with before that."""
    exchanges: int = 0
    sampled: int = 0


@dataclass
class Shard:
    """What one block gave; a line of the manifest."""

    file: str
    asked: int = 0
    written: int = 0
    tokens: int = 0
    """Sampled tokens in the rows that were written."""
    dropped: Counter = field(default_factory=Counter)
    seconds: float = 0.0
    sha256: str = ""


def synthesize(recipe: Recipe, target: Target) -> Path:
    """Writes `shard-*.jsonl` until the recipe's tokens or rows are reached; continues where an earlier run stopped.

    Where another process writes into the folder, it waits for it.

    Args:
        recipe: sections `synthesis` and `seed` are read; of the others, which features training will want.
        target: on the CPU it should be packed (`Target.pack`).

    Returns:
        The folder. A row is {"messages", "input_ids", "loss_mask", "written"}; the mask marks what the target wrote as
        assistant, `written` all that it wrote.

    Raises:
        UserError: the folder holds text of other settings, prompts can't be read, a template shows no user turn, or
            the target writes nothing.
    """
    options, folder = recipe.synthesis, Path(recipe.synthesis.folder)
    prompts = _read_prompts(options, target) if options.prompts else None
    with alone_in(folder, f"synthesis: another run writes text into {folder}; waiting for it", wait=True):
        return _fill(folder, recipe, target, prompts)


def _fill(folder: Path, recipe: Recipe, target: Target, prompts: list[list[dict[str, str]]] | None) -> Path:
    options = recipe.synthesis
    manifest = _open_manifest(folder, _settings(recipe, target, prompts))
    shards = [Shard(**{**s, "dropped": Counter(s["dropped"])}) for s in manifest["shards"]]
    total, rows = sum(s.tokens for s in shards), sum(s.written for s in shards)
    goal = options.tokens
    with tqdm(
        total=goal, initial=min(total, goal), unit="tok", desc="synthesis", smoothing=0.1, dynamic_ncols=True
    ) as bar:
        while total < goal and (options.rows is None or rows < options.rows):
            work = _next_prompts(prompts, len(shards), options.batch)
            if prompts is not None and not work:
                break
            shard = _write_shard(folder, len(shards), recipe, target, work, bar.update)
            shards.append(shard)
            total, rows = total + shard.tokens, rows + shard.written
            bar.n = total  # what was dropped does not count
            bar.refresh()
            _save_manifest(folder, manifest, shards)
            if prompts is None and not shard.written:  # it would go on like this forever
                raise UserError(f"target {target.name!r} wrote no conversation; dropped: {dict(shard.dropped)}")
    manifest["complete"] = True
    _save_manifest(folder, manifest, shards)
    seconds = sum(s.seconds for s in shards)
    dropped = sum((s.dropped for s in shards), Counter())
    print(
        f"synthesis: {rows} rows of {sum(s.asked for s in shards)} asked, {total} tokens in {folder} "
        f"({total / max(seconds, 1e-9):.0f} tokens/s); dropped: {dict(dropped) or 'none'}"
    )
    if not rows:
        raise UserError(f"synthesis wrote no row into {folder}; dropped: {dict(dropped)}")
    return folder


def _write_shard(
    folder: Path,
    index: int,
    recipe: Recipe,
    target: Target,
    prompts: list[list[dict[str, str]]] | None,
    tick: Callable[[int], Any],
) -> Shard:
    """Generates one block and puts it in place at once, so that a half-written shard never counts."""
    start = time.perf_counter()
    shard = Shard(f"shard-{index:05d}.jsonl")
    taps = taps_to_keep(recipe, target)
    block = Block(recipe.synthesis, target, recipe.seed, index, prompts, shard, taps)
    rows = block.run(tick)
    if taps is not None:
        save_written(folder / shard.file, taps, block.features)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with replacing(folder / shard.file) as file:
        file.write_text(text, encoding="utf-8")
    shard.sha256 = hashlib.sha256(text.encode()).hexdigest()
    shard.seconds = time.perf_counter() - start
    return shard


class Block:
    """One batch of rows over one KV cache."""

    def __init__(
        self,
        options: SynthesisOptions,
        target: Target,
        seed: int,
        index: int,
        prompts: list[list[dict[str, str]]] | None,
        shard: Shard,
        taps: Sequence[int] | None = None,
    ):
        self.taps = taps
        self.features: list[Tensor] = []
        """Of every finished row but for its last token, which was not read: (T - 1, 1 + taps, D). None of a row that
        was cut off while it was read anew."""
        self.options, self.target, self.shard = options, target, shard
        self.generator = torch.Generator(target.device).manual_seed(seed * 1_000_003 + index)
        self.warpers = LogitsProcessorList()
        if options.temperature not in (0.0, 1.0):
            self.warpers.append(TemperatureLogitsWarper(float(options.temperature)))
        if options.top_p < 1.0:
            self.warpers.append(TopPLogitsWarper(options.top_p))
        self.eos = frozenset(target.eos_token_ids)
        self.self_written = prompts is None
        self.finished: list[dict[str, Any]] = []
        self.openings = [] if prompts else self._openings()
        started = [self._start(p) for p in prompts] if prompts else [self._start(None) for _ in range(options.batch)]
        self.rows: list[Conversation | None] = list(started)
        self.starts = [0] * len(started)  # first column of each row's conversation
        self.columns = min(options.columns, target.max_positions)
        if prompts:  # given prompts need their own length, not the recipe's
            longest = max(len(c.ids) for c in started)
            turns = max(len(c.given or []) for c in started) + 1
            self.columns = min(target.max_positions, longest + turns * (options.max_new_tokens + 64))
        elif self.columns < self._least_room():
            raise UserError(
                f"synthesis.columns={self.columns} leaves no room for a conversation; at least "
                f"{self._least_room()} are needed"
            )
        kept = 0 if taps is None else 1 + len(taps)
        self.states = torch.empty(
            len(started), self.columns if kept else 0, kept, target.hidden_size, dtype=torch.bfloat16,
            device=target.device,
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, tick: Callable[[int], Any]) -> list[dict[str, Any]]:
        """Advances all rows to the last column; returns the finished rows."""
        device, B = self.target.device, len(self.rows)
        cache = self.target.new_cache(self.columns)
        starts = torch.zeros(B, dtype=torch.long, device=device)  # (B,) first column of each row's conversation
        common = min(len(c.ids) for c in self.rows if c)
        tokens = torch.tensor([self._read(c, common) for c in self.rows], device=device)  # (B, common)
        positions = torch.arange(common, device=device).expand(B, -1)
        logits = self._logits(tokens, positions, cache, None)
        index = torch.arange(self.columns, device=device)
        while cache.length < self.columns and any(self.rows):
            sampled = self._sample(logits).tolist()
            column = cache.length
            before = sum(c.sampled for c in self.rows if c)
            fed, restarted = [], []
            for b, choice in enumerate(sampled):
                token, fresh = self._advance(b, choice, self.columns - column)
                fed.append(token)
                if fresh:
                    restarted.append(b)
            tick(max(0, sum(c.sampled for c in self.rows if c) - before))
            if restarted:
                starts[restarted] = column
                for b in restarted:
                    self.starts[b] = column
            if not any(self.rows):
                break
            ids = torch.tensor(fed, device=device)[:, None]
            mask = (index[: column + 1] >= starts[:, None])[:, None, None]  # (B, 1, 1, column + 1)
            logits = self._logits(ids, (column - starts)[:, None], cache, mask)
        for b, conversation in enumerate(self.rows):
            if conversation is not None:
                self._finish(b, cut=True)
        return self.finished

    def _logits(self, ids: Tensor, positions: Tensor, cache: Any, mask: Tensor | None) -> Tensor:
        features = self.target.forward(ids, positions, cache, mask, self.taps or ())
        if self.taps is not None:
            layers = [] if features.taps is None else features.taps.split(self.target.hidden_size, dim=-1)
            self.states[:, cache.length : cache.length + ids.shape[1]] = torch.stack([features.final, *layers], dim=2)
        cache.commit(ids.shape[1])
        return self.target.head(features.final[:, -1])  # (B, V): predicts each row's next token

    def _sample(self, logits: Tensor) -> Tensor:
        if self.options.temperature == 0:
            return logits.argmax(-1)
        scores = self.warpers(cast(Any, None), logits.float())  # none of these warpers looks at the ids
        # inverse CDF: one uniform a row, where the exponential race needs one a token
        cdf = torch.softmax(scores, dim=-1).cumsum(-1)  # (B, V)
        coins = torch.rand(len(cdf), 1, generator=self.generator, device=cdf.device) * cdf[:, -1:]
        return torch.searchsorted(cdf, coins, right=True).squeeze(-1).clamp_(max=cdf.shape[1] - 1)

    def _advance(self, b: int, choice: int, room: int) -> tuple[int, bool]:
        """The token that row b reads next, and whether a conversation begins with it."""
        conversation = self.rows[b]
        if conversation is None:
            return 0, False
        fresh = False
        if conversation.read == len(conversation.ids):  # everything dictated is read: the sample counts
            fresh = self._accept(b, conversation, choice)
            if self.rows[b] is None and self.self_written and room >= self._least_room():
                self.rows[b], fresh = self._start(None), True
            conversation = self.rows[b]
            if conversation is None:
                return 0, False
        return self._read(conversation, 1)[0], fresh

    def _accept(self, b: int, conversation: Conversation, choice: int) -> bool:
        """Takes a sampled token; at the end of a turn, says what the template dictates. True: row b must restart."""
        limit = self.options.max_user_tokens if conversation.role == "user" else self.options.max_new_tokens
        ended = choice in self.eos
        conversation.turn.append(choice)
        conversation.sampled += 1
        if conversation.role == "assistant" or not ended:
            conversation.ids.append(choice)
            conversation.mask.append(1 if conversation.role == "assistant" else 2)
        if not ended and len(conversation.turn) < limit:
            return False
        text = conversation.opener + self._decode(conversation.turn[:-1] if ended else conversation.turn)
        if conversation.role == "user":
            return self._end_user(b, conversation, text.strip())
        conversation.messages.append({"role": "assistant", "content": text})
        conversation.exchanges += 1
        more = conversation.given if conversation.given is not None else conversation.exchanges < self.options.turns
        if not ended or not more:
            self._finish(b)
            return False
        return self._next_user(b, conversation)

    def _decode(self, tokens: list[int]) -> str:
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))

    def _end_user(self, b: int, conversation: Conversation, text: str) -> bool:
        if not text:
            self._drop(b, "empty_user_turn")
            return False
        conversation.messages.append({"role": "user", "content": text})
        return self._force(b, conversation, self.target.render(conversation.messages), "assistant")

    def _next_user(self, b: int, conversation: Conversation) -> bool:
        if conversation.given:
            conversation.messages.append({"role": "user", "content": conversation.given.pop(0)})
            ids, role = self.target.render(conversation.messages), "assistant"
        else:
            ids, role = self._user_prefix(conversation.messages), "user"
        if ids[: len(conversation.ids)] != conversation.ids:  # the template re-renders what was said: stop here
            while conversation.messages[-1]["role"] == "user":
                conversation.messages.pop()
            self._finish(b)
            return False
        return self._force(b, conversation, ids, role)

    def _force(self, b: int, conversation: Conversation, ids: list[int], role: str) -> bool:
        """Feeds the rest of `ids`; where what was read differs from them, the row restarts and reads them anew."""
        fresh = ids[: len(conversation.ids)] != conversation.ids
        # an earlier answer was written after the very same tokens, so it still counts
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, conversation.ids, strict=False)))
        conversation.mask = conversation.mask[:same] + [0] * (len(ids) - same)
        conversation.read = 0 if fresh else conversation.read
        conversation.ids, conversation.turn, conversation.role, conversation.opener = list(ids), [], role, ""
        return fresh

    def _read(self, conversation: Conversation | None, count: int) -> list[int]:
        assert conversation is not None
        conversation.read += count
        return conversation.ids[conversation.read - count : conversation.read]

    def _start(self, prompt: list[dict[str, str]] | None) -> Conversation:
        self.shard.asked += 1
        if prompt is None:
            opener, ids = self.openings[(self.shard.asked - 1) % len(self.openings)]
            return Conversation([], None, list(ids), [0] * len(ids), opener=opener)
        first = _first_user(prompt) + 1
        messages = prompt[:first]
        ids = self.target.render(messages)
        given = [m["content"] for m in prompt[first:] if m["role"] == "user"]
        return Conversation(list(messages), given, ids, [0] * len(ids), role="assistant")

    def _finish(self, b: int, cut: bool = False) -> None:
        """Writes row b's conversation, unless it has no assistant turn."""
        conversation = self.rows[b]
        assert conversation is not None
        messages = conversation.messages
        if cut and conversation.role == "assistant" and conversation.turn:
            text = self._decode(conversation.turn)
            messages = [*messages, {"role": "assistant", "content": text}]
        if 1 not in conversation.mask:
            self._drop(b, "cut_before_the_answer")
            return
        last = len(conversation.mask) - conversation.mask[::-1].index(1)  # what follows the last answer is no use
        while messages[-1]["role"] == "user":
            messages = messages[:-1]
        ids, mask = conversation.ids[:last], conversation.mask[:last]
        masks = {"loss_mask": [int(m == 1) for m in mask], "written": [int(m > 0) for m in mask]}
        self.finished.append({"messages": messages, "input_ids": ids, **masks})
        if self.taps is not None:
            read = last - 1 if conversation.read >= last - 1 else 0
            self.features.append(self.states[b, self.starts[b] : self.starts[b] + read].cpu())
        self.shard.written += 1
        self.shard.tokens += conversation.sampled
        self.rows[b] = None

    def _drop(self, b: int, reason: str) -> None:
        self.shard.dropped[reason] += 1
        self.rows[b] = None

    def _openings(self) -> list[tuple[str, list[int]]]:
        """What first user turns begin with, and the tokens of a conversation up to there."""
        prefix, tokenizer = self._user_prefix([]), self.target.tokenizer
        return [
            (o, prefix + list(tokenizer.encode(o, add_special_tokens=False))) for o in self.options.openers or ("",)
        ]

    def _least_room(self) -> int:
        return LEAST_ROOM + max((len(ids) for _, ids in self.openings), default=0)

    def _user_prefix(self, messages: list[dict[str, str]]) -> list[int]:
        """The template up to where the user's next words would stand."""
        tokenizer = self.target.tokenizer
        if not tokenizer.chat_template:
            raise UserError(
                f"target {self.target.name!r} has no chat template; give synthesis.prompts a target that has one"
            )
        asked = [*messages, {"role": "user", "content": PLACEHOLDER}]
        text = str(tokenizer.apply_chat_template(asked, tokenize=False))
        if PLACEHOLDER not in text:
            raise UserError(
                f"the chat template of {self.target.name!r} does not show the user's text; use synthesis.prompts"
            )
        return list(tokenizer.encode(text[: text.index(PLACEHOLDER)], add_special_tokens=False))


def _read_prompts(options: SynthesisOptions, target: Target) -> list[list[dict[str, str]]]:
    """Prompts, shortest first, so that the rows of a block are of one length; assistant turns are left out."""
    path = Path(options.prompts or "")
    if not path.is_file():
        raise UserError(f"synthesis.prompts={path}: no such file")
    prompts: list[list[dict[str, str]]] = []
    lengths: list[int] = []
    unusable: Counter[str] = Counter()
    for row in read_jsonl(path):
        if len(prompts) == options.rows:
            break
        given = (row or {}).get("prompt")
        messages: Any = [{"role": "user", "content": given}] if given else (row or {}).get("messages")
        if not _usable(messages):
            unusable["without user text"] += 1
            continue
        prompt = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "assistant"]
        length = len(target.render(prompt[: _first_user(prompt) + 1]))
        if length + options.max_new_tokens > target.max_positions:
            unusable[f"longer than {target.max_positions} positions with the answer"] += 1
            continue
        prompts.append(prompt)
        lengths.append(length)
    if unusable:
        print(f"synthesis: left out prompts of {path}: {dict(unusable)}")
    if not prompts:
        raise UserError(f"synthesis.prompts={path} has no usable row with a `prompt` or user `messages`")
    return [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: lengths[i])]


def _usable(messages: Any) -> bool:
    text = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("content"), str) and isinstance(m.get("role"), str) for m in messages
    )
    return text and any(m["role"] == "user" and m["content"].strip() for m in messages)


def _first_user(messages: list[dict[str, str]]) -> int:
    return next(i for i, m in enumerate(messages) if m["role"] == "user")


def _next_prompts(
    prompts: list[list[dict[str, str]]] | None, shard: int, batch: int
) -> list[list[dict[str, str]]] | None:
    return None if prompts is None else prompts[shard * batch : (shard + 1) * batch]


def _settings(recipe: Recipe, target: Target, prompts: list[list[dict[str, str]]] | None) -> dict[str, Any]:
    """What the text depends on; a run with more tokens or rows continues the same text."""
    options = {k: v for k, v in asdict(recipe.synthesis).items() if k not in ("folder", "tokens", "rows", "prompts")}
    if openers := options.pop("openers"):
        options["openers"] = list(openers)  # as the manifest gives them back
    text = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16] if prompts else None
    fingerprint = {k: target.fingerprint[k] for k in ("config", "tokenizer", "template", "weights")}
    return {"seed": recipe.seed, **options, "prompts": text, "dtype": str(target.dtype), "target": fingerprint}


def _open_manifest(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    path = folder / MANIFEST
    manifest: dict[str, Any] = {"settings": settings, "complete": False, "shards": []}
    if path.is_file():
        try:
            manifest = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is damaged ({error}); delete {folder} to start anew") from error
        stored = manifest["settings"]
        different = [k for k in {**settings, **stored} if stored.get(k) != settings.get(k)]
        if different:
            key = different[0]
            raise UserError(
                f"synthesis.folder={folder} holds text made with {key}={stored.get(key)}, not {settings.get(key)}; "
                "choose another folder or delete this one"
            )
    good = []
    for shard in manifest["shards"]:
        file = folder / shard["file"]
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != shard["sha256"]:
            print(f"synthesis: {file} is damaged; writing it and what follows anew")
            break
        good.append(shard)
    manifest["shards"], manifest["complete"] = good, False
    for file in folder.glob("shard-*.jsonl"):  # written, but never entered in the manifest
        if file.name not in {s["file"] for s in good}:
            file.unlink()
    return manifest


def _save_manifest(folder: Path, manifest: dict[str, Any], shards: list[Shard]) -> None:
    manifest["shards"] = [{**vars(s), "dropped": dict(s.dropped)} for s in shards]
    manifest["totals"] = {
        "rows_asked": sum(s.asked for s in shards),
        "rows_written": sum(s.written for s in shards),
        "tokens": sum(s.tokens for s in shards),
        "dropped": dict(sum((s.dropped for s in shards), Counter())),
    }
    with replacing(folder / MANIFEST) as file:
        file.write_text(json.dumps(manifest, indent=1))
