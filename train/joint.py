"""Medusa-2 (arXiv 2401.10774, section 2.2.2): heads and backbone trained together, the backbone through LoRA.

Stage 1 trains the heads alone on the original target. Stage 2 trains heads and adapter on

    base loss + head_weight * ramp * heads' loss

where the base loss keeps the adapted target near the text (`ce`) or near the original (`kl`, self-distillation). The
heads learn from the adapted target, which is the one they will serve.

Shapes: B rows, T positions, P supervised positions, D hidden width, V vocabulary.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from drafters.adapter import read_deltas
from drafters.errors import UserError
from drafters.medusa import MedusaDrafter
from drafters.packing import install, native_bf16, remove
from drafters.target import Features, Target
from train.objectives import LOGIT_LOSSES, ChunkRun, Objective, chunked_head_loss, supervised
from train.recipe import BackboneOptions, Recipe


class Backbone(nn.Module):
    """LoRA inside the target; holds its weights as parameters of its own. Off, except within `on`.

    Args:
        target: gets peft's layers until `close`; its own weights stay frozen and bit-equal.
        options: the recipe's section.

    Raises:
        UserError: no such modules.
    """

    def __init__(self, target: Target, options: BackboneOptions):
        super().__init__()
        config = LoraConfig(
            r=options.r,
            lora_alpha=options.alpha,
            lora_dropout=options.dropout,
            target_modules="all-linear" if options.modules is None else list(options.modules),
        )
        head, embedding = target.model.get_output_embeddings(), target.model.get_input_embeddings()
        try:
            model = get_peft_model(target.model, config)
        except ValueError as error:
            raise UserError(f"backbone.modules={options.modules}: {str(error).splitlines()[0]}") from error
        model.peft_config["default"].base_model_name_or_path = target.name
        self._held: list[Any] = [target, model]  # a list hides them from `parameters`
        layers = {n: m for n, m in target.model.named_modules() if isinstance(m, LoraLayer)}
        self._layers: list[Any] = [*layers.values()]
        if target.model.get_output_embeddings() is not head or target.model.get_input_embeddings() is not embedding:
            model.unload()
            raise UserError(f"backbone.modules={options.modules} names the embedding or the head, which stay frozen")
        for name, layer in zip(layers, self._layers, strict=True):
            part = {
                "A": layer.lora_A["default"],
                "B": layer.lora_B["default"],
                "dropout": layer.lora_dropout["default"],
            }
            self.add_module(name.replace(".", "/"), nn.ModuleDict(part))
        # a CPU that emulates bfloat16 would take longer for its products than for all else; widening is exact
        widen = target.dtype == torch.bfloat16 and not native_bf16(target.device)
        self._narrow = [(p, p.data) for p in target.model.parameters() if p.dtype == torch.bfloat16] if widen else []
        for parameter, data in self._narrow:
            parameter.data = data.float()
        remove(target.packed)  # prepacked products know no gradient, and neither does the fast loop
        self._fast = target.fast
        self._switch(False)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The adapted target, for a while."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        self._held[0].fast = None if on else self._fast
        for layer in self._layers:
            layer._disable_adapters = not on  # peft's own switch would also freeze the weights

    def close(self) -> None:
        """Gives the target back as it was."""
        target, model = self._held
        model.unload()
        for parameter, data in self._narrow:
            parameter.data = data
        install(target.packed)

    def save(self, folder: Path) -> None:
        """Writes peft's files, reads them again and compares what they add to each weight."""
        target, model = self._held
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)
        written = read_deltas(folder, target)
        layers: dict[str, Any] = {n: m for n, m in target.model.named_modules() if isinstance(m, LoraLayer)}
        own = {n: m.get_delta_weight("default").float().cpu() for n, m in layers.items()}
        if written.keys() != own.keys() or not all(torch.allclose(w, own[n], atol=1e-6) for n, w in written.items()):
            raise UserError(f"{folder}: the adapter read from its files is not the trained one")


class JointObjective(Objective):
    """Heads and backbone. `progress` (the share of the run's steps that are done) decides on the stage.

    Args:
        drafter: its `adapter` is a `Backbone`.
        target: the one that the backbone adapts.
        recipe: the whole run.
    """

    def __init__(self, drafter: MedusaDrafter, target: Target, recipe: Recipe):
        super().__init__(drafter, target, recipe.objective)
        self.joint = recipe.backbone
        self._backbone: list[Backbone] = [drafter.adapter]  # a list: it is a submodule of the drafter already

    def forward(
        self, ids: Tensor, loss_mask: Tensor, features: Features, weights: Tensor, noise: Tensor | None = None
    ) -> dict[str, Tensor]:
        """See `Objective.forward`; `features` are the original target's, with the adapter off."""
        # a gradient for every parameter in both stages: distributed training and the optimizer's state need one
        zero = sum((p.sum() * 0.0 for p in self._backbone[0].parameters()), start=features.final.sum() * 0.0)
        if self.progress < self.joint.heads_only:
            out = super().forward(ids, loss_mask, features, weights, noise)
            return out | {"loss": out["loss"] + zero}
        target = self._target[0]
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(len(ids), -1)
        with self._backbone[0].on():
            adapted = target.forward(ids, positions)
        out = super().forward(ids, loss_mask, adapted, weights, noise)
        base = base_loss(target, self.joint.loss, ids, loss_mask, features, adapted, weights, self.options.chunk)
        return out | {"loss": base + head_weight(self.progress, self.joint) * out["loss"] + zero, "base": base.detach()}


def head_weight(progress: float, options: BackboneOptions) -> float:
    """Weight of the heads' loss in stage 2: a quarter of a sine, so that heads do not shake the backbone at first."""
    done = (progress - options.heads_only) / (1 - options.heads_only)
    ramp = min(1.0, done / options.head_warmup) if options.head_warmup else 1.0
    return options.head_weight * math.sin(0.5 * math.pi * ramp)


def base_loss(
    target: Target,
    name: Any,
    ids: Tensor,
    loss_mask: Tensor,
    original: Features,
    adapted: Features,
    weights: Tensor,
    chunk: int,
) -> Tensor:
    """The adapted target's own loss, a scalar: `ce` on the text, or `kl` from the original's distribution over V.

    Args:
        target: for its head, which is frozen.
        name: "ce" or "kl".
        ids: (B, T).
        loss_mask: (B, T).
        original: features with the adapter off.
        adapted: with it on; takes the gradient.
        weights: (B, n) from `position_weights`; the first column counts.
        chunk: positions per slice of logits.
    """
    where, _ = supervised(loss_mask, 1)
    b, s = where[:, 0], where[:, 1]
    if not len(where):
        return adapted.final.sum() * 0.0
    bias = target.lm_head.bias
    truth = original.final[b, s - 1]  # (P, D): the state that predicts x[s]

    def rows_loss(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
        return LOGIT_LOSSES[name](target.shape_logits(logits if bias is None else logits + bias), teacher, labels)

    run = ChunkRun(rows_loss, lambda rows: target.head(truth[rows]).float(), ids[b, s], weights[b, :1], chunk)
    losses, _ = chunked_head_loss(run, adapted.final[b, s - 1][:, None], [target.lm_head.weight])
    return losses.sum()
