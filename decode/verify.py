"""Which drafted tokens the target keeps. Every rule here passes the exact enumeration in tests/decode/test_verify.py.

Two rules, both lossless (Leviathan et al., arXiv 2211.17192; `reference/decoding.md`, section a):

- one-hot: a token or tree picked without chance at this point (argmax, top-k, rerank). Draw from the target at each
  slot and descend while the draw is a child: `decode.tree.walk`.
- sampled chain: token i was drawn from q_i. Accept with min(1, p/q), else draw from norm(relu(p - q)).
"""

import torch
from torch import Tensor

from decode.sampling import draw


def verify_sampled_chain(tokens: Tensor, q: Tensor, p: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Accepts a prefix of a chain whose token i was drawn from q[i].

    Args:
        tokens: (n,) drafted.
        q: (n, V) the distributions they were actually drawn from.
        p: (n + 1, V) the target's processed distributions after each slot, float32.
        generator: source of the acceptance coins; independent of the drafter's draws.

    Returns:
        (1,) number accepted and (1,) bonus token: from the residual at the first rejection, from p after a full accept.
    """
    n = len(tokens)
    drafted = tokens[:, None]
    p_draft, q_draft = p[:n].gather(1, drafted)[:, 0], q.gather(1, drafted)[:, 0]
    coins = torch.rand(n, generator=generator, device=p.device)
    accept = coins * q_draft < p_draft  # u < p / q, strict: a token of probability 0 is never accepted
    count = accept.long().cumprod(0).sum(0, keepdim=True)  # (1,)
    no_draft_after = torch.zeros_like(p[:1])
    residual = (p[count] - torch.cat([q, no_draft_after])[count]).clamp(min=0)  # after a full accept: p itself
    empty = residual.sum(-1, keepdim=True) <= 0  # rounding only: p == q, so nothing could have been rejected
    bonus = draw(torch.where(empty, p[count], residual), generator)
    return count, bonus
