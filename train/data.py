"""Conversations -> token ids and loss mask, by the tokenizer's own chat template.

Masks come from rendering prefixes of a conversation, never from patterns: what the template makes of the messages
before an assistant turn is exactly the prompt that a server sees, so what follows it is what the target has to write.

Shapes: B rows, T positions. `loss_mask[t]` is 1 iff token t is assistant text or its end of turn; it marks the token
that is predicted, not the position that predicts it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jinja2
import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafters.errors import UserError
from train.recipe import Recipe
from train.sources import cached, content_key, read_rows

Row = tuple[list[int], list[bool]]
"""Token ids and their loss mask, of the same length."""

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
_ROLES |= {"system": "system", "tool": "tool"}


class RowDropped(Exception):
    """A row that can't be trained on: `reason` is counted in the report, `detail` is for the reader."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class DataReport:
    """What became of the rows of a source; `str()` is what the user reads."""

    source: str
    read: int = 0
    kept: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    """Reason -> detail of the first row that was dropped for it."""

    def drop(self, row: int, dropped: RowDropped) -> None:
        """Counts a row that can't be trained on."""
        self.dropped[dropped.reason] += 1
        if dropped.detail:
            self.examples.setdefault(dropped.reason, f"row {row}: {dropped.detail}")

    def __str__(self) -> str:
        share = self.supervised / max(1, self.tokens)
        lines = [
            f"{self.source}: {self.read:,} rows read, {self.kept:,} kept, {self.tokens:,} tokens, "
            f"{self.supervised:,} of them trained on ({share:.0%})"
        ]
        for reason, count in sorted(self.dropped.items(), key=lambda item: (-item[1], item[0])):
            example = f" ({self.examples[reason]})" if reason in self.examples else ""
            lines.append(f"  dropped {count:,}: {reason}{example}")
        if self.dropped.total() > self.kept:
            lines.append("  warning: more rows were dropped than kept")
        return "\n".join(lines)


@dataclass(frozen=True)
class EncodedData:
    """Encoded rows, kept on disk as Arrow."""

    rows: Dataset
    key: str
    """Changes whenever the rows do; part of what a resumed run compares."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self.rows[index]

    def batch(self, indices: Sequence[int], pad_id: int) -> dict[str, Tensor]:
        """Returns the rows `indices`, collated."""
        return collate([self.rows[index] for index in indices], pad_id)

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """Returns how often each token id is trained on: (V,) int64, what a draft vocabulary is chosen from."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for part in self.rows.with_format("numpy").iter(batch_size=1024):
            ids = np.concatenate(part["input_ids"])[np.concatenate(part["loss_mask"]).astype(bool)]
            counts += torch.from_numpy(np.bincount(ids, minlength=vocab_size))
        return counts


def load_rows(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab_size: int | None = None,
    max_positions: int | None = None,
) -> tuple[EncodedData, EncodedData, DataReport]:
    """Encodes the recipe's source, or finds it encoded in `<output>/data/<key>`.

    Text that the target writes itself must be there already (`train.synthesis.synthesize`). With several processes,
    let the main one come first; the others then find its result.

    Args:
        recipe: sections `data` and `synthesis`, `output` and `seed` are read.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding, if more than the tokenizer has; the bound of ids.
        max_positions: the target's longest context.

    Returns:
        Rows to train on, rows for validation, and the report.

    Raises:
        UserError: a source that can't be read, no chat template, a template that fits no `data.turns`, or no row left.
    """
    options = recipe.data
    if max_positions is not None and options.max_length > max_positions:
        raise UserError(
            f"data.max_length={options.max_length} exceeds the target's {max_positions} positions; lower it"
        )
    vocab_size = vocab_size or len(tokenizer)
    settings = (options.max_length, options.turns, options.train_on, options.max_rows, vocab_size)
    key = content_key(recipe, tokenizer, settings)
    report = DataReport(options.source)
    rows, facts = cached(
        f"{recipe.output}/data/{key}",
        lambda: _encode(recipe, tokenizer, vocab_size, report),
        lambda: {name: value for name, value in vars(report).items() if name != "source"},
    )
    report = DataReport(options.source, **{**facts, "dropped": Counter(facts["dropped"])})
    if not report.kept:
        raise UserError(f"no row is left to train on\n{report}")
    if options.validation_rows >= report.kept:
        raise UserError(
            f"data.validation_rows={options.validation_rows} leaves nothing to train on: only {report.kept} rows were "
            f"kept; lower it or add rows\n{report}"
        )
    order = np.random.default_rng([recipe.seed, 0]).permutation(len(rows)).tolist()
    split = len(rows) - options.validation_rows
    # Sorted, so that both parts read the file forwards; the order of training is `global_batches`' matter.
    train, validation = (EncodedData(rows.select(sorted(part)), key) for part in (order[:split], order[split:]))
    return train, validation, report


def encode_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], max_length: int, turns: str = "all"
) -> list[Row]:
    """Encodes a conversation by its chat template; a trailing user turn is cut.

    Args:
        tokenizer: one with a chat template.
        messages: `{"role", "content"}` each, or ShareGPT's `{"from", "value"}`.
        max_length: longest row; the rest is cut off.
        turns: `all` assistant turns in one row, the `last` one only, or `split` into one row each. In each row what
            precedes its (last) assistant turn equals the prompt of inference.

    Returns:
        One row, or one for each assistant turn. After the cut a row may have nothing to train on.

    Raises:
        RowDropped: the conversation has no usable form, or the template refuses it.
        UserError: no template; or one that renders earlier turns differently later on, with `turns=all`.
    """
    conversation = _normalize(messages)
    ends = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    if turns == "last":
        ends = ends[-1:]
    pieces = [_render_turn(tokenizer, conversation, index) for index in ends]
    if turns == "split":
        return [_fit(prompt + answer, [len(prompt)], [len(answer)], max_length) for prompt, answer in pieces]
    ids = pieces[-1][0] + pieces[-1][1]
    for turn, (prompt, answer) in enumerate(pieces[:-1], start=1):
        written = prompt + answer
        if ids[: len(written)] != written:
            raise UserError(
                f"the chat template renders assistant turn {turn} differently once the conversation goes on: "
                f"{_first_difference(tokenizer, written, ids)}; set data.turns=split or data.turns=last"
            )
    return [_fit(ids, [len(prompt) for prompt, _ in pieces], [len(answer) for _, answer in pieces], max_length)]


def global_batches(num_rows: int, global_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Returns the row numbers of each optimizer step of an epoch: a permutation that depends on nothing else.

    The last batch may be smaller.
    """
    order = np.random.default_rng([seed, epoch, num_rows]).permutation(num_rows).tolist()
    return [order[start : start + global_batch] for start in range(0, num_rows, global_batch)]


def collate(rows: Sequence[Mapping[str, Sequence[int]]], pad_id: int) -> dict[str, Tensor]:
    """Pads rows on the right.

    Returns:
        `input_ids` (B, T) int64, `loss_mask` (B, T) bool, false on padding, and `lengths` (B,) int64.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])  # (B,)
    input_ids = torch.full((len(rows), int(lengths.max())), pad_id)  # (B, T)
    loss_mask = torch.zeros(input_ids.shape, dtype=torch.bool)  # (B, T)
    for index, row in enumerate(rows):
        input_ids[index, : lengths[index]] = torch.as_tensor(row["input_ids"])
        loss_mask[index, : lengths[index]] = torch.as_tensor(row["loss_mask"]).bool()
    return {"input_ids": input_ids, "loss_mask": loss_mask, "lengths": lengths}


def _encode(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, vocab_size: int, report: DataReport
) -> Iterator[dict[str, Any]]:
    """Yields the encoded rows and counts in `report` what became of each."""
    options = recipe.data
    for number, raw in enumerate(read_rows(recipe), start=1):
        report.read = number
        written: Any = None
        try:
            if raw is None:
                raise RowDropped("bad_json", "not a JSON object")
            if "input_ids" in raw:
                encoded = [_given(tokenizer, raw, options.max_length, vocab_size)]
                written = raw.get("written")
            else:
                messages = raw.get("messages", raw.get("conversations"))
                if messages is None:
                    raise RowDropped("no_messages", f"its keys are {', '.join(raw) or 'none'}")
                encoded = encode_messages(tokenizer, messages, options.max_length, options.turns)
        except RowDropped as dropped:
            report.drop(number, dropped)
            continue
        for ids, mask in encoded:
            if max(ids, default=0) >= vocab_size:
                report.drop(number, RowDropped("id_out_of_range", f"ids must be whole numbers below {vocab_size}"))
                continue
            if options.train_on == "all":  # not what the template dictates, where the row says what that is
                known = isinstance(written, list) and len(written) == len(raw["input_ids"])
                mask = [bool(w) for w in written[: len(ids)]] if known else [index > 0 for index in range(len(ids))]
            # Every drafter predicts two tokens ahead or more, so the first two are never predicted.
            if not any(mask[2:]):
                report.drop(number, RowDropped("nothing_to_train_on"))
                continue
            report.kept += 1
            report.tokens += len(ids)
            report.supervised += sum(mask)
            yield {"input_ids": ids, "loss_mask": mask}


def _normalize(messages: Any) -> list[dict[str, Any]]:
    """Checks the order of roles and returns messages up to the last assistant turn, in one spelling."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise RowDropped("bad_messages", "messages must be a list of objects")
    conversation: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str) or role not in _ROLES:
            raise RowDropped("unknown_role", f"role {role!r}")
        if isinstance(content, list):  # parts, as multimodal APIs have them
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        extra = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
        conversation.append({**extra, "role": _ROLES[role], "content": content or ""})
    roles = [message["role"] for message in conversation]
    first = next((role for role in roles if role != "system"), None)
    if first is None:
        raise RowDropped("empty")
    if first != "user":
        raise RowDropped("assistant_first" if first == "assistant" else "no_user_first")
    turns = roles[roles.index("user") :]
    pairs = zip(turns, turns[1:], strict=False)
    if "system" in turns or any(one == two and one != "tool" for one, two in pairs):
        raise RowDropped("not_alternating", "roles " + " ".join(turns[:8]))
    if "assistant" not in turns:
        raise RowDropped("no_assistant")
    conversation = conversation[: len(roles) - roles[::-1].index("assistant")]
    for message in conversation:
        if not isinstance(message["content"], str):
            raise RowDropped("bad_messages", "content must be text")
        if any("\ud800" <= letter <= "\udfff" for letter in message["content"]):  # half a character, from \uXXXX
            raise RowDropped("bad_messages", "content holds a lone surrogate, which no tokenizer reads")
        if message["role"] in ("user", "assistant") and not message["content"].strip() and "tool_calls" not in message:
            raise RowDropped("empty", f"blank {message['role']} turn")
    return conversation


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise UserError(
            "the target's tokenizer has no chat template, so conversations can't be rendered as it would see them; use "
            "an instruct model, set tokenizer.chat_template in its folder, or give rows with input_ids and loss_mask"
        )
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=prompt
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise RowDropped("template_error", " ".join(str(error).split())) from error
    return cast(str, text)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _render_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], index: int
) -> tuple[list[int], list[int]]:
    """Returns the prompt of assistant turn `index` and what the target has to write, its end of turn included."""
    prompt_text = _render(tokenizer, messages[:index], prompt=True)
    whole_text = _render(tokenizer, messages[: index + 1], prompt=False)
    prompt, whole = _tokens(tokenizer, prompt_text), _tokens(tokenizer, whole_text)
    if not whole_text.startswith(prompt_text):
        raise UserError(
            "the chat template's prompt is not how it begins the same conversation with the answer: "
            f"{_first_difference(tokenizer, prompt, whole)}; let the target write its text (data.source=synthesis)"
        )
    answer_text = whole_text[len(prompt_text) :]
    # A merge across the border can't happen at inference, where the prompt is tokenized alone.
    answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else _tokens(tokenizer, answer_text)
    return prompt, answer[: len(answer) - _after_turn(tokenizer, answer_text, messages[index]["content"])]


def _after_turn(tokenizer: PreTrainedTokenizerBase, answer: str, content: str) -> int:
    """Counts the tokens that the template puts after the end-of-turn token, such as a line break."""
    marks = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    # The end of the content is enough: templates strip it, or take reasoning off its front.
    needle = content.strip()[-40:]
    found = answer.rfind(needle) if needle else -1
    tail = _tokens(tokenizer, answer[found + len(needle) :] if found >= 0 else answer)
    places = [place for place, token in enumerate(tail) if token in marks]
    if not places:  # a template without an end-of-turn token: nothing but the text itself
        return len(tail) if found >= 0 else 0
    return len(tail) - 1 - (places[0] if found >= 0 else places[-1])


def _fit(ids: list[int], starts: Sequence[int], lengths: Sequence[int], max_length: int) -> Row:
    mask = [False] * len(ids)
    for start, length in zip(starts, lengths, strict=True):
        mask[start : start + length] = [True] * length
    return ids[:max_length], mask[:max_length]


def _given(tokenizer: PreTrainedTokenizerBase, raw: Mapping[str, Any], max_length: int, vocab_size: int) -> Row:
    """Takes a row that is encoded already, after checking it against the target."""
    ids, mask = raw["input_ids"], raw.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise RowDropped("length_mismatch", "input_ids and loss_mask must be lists of the same length")
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise RowDropped("id_out_of_range", f"ids must be whole numbers below {vocab_size}")
    if not all(flag in (0, 1) for flag in mask):
        raise RowDropped("bad_mask", "loss_mask must hold 0 and 1")
    messages = raw.get("messages")
    if messages and tokenizer.chat_template and any(mask):
        conversation = _normalize(messages)
        first = next(index for index, message in enumerate(conversation) if message["role"] == "assistant")
        expected = _tokens(tokenizer, _render(tokenizer, conversation[:first], prompt=True))
        given = ids[: mask.index(1)]
        if _from_user(tokenizer, given, conversation) != _from_user(tokenizer, expected, conversation):
            detail = _first_difference(tokenizer, given, expected)
            raise RowDropped("prompt_mismatch", f"not the prompt that the chat template gives: {detail}")
    return ids[:max_length], [bool(flag) for flag in mask[:max_length]]


def _from_user(tokenizer: PreTrainedTokenizerBase, prompt: list[int], messages: Sequence[Mapping[str, Any]]) -> str:
    """Returns a prompt's text from its first user turn on, white space made equal.

    Text, not ids: what the target sampled may be tokenized in more than one way. Not the system prompt: some templates
    write today's date there.
    """
    text = " ".join(cast(str, tokenizer.decode(prompt)).split())
    user = next(message["content"] for message in messages if message["role"] == "user")
    return text[max(0, text.find(" ".join(user.split()))) :]


def _first_difference(tokenizer: PreTrainedTokenizerBase, left: list[int], right: list[int]) -> str:
    """Names the first token where two renderings part."""
    same = zip(left, right, strict=False)
    place = next((place for place, (one, two) in enumerate(same) if one != two), min(len(left), len(right)))
    shown = [repr(tokenizer.decode(ids[place : place + 1])) if place < len(ids) else "the end" for ids in (left, right)]
    return f"token {place} is {shown[0]} in the one, {shown[1]} in the other"
