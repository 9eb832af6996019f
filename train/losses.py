"""Losses as pure functions of one chunk: no module, no reduction, no weight.

Those on logits take draft logits (C, Vd) float32, the target's logits for the same draft vocabulary (C, Vd) and labels
(C,), draft ids with -1 outside the draft vocabulary, and return (C,). p is the target's distribution renormalized over
the draft vocabulary, q the drafter's; both softmax to 1 over Vd. Distances are in nats unless said otherwise.

sum min(p, q) is the probability that speculative sampling accepts a token drawn from q (arXiv 2211.17192), here as if
the target never left the draft vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from train.recipe import Loss


def ce(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy with the text's token (Medusa-1, arXiv 2401.10774); 0 where the draft vocabulary lacks it."""
    return F.cross_entropy(draft_logits, labels, ignore_index=-1, reduction="none")


def kl(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """KL(p || q) (EAGLE-3, arXiv 2503.01840); its gradient is that of the soft cross entropy -sum p log q."""
    log_p, log_q = _log_probs(target_logits, draft_logits)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """KL(q || p), which seeks a mode of the target instead of covering all (DistillSpec, arXiv 2310.08461)."""
    return kl(target_logits, draft_logits, labels)


def js(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Jensen-Shannon, the mean KL of p and of q to their mean; at most log 2 (DistillSpec, arXiv 2310.08461)."""
    log_p, log_q = _log_probs(target_logits, draft_logits)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1)


def tv(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Total variation, half of sum |p - q|: the probability of a rejection, 0 to 1 (DistillSpec, arXiv 2310.08461)."""
    log_p, log_q = _log_probs(target_logits, draft_logits)
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def nla(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """Negative log acceptance, -log sum min(p, q) (LK losses, arXiv 2602.23881).

    Its gradient is that of `tv` divided by the acceptance, so it does not vanish where the drafter is far off.
    """
    log_p, log_q = _log_probs(target_logits, draft_logits)
    return -torch.minimum(log_p, log_q).logsumexp(-1)  # in logs: no acceptance is too small to tell


def lk(draft_logits: Tensor, target_logits: Tensor, labels: Tensor, eta: float = 3.0) -> Tensor:
    """The LK hybrid, w KL(p || q) + (1 - w) TV(p, q) with w = exp(-eta * acceptance) (LK losses, arXiv 2602.23881).

    Far from the target it is KL, whose gradient is strong there; close to it total variation, which is the rejections
    themselves. w is a weight of each row, not differentiated; the two terms mix nats and probability.
    """
    distance = tv(draft_logits, target_logits, labels)
    weight = torch.exp(-eta * (1.0 - distance.detach()))
    return weight * kl(draft_logits, target_logits, labels) + (1.0 - weight) * distance


def topk(draft_logits: Tensor, target_logits: Tensor, labels: Tensor, k: int = 10) -> Tensor:
    """Top-k distillation, -sum p log q over the target's k likeliest tokens (HASS, arXiv 2408.15766).

    p is not renormalized over the k tokens. The rest of the vocabulary counts through q's own softmax alone, so the
    minimum is p renormalized over the k tokens, not p; hence it goes beside `kl` or `ce`, not in their place.
    """
    log_p, log_q = _log_probs(target_logits, draft_logits)
    best, at = log_p.topk(min(k, log_p.shape[-1]), dim=-1)  # (C, k)
    return -(best.exp() * log_q.gather(-1, at)).sum(-1)


LOGIT_LOSSES: dict[Loss, Callable[..., Tensor]] = {
    "ce": ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "tv": tv,
    "nla": nla,
    "lk": lk,
    "topk": topk,
}


def smooth_l1(predicted: Tensor, features: Tensor) -> Tensor:
    """Smooth L1 between predicted and true hidden states, (P, D) -> (P,) (EAGLE-1, arXiv 2401.15077)."""
    return F.smooth_l1_loss(predicted.float(), features.float(), reduction="none").mean(-1)


def _log_probs(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    return torch.log_softmax(target_logits, dim=-1), torch.log_softmax(draft_logits, dim=-1)
