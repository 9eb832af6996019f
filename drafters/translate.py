"""A draft model whose tokenizer is not the target's: texts go between the two, tokens do not.

What is committed is decoded and tokenized anew for the draft model, only ever the tail of it; what it drafts is decoded
and tokenized for the target behind the target's own last tokens. Proposed are the tokens that no further text could
change. They are a guess without chance in it, so that verification as one-hot proposals is exact, however the texts
fit. Special tokens have no text: each goes to the other side's token of the same name, an end token to the end token,
and any other is left out.
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from drafters.base import DraftSettings, DraftTree
from drafters.cache import KVCache
from drafters.draft_model import DraftModel, DraftModelState, first_token, read
from drafters.errors import UserError
from drafters.target import Features, Target

UNFINISHED = "\ufffd"  # what the bytes of a character decode to before the last of them is there
TAIL = 48
"""Draft tokens that are tokenized again, at most about twice as many, when text is added."""
CONTEXT = 8
"""Target tokens before a draft that it is tokenized with."""
AHEAD = 2
"""Tokens drafted beyond the wanted length: the last word of a draft is not certain and is cut off."""


@dataclass
class TranslatedState:
    """One request: what the draft model has read and what it should have."""

    model: DraftModelState
    read: list[int] = field(default_factory=list)
    """Draft tokens in its cache."""
    frozen: list[int] = field(default_factory=list)
    """Draft tokens that later text does not change."""
    tail: str = ""
    """The text after those."""
    inside: bool = False
    """Whether there is text before that, and no special token between."""
    recent: list[int] = field(default_factory=list)
    """The last target tokens that are text, back to the last special one at most."""
    held: int = 0
    """How many of `recent` end in the middle of a character."""


class TranslatedDraftModel:
    """Drafts chains with a causal LM of any tokenizer.

    Args:
        draft: the small model, loaded as a target itself (`load_target`).
        target: what it drafts for.

    Raises:
        UserError: a tokenizer that does not say which text each token stands for.
    """

    kind = "model"
    taps: tuple[int, ...] = ()

    def __init__(self, draft: Target, target: Target):
        for side in (draft, target):
            if not side.tokenizer.is_fast:
                raise UserError(
                    f"model {side.name!r} has a slow tokenizer; drafting across tokenizers needs a fast one"
                )
        self.draft, self.target = draft, target
        self.model = DraftModel(draft, draft)
        self.to_draft = _special(target, draft)
        self.to_target = _special(draft, target)
        first = first_token(target)
        bos = draft.tokenizer.bos_token_id
        self.opening = [t for t in (self.to_draft.get(first) if first is not None else bos,) if t is not None]
        if bos is not None and self.opening != [bos]:
            self.opening.insert(0, bos)
        self.meta: dict[str, Any] = {"draft_model": draft.fingerprint}
        self.default_settings: DraftSettings | None = None

    def begin(self, capacity: int) -> TranslatedState:
        """See `Drafter.begin`."""
        return TranslatedState(self.model.begin(capacity), frozen=list(self.opening))

    def extend(self, state: TranslatedState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: takes the text over; the draft model reads it in `propose`."""
        run: list[int] = []
        for token in tokens.tolist():
            if token not in self.to_draft:
                run.append(token)
                continue
            self._add_text(state, run)
            state.frozen += _encode(self.draft.tokenizer, state.tail, state.inside)[0]
            special = self.to_draft[token]
            state.frozen += [] if special is None else [special]
            run, state.tail, state.inside, state.recent, state.held = [], "", False, [], 0
        self._add_text(state, run)

    def propose(
        self,
        state: TranslatedState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: always a greedy chain, shorter than asked for where words are long."""
        device = self.target.device
        if settings.length == 0 or not self._catch_up(state):
            return DraftTree.empty(device)
        length = settings.length + AHEAD
        _reserve(state.model.cache, state.model.length + length)
        chain = replace(settings, kind="chain", length=length, sample=False)
        drafted = self.model.propose(state.model, chain).tokens.tolist()
        tokens = self._translate(state, drafted)[: settings.length]
        return DraftTree.chain(torch.tensor(tokens, dtype=torch.long, device=device))

    def _add_text(self, state: TranslatedState, tokens: list[int]) -> None:
        """Takes the text of ordinary target tokens; bytes of a character that is not whole yet are held back."""
        if not tokens:
            return
        tokenizer = self.target.tokenizer
        old = len(state.recent) - state.held  # tokens of `recent` whose text is taken
        recent = state.recent + tokens
        held = 0
        while held < 4 and held < len(recent) - old and _text(tokenizer, recent, old, held).endswith(UNFINISHED):
            held += 1
        if held == 4:  # longer than any character: the bytes are none
            held = 0
        state.tail += _text(tokenizer, recent, old, held)
        state.recent, state.held = recent[-CONTEXT - held :], held

    def _catch_up(self, state: TranslatedState) -> bool:
        """Has the draft model read what is committed; False if it can't."""
        ids, words, ends = _encode(self.draft.tokenizer, state.tail, state.inside)
        wanted = state.frozen + ids
        if not wanted:
            return False
        if len(ids) > 2 * TAIL:  # fix old text, up to the start of a word
            edges = (i for i in range(1, len(ids) - TAIL) if _new_word(words, i, state.tail[ends[i - 1] :][:1]))
            if cut := max(edges, default=0):
                state.frozen, state.tail, state.inside = state.frozen + ids[:cut], state.tail[ends[cut - 1] :], True
        same = 0
        for mine, theirs in zip(state.read, wanted[:-1], strict=False):  # the last is read again: its logits are needed
            if mine != theirs:
                break
            same += 1
        state.model.length = min(same, state.model.length)
        state.read = wanted
        _reserve(state.model.cache, len(wanted))
        read(self.draft, state.model, torch.tensor(wanted[state.model.length :], device=self.draft.device))
        return state.model.out is not None

    def _translate(self, state: TranslatedState, drafted: list[int]) -> list[int]:
        """Draft tokens as target tokens: those that no text after them could change."""
        stop = next((i for i, token in enumerate(drafted) if token in self.to_target), len(drafted))
        end = self.to_target[drafted[stop]] if stop < len(drafted) else None
        before = state.read[-CONTEXT:]
        text = _text(self.draft.tokenizer, before + drafted[:stop], len(before), 0).rstrip(UNFINISHED)
        tokenizer, recent = self.target.tokenizer, state.recent
        for start in (0, 1):  # behind all of its own last tokens, or all but one: that may be part of a word
            known = _text(tokenizer, recent, start, state.held) if len(recent) - state.held > start else ""
            ids, words, ends = _encode(tokenizer, known + text, inside=start > 0)
            own = len(recent) - start
            if ids[:own] == recent[start:]:
                break
        else:  # the target's own tokens are not those of its text
            if state.held:
                return []
            ids, words, ends = _encode(tokenizer, text, inside=bool(recent))
            known, own = "", 0
        if end is not None:
            return [*ids[own:], end]
        if not ids:
            return []
        if words[0] != words[-1]:
            sure = words.index(words[-1])  # the last word may still grow
        else:  # one word, or a tokenizer that knows none
            space = (known + text).rfind(" ")
            sure = sum(end <= space for end in ends)
        return ids[own:sure]


def _special(source: Target, destination: Target) -> dict[int, int | None]:
    """Special tokens of one model -> the other's of the same name or role, or None."""
    theirs = {str(token): id for id, token in destination.tokenizer.added_tokens_decoder.items() if token.special}
    mine = {id: str(token) for id, token in source.tokenizer.added_tokens_decoder.items() if token.special}
    mapped = {id: theirs.get(text) for id, text in mine.items()}
    for id in source.eos_token_ids:
        if mapped.get(id) is None and destination.eos_token_ids:
            mapped[id] = destination.eos_token_ids[0]
    return mapped


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int, held: int) -> str:
    """The text of ids[start : len(ids) - held] where it stands: some tokenizers drop a leading space elsewhere."""

    def decode(part: list[int]) -> str:
        return str(tokenizer.decode(part, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return decode(ids[: len(ids) - held])[len(decode(ids[:start])) :]


def _new_word(words: list[int | None], i: int, character: str) -> bool:
    """Whether token i, which begins with `character`, begins a word; where the tokenizer knows none, by spaces."""
    return words[i] != words[i - 1] if words[0] != words[-1] else character == " "


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, inside: bool
) -> tuple[list[int], list[int | None], list[int]]:
    """Token ids of a text, the word each belongs to, and the character that each ends before.

    Some tokenizers put a space before a text. One that stands `inside` another is read behind a line break, where they
    put none.
    """
    if not text:
        return [], [], []
    if inside and _begins_with_space(tokenizer):
        ids, words, ends = _encoded(tokenizer, "\n" + text)
        first = sum(end <= 1 for end in ends)
        if ends[first - 1 : first] == [1]:  # the line break is no part of a longer token
            return ids[first:], words[first:], [end - 1 for end in ends[first:]]
    return _encoded(tokenizer, text)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int | None], list[int]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), encoded.word_ids(0), [end for _, end in encoded["offset_mapping"]]


@cache
def _begins_with_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer reads "a" as " a"."""
    return _encoded(tokenizer, "a")[0] == _encoded(tokenizer, " a")[0] != _encoded(tokenizer, "\na")[0][-1:]


def _reserve(cache: KVCache, rows: int) -> None:
    """Makes room: how many tokens of its own a text takes is not known when a request begins."""
    extra = rows - cache.capacity
    if extra <= 0:
        return
    extra = max(extra, cache.capacity)
    cache.keys = [pad(buffer, (0, 0, 0, extra)) for buffer in cache.keys]
    cache.values = [pad(buffer, (0, 0, 0, extra)) for buffer in cache.values]
    cache.positions = None if cache.positions is None else pad(cache.positions, (0, extra))
    cache.capacity += extra
