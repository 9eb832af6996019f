"""The objective that a drafter is trained on: weighted losses of supervised positions only, in chunks.

Step j (EAGLE's draft step, Medusa's head) predicts token x[s] from row t = s - 2 - j. The target's own distribution for
x[s] comes from its final hidden state at s - 1, so one chunk of positions s serves every step.

Shapes: P supervised positions s, n steps, C rows of a chunk, H drafter width, D target width, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.build import TrainedDrafter
from drafters.medusa import MedusaDrafter
from drafters.packing import native_bf16
from drafters.target import Features, Target
from train.losses import LOGIT_LOSSES, smooth_l1
from train.recipe import ObjectiveOptions


def step_weights(steps: int, decay: float, reduction: str) -> list[float]:
    """Weight of each step, decay ** j; "mean" divides by their sum, so that their number does not scale the loss."""
    weights = [decay**j for j in range(steps)]
    return [w / sum(weights) for w in weights] if reduction == "mean" else weights


def supervised(loss_mask: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Which positions are learned, and by which steps.

    Args:
        loss_mask: (B, T), True where token t is supervised.
        steps: n.

    Returns:
        (P, 2) row and position s of every supervised token with s >= 2, which no drafter can predict earlier, and
        (P, n) whether step j has a row t = s - 2 - j for it.
    """
    where = loss_mask.nonzero()
    where = where[where[:, 1] >= 2]
    return where, where[:, 1:] - 2 - torch.arange(steps, device=where.device) >= 0


def position_weights(loss_masks: Sequence[Tensor], steps: int, normalization: str, rows: slice) -> Tensor:
    """Weight of each (position, step) of some rows, so that their losses add up over the whole optimizer step.

    Args:
        loss_masks: one (T,) mask for every row of the global batch.
        steps: n.
        normalization: "per_token" (each supervised token of the global batch weighs the same) or "per_sequence".
        rows: the rows that this process sees now.

    Returns:
        (rows, n); row b's tokens each weigh [b, j] in step j. Summed over a global batch, each step's weights are 1.
    """
    # step j can predict position s iff s >= 2 + j
    counts = torch.tensor(
        [[int(mask[2 + j :].sum()) for j in range(steps)] for mask in loss_masks], dtype=torch.float64
    )
    if normalization == "per_token":
        weights = (1.0 / counts.sum(0).clamp(min=1)).expand(len(loss_masks), -1)
    else:
        weights = (counts > 0) / counts.clamp(min=1) / (counts > 0).sum(0).clamp(min=1)
    return weights[rows].float()


class _ChunkedHead(torch.autograd.Function):
    """Output head and loss in one: logits of a chunk live only while its loss and gradient are computed.

    The forward already has all it needs for the gradient, so it takes it then; nothing is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, run: "ChunkRun", hidden: Tensor, *heads: Tensor) -> tuple[Tensor, Tensor]:
        P, n, _ = hidden.shape
        losses = hidden.new_zeros(n, dtype=torch.float32)
        hits = hidden.new_zeros(n, dtype=torch.float32)
        needs = [hidden.requires_grad, *(w.requires_grad for w in heads)]
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        grad_heads = [torch.zeros_like(w) if w.requires_grad else None for w in heads]
        leaves = [w.detach().requires_grad_(w.requires_grad) for w in heads]
        for start in range(0, P, run.chunk):
            rows = slice(start, start + run.chunk)
            with torch.no_grad():
                target_logits = run.target_logits(rows)  # (C, Vd)
                best = target_logits.argmax(-1)
            for j in range(n):
                k = j % len(heads)
                with torch.enable_grad():
                    h = hidden[rows, j].detach().requires_grad_(needs[0])
                    logits = F.linear(h, leaves[k]).float()
                    loss = run.rows_loss(logits, target_logits, run.labels[rows])
                    total = (loss * run.weights[rows, j]).sum()
                    wanted = [x for x in (h, leaves[k]) if x.requires_grad]
                    grads = list(torch.autograd.grad(total, wanted)) if wanted else []
                if grad_hidden is not None:
                    grad_hidden[rows, j] = grads.pop(0)
                if grads:
                    grad_heads[k] += grads.pop(0)  # type: ignore[operator]
                losses[j] += total.detach()
                hits[j] += ((logits.detach().argmax(-1) == best) * run.weights[rows, j]).sum()
        ctx.save_for_backward(*(g for g in (grad_hidden, *grad_heads) if g is not None))
        ctx.needs = needs
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # step weights differ by step, so the incoming gradient does; all steps of a head share its gradient buffer
        scale = grads[0]
        saved = list(ctx.saved_tensors)
        out: list[Tensor | None] = [saved.pop(0) * scale[0] if need else None for need in ctx.needs]
        return (None, *out)


class ChunkRun:
    """What `_ChunkedHead` reads beside the hidden states: teacher, labels and weights, by position."""

    def __init__(
        self, rows_loss: Callable, teacher: Callable[[slice], Tensor], labels: Tensor, weights: Tensor, chunk: int
    ):
        self.rows_loss, self.target_logits = rows_loss, teacher
        self.labels, self.weights, self.chunk = labels, weights, chunk


def chunked_head_loss(run: ChunkRun, hidden: Tensor, heads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Weighted loss of each step without ever holding (P, n, Vd) logits.

    Args:
        run: teacher, labels (P,), weights (P, n) that already include the step's own weight.
        hidden: (P, n, H), what the head reads.
        heads: one (Vd, H) weight for all steps, or n of them.

    Returns:
        (n,) losses, to be summed with equal weight (they share one gradient), and (n,) weighted shares of positions
        where the drafter's best token is the target's.
    """
    return _ChunkedHead.apply(run, hidden, *heads)


class Objective(nn.Module):
    """Drafter and loss as one module, so that a distributed wrapper sees every parameter in one forward.

    Args:
        drafter: what is trained.
        target: the frozen target; not a submodule, so that no wrapper or optimizer ever touches it.
        options: the recipe's section.
    """

    progress = 0.0
    """Share of the run's steps that are done; only joint training has stages."""

    def __init__(self, drafter: TrainedDrafter, target: Target, options: ObjectiveOptions):
        super().__init__()
        self.drafter = drafter
        self.options = options
        self.steps = drafter.config.heads if isinstance(drafter, MedusaDrafter) else options.steps
        self.step_weights = step_weights(self.steps, options.decay, options.decay_reduction)
        self._target = [target]
        ids = drafter.draft_ids
        rows = target.lm_head.weight.detach()
        rows = rows if ids is None else rows[ids].contiguous()
        # emulated bfloat16 products would take longer than all else in a step
        self._teacher = [rows if native_bf16(rows.device) else rows.float()]
        lookup = torch.arange(target.vocab_size, device=target.device)
        if ids is not None:
            lookup = torch.full_like(lookup, -1)
            lookup[ids] = torch.arange(len(ids), device=target.device)
        self._to_draft = [lookup]

    def forward(
        self, ids: Tensor, loss_mask: Tensor, features: Features, weights: Tensor, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Losses of one micro-batch.

        Args:
            ids: (B, T), padded on the right.
            loss_mask: (B, T).
            features: of the same positions.
            weights: (B, n) from `position_weights`.
            noise: added to what the drafter reads, never to what it learns.

        Returns:
            "loss" (scalar, to be summed over micro-batches), "steps" (n,) unweighted loss of each step and "hits" (n,)
            top-1 agreement with the target, both as shares of the global batch.
        """
        where, has_row = supervised(loss_mask, self.steps)
        b, s = where[:, 0], where[:, 1]
        outs = self._outputs(ids, features if noise is None else _noisy(features, noise))
        if not len(where):  # nothing to learn here; a zero that still reaches every parameter, for distributed training
            zero = sum((p.sum() * 0.0 for p in self.drafter.parameters() if p.requires_grad), start=outs[0].sum() * 0.0)
            nothing = torch.zeros(self.steps, device=ids.device)
            return {"loss": zero, "steps": nothing, "hits": nothing}
        steps = torch.arange(self.steps, device=ids.device)
        t = (s[:, None] - 2 - steps).clamp(min=0)  # (P, n): step j predicts x[s] from row t = s - 2 - j
        hidden = torch.stack([out[b, t[:, j]] for j, out in enumerate(outs)], dim=1)  # (P, n, H)
        step_weight = torch.tensor(self.step_weights, device=ids.device)
        unit = weights[b] * has_row  # (P, n)
        truth = features.final[b, s - 1]  # (P, D): the target's state that predicts x[s]
        loss = hidden.new_zeros((), dtype=torch.float32)
        parts = torch.zeros(self.steps, device=ids.device)
        hits = torch.zeros(self.steps, device=ids.device)
        if any(self.options.losses.get(name) for name in LOGIT_LOSSES):
            run = ChunkRun(
                self._rows_loss,
                lambda rows: self._teacher_logits(truth[rows]),
                self._to_draft[0][ids[b, s]],
                unit * step_weight,
                self.options.chunk,
            )
            losses, hits = chunked_head_loss(run, self._head_input(hidden), self._heads())
            loss, parts, hits = loss + losses.sum(), parts + losses.detach() / step_weight, hits / step_weight
        if self.options.losses.get("smooth_l1"):
            distance = torch.stack([smooth_l1(hidden[:, j], truth) for j in range(self.steps)], dim=1) * unit
            loss = loss + self.options.losses["smooth_l1"] * (distance * step_weight).sum()
            parts = parts + self.options.losses["smooth_l1"] * distance.detach().sum(0)
        return {"loss": loss, "steps": parts, "hits": hits}

    def _outputs(self, ids: Tensor, features: Features) -> list[Tensor]:
        if isinstance(self.drafter, MedusaDrafter):
            return self.drafter.unroll(ids, features, self.steps)
        return self.drafter.unroll(ids, features, self.steps, self.options.detach)

    def _head_input(self, hidden: Tensor) -> Tensor:
        return hidden if isinstance(self.drafter, MedusaDrafter) else self.drafter.normed(hidden)

    def _heads(self) -> list[Tensor]:
        if isinstance(self.drafter, MedusaDrafter):
            return [self.drafter.head_weight(k) for k in range(self.steps)]
        return [self.drafter.head_weight]

    def _teacher_logits(self, hidden: Tensor) -> Tensor:
        """(C, D) final states -> (C, Vd) float32: the target's logits for the draft vocabulary."""
        weight = self._teacher[0]
        with torch.autocast(weight.device.type, enabled=False):
            return self._target[0].shape_logits(F.linear(hidden.to(weight.dtype), weight)).float()

    def _rows_loss(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        total = draft_logits.new_zeros(len(draft_logits))
        for name, function in LOGIT_LOSSES.items():
            if self.options.losses.get(name):
                more = {"k": self.options.top_k} if name == "topk" else {}
                total = total + self.options.losses[name] * function(draft_logits, target_logits, labels, **more)
        return total


def _noisy(features: Features, noise: Tensor) -> Features:
    D = features.final.shape[-1]
    taps = None if features.taps is None else features.taps + noise[..., D:]
    return Features(features.final + noise[..., :D], taps)
