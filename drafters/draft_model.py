"""A smaller causal LM as the drafter (Leviathan et al., arXiv 2211.17192): any model with the target's tokenizer.

It reads tokens only. Its own KV cache holds the committed text; what it drafts is written behind that and forgotten.
A model of another tokenizer drafts through `drafters.translate`.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.base import DraftSettings, DraftTree, draw_draft
from drafters.beam import grow_tree
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.target import Features, Target


@dataclass
class DraftModelState:
    """Cache of one request and the last committed row's hidden state, None before any and once the text is too long."""

    cache: KVCache
    out: Tensor | None = None  # (1, D), final: its logits are the first draft's

    @property
    def length(self) -> int:
        """Committed rows."""
        return self.cache.length

    @length.setter
    def length(self, value: int) -> None:
        self.cache.rollback(value)


class DraftModel:
    """Drafts chains, greedy or sampled, and trees with a causal LM that has the target's tokenizer.

    Args:
        draft: the small model, loaded as a target itself (`load_target`).
        target: what it drafts for.

    Raises:
        UserError: the tokenizers differ.
    """

    kind = "model"
    taps: tuple[int, ...] = ()

    def __init__(self, draft: Target, target: Target):
        if not same_tokenizer(draft, target):
            raise UserError(
                f"draft model {draft.name!r} has another tokenizer than {target.name!r}; use TranslatedDraftModel"
            )
        self.draft, self.vocab_size = draft, target.vocab_size
        self.known = min(draft.vocab_size, target.vocab_size)  # heads may be padded to different sizes
        self.first = first_token(target)
        self.meta: dict[str, Any] = {"draft_model": draft.fingerprint}
        self.default_settings: DraftSettings | None = None

    def begin(self, capacity: int) -> DraftModelState:
        """See `Drafter.begin`."""
        return DraftModelState(self.draft.new_cache(capacity + 1))

    def extend(self, state: DraftModelState, tokens: Tensor, features: Features) -> None:
        """See `Drafter.extend`: the features of the target are of no use here."""
        if state.length == 0 and self.first is not None:
            tokens = torch.cat([tokens.new_tensor([self.first]), tokens])
        read(self.draft, state, tokens)

    def propose(
        self,
        state: DraftModelState,
        settings: DraftSettings,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> DraftTree:
        """See `Drafter.propose`: a greedy or sampled chain, or a dynamic tree by cumulative log probability."""
        room = self.draft.max_positions - state.length + 1  # the last token drafted is not read
        settings = replace(settings, length=min(settings.length, room))
        if state.out is None or settings.length < 1:
            return DraftTree.empty(self.draft.device)
        committed = state.length
        try:
            if settings.kind == "tree":
                return self._propose_tree(state, settings)
            return self._propose_chain(state, settings, temperature, generator)
        finally:
            state.cache.rollback(committed)

    def _propose_chain(
        self, state: DraftModelState, settings: DraftSettings, temperature: float, generator: torch.Generator | None
    ) -> DraftTree:
        out, tokens, dists = state.out, [], []
        assert out is not None
        sampled = settings.sample and temperature > 0
        for j in range(settings.length):
            logits = self._logits(out)  # (1, known)
            if sampled:
                draft, q = draw_draft(logits, temperature, generator)
                dists.append(F.pad(q, (0, self.vocab_size - self.known)))
            else:
                draft = logits.argmax(-1)
            tokens.append(draft)
            if j + 1 < settings.length:
                out = _step(self.draft, state.cache, draft, state.cache.length)
        return DraftTree.chain(torch.cat(tokens), torch.cat(dists) if sampled else None)

    def _propose_tree(self, state: DraftModelState, settings: DraftSettings) -> DraftTree:
        committed = state.length
        assert state.out is not None

        def advance(tokens: Tensor, origin: Tensor, seen: Tensor, level: int) -> Tensor:
            mask = F.pad(seen, (committed, 0), value=True)[None, None]  # all committed rows are visible
            return self._logits(_step(self.draft, state.cache, tokens, committed + level, mask)).log_softmax(-1)

        return grow_tree(self._logits(state.out).log_softmax(-1), settings, advance)

    def _logits(self, out: Tensor) -> Tensor:
        """(w, D) -> (w, known) float32, what follows each row."""
        return self.draft.head(out).float()[:, : self.known]


def read(draft: Target, state: DraftModelState, tokens: Tensor) -> None:
    """Commits (M,) tokens to the draft model's cache, or gives up where its positions end."""
    start, M = state.length, len(tokens)
    if start + M > draft.max_positions or (start and state.out is None):
        state.out = None
        return
    positions = torch.arange(start, start + M, device=tokens.device)
    features = draft.forward(tokens[None], positions[None], state.cache)
    state.cache.commit(M)
    state.out = features.final[0, -1:]


def _step(draft: Target, cache: KVCache, tokens: Tensor, position: int, mask: Tensor | None = None) -> Tensor:
    """Reads (w,) drafted tokens that stand at one position; their rows stay until the caller rolls back. (w, D)."""
    positions = torch.full((1, len(tokens)), position, device=tokens.device)
    features = draft.forward(tokens[None], positions, cache, mask)
    cache.commit(len(tokens))
    return features.final[0]


def same_tokenizer(draft: Target, target: Target) -> bool:
    """Whether the two models give every id the same meaning."""
    return draft.fingerprint["tokenizer"] == target.fingerprint["tokenizer"]


def first_token(target: Target) -> int | None:
    """The token that prompts begin with: drafters are told every token but this one (`Drafter.extend`).

    Where a prompt of bare ids begins with another, the draft model reads a text that differs in that one token.
    """
    try:
        return target.render([{"role": "user", "content": "a"}])[0]
    except UserError:  # no template
        token = target.tokenizer.bos_token_id
        return None if token is None else int(token)
