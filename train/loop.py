"""The loop: recipe -> drafter. `train(recipe, target)` sets up, `_fit` is the loop itself.

Run: accelerate launch -m train recipes/smollm2-eagle3.yaml
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from tqdm import tqdm

from drafters.adapter import adapted
from drafters.build import TrainedDrafter
from drafters.checkpoint import save_drafter
from drafters.eagle import EagleDrafter
from drafters.errors import UserError
from drafters.files import alone_in
from drafters.provenance import provenance
from drafters.target import Target
from train.build import (
    RESOLVED,
    JsonLines,
    check_before_data,
    check_same_recipe,
    make_accelerator,
    make_drafter,
    make_objective,
    make_optimizers,
    make_store,
    release,
)
from train.data import EncodedData, global_batches, load_rows
from train.features import FeatureStore, check_features, drop_written
from train.objectives import Objective, position_weights
from train.recipe import Recipe
from train.state import read_state, restore, save_state
from train.synthesis import synthesize
from train.validation import Estimate, target_kl, validate

Decode = Callable[[TrainedDrafter, Target, int], float]
"""A short real decode: drafter, target, number of prompts -> acceptance length."""
REMEDY = "lower train.lr, or set train.mixed_precision=no. The last saved state is kept"


@dataclass
class Run:
    """Everything the loop reads."""

    recipe: Recipe
    target: Target
    accelerator: Accelerator
    drafter: TrainedDrafter
    objective: torch.nn.Module
    optimizers: list[torch.optim.Optimizer]
    train_rows: EncodedData
    validation_rows: EncodedData
    train_features: FeatureStore
    validation_features: FeatureStore
    facts: dict[str, Any]
    """What goes into `headstart.json`: recipe, versions, data counts."""
    decode: Decode | None
    step: int = 0
    best: float = -math.inf
    history: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """The run's folder, which is the drafter's folder too."""
        return Path(self.recipe.output)


def train(recipe: Recipe, target: Target, decode: Decode | None = None) -> Path:
    """Trains a drafter, or finishes a run that was interrupted.

    Args:
        recipe: the whole run.
        target: frozen, from `recipe.target`.
        decode: a short real decode for validation, passed in by the entry point.

    Returns:
        The run's folder: a drafter folder with the best weights, logs and the resumable state.
    """
    accelerator, output = make_accelerator(recipe), Path(recipe.output)
    set_seed(recipe.seed)
    check_before_data(recipe, target, accelerator.num_processes)
    busy = f"output={recipe.output} is in use by another run; wait for it or choose another output"
    with alone_in(output, busy) if accelerator.is_main_process else contextlib.nullcontext():
        state = read_state(output)
        if state:
            check_same_recipe(recipe, state[1]["recipe"], output)
        facts = state[1] if state else {}
        if not facts.get("history", {}).get("done"):
            run = _setup(recipe, target, accelerator, decode, state)
            try:
                _fit(run, total_steps(recipe, len(run.train_rows)))
            finally:
                release(run.drafter)
            accelerator.end_training()
            facts = {"step": run.step, "history": run.history}
    if accelerator.is_main_process:
        best = facts["history"].get("results", {}).get("tau_estimate", math.nan)
        print(f"trained {facts['step']} steps; best acceptance length {best:.2f} (estimate); wrote {output}")
    return output


def _fit(run: Run, total: int) -> None:
    """One optimizer step an iteration: micro-batches, clip, step; now and then log, validate, save."""
    options, accelerator = run.recipe.train, run.accelerator
    saved_at = time.monotonic()
    run.objective.train()
    bar = tqdm(total=total, initial=run.step, desc=run.drafter.kind, unit="step", dynamic_ncols=True, smoothing=0.1)
    bar.disable = not accelerator.is_main_process
    try:
        for rows in _batches(run, total):
            _set_lr(run, total)
            accelerator.unwrap_model(run.objective).progress = run.step / total
            losses, hits = _accumulate(run, rows)
            norm = accelerator.clip_grad_norm_(run.objective.parameters(), options.clip or math.inf)
            if not math.isfinite(norm):
                raise UserError(f"the gradient is not finite in optimizer step {run.step + 1}, rows {rows}; {REMEDY}")
            for optimizer in run.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            run.step += 1
            bar.update()
            if run.step % options.log_every == 0 or run.step == total:
                _log(run, bar, losses, hits, float(norm))
            if run.step == total:
                break
            if options.eval_every and run.step % options.eval_every == 0:
                _validate(run, bar, total)
            if time.monotonic() - saved_at > options.save_every_seconds:
                _save(run)
                saved_at = time.monotonic()
        _save(run)  # first: the last validation may take long
        _validate(run, bar, total)
    finally:  # an interrupt saves nothing: it may fall between two halves of a step
        bar.close()
    run.history["done"] = True
    _save(run)


def _accumulate(run: Run, rows: list[int]) -> tuple[Tensor, Tensor]:
    """Gradient of one global batch; returns the loss and the top-1 agreement of each step, (n,) each."""
    accelerator, options = run.accelerator, run.recipe.train
    masks = [torch.as_tensor(run.train_rows[row]["loss_mask"]) for row in rows]
    inner: Objective = accelerator.unwrap_model(run.objective)
    losses = hits = torch.zeros(inner.steps, device=accelerator.device)
    micros = _my_micro_batches(len(rows), options.micro_batch, accelerator.num_processes, accelerator.process_index)
    for i, micro in enumerate(micros):
        mine = rows[micro]
        weights = position_weights(masks, inner.steps, run.recipe.objective.normalization, micro)
        if not mine:  # a short last batch: this process has no row left, but must take part
            mine, weights = rows[:1], torch.zeros(1, inner.steps)
        batch = run.train_rows.batch(mine, run.train_features.pad_id)
        batch = {k: v.to(accelerator.device) for k, v in batch.items()}
        features = run.train_features.get(mine, batch["input_ids"])
        noise = _noise(run, features, i)
        torch.manual_seed(_key(run, i))  # an adapter's dropout
        last = i + 1 == len(micros)
        with contextlib.nullcontext() if last else accelerator.no_sync(run.objective), accelerator.autocast():
            out = run.objective(batch["input_ids"], batch["loss_mask"], features, weights.to(accelerator.device), noise)
            # gradients are averaged over processes, while the weights already sum to one over all of them
            accelerator.backward(out["loss"] * accelerator.num_processes)
        losses, hits = losses + out["steps"], hits + out["hits"]
    losses, hits = accelerator.reduce(losses), accelerator.reduce(hits)
    if not bool(torch.isfinite(losses).all()):  # after the reduction: every process has to stop
        bad = [j for j, x in enumerate(losses.tolist()) if not math.isfinite(x)]
        part = "head" if run.drafter.kind in ("medusa", "hydra") else "step"
        raise UserError(f"loss of {part} {bad} is not finite in optimizer step {run.step + 1}, rows {rows}; {REMEDY}")
    return losses, hits


def _my_micro_batches(rows: int, micro: int, processes: int, rank: int) -> list[slice]:
    """Slices of the global batch that this process takes; the same number on every process."""
    count = math.ceil(rows / (micro * processes))
    return [slice(start, start + micro) for start in range(rank * micro, count * micro * processes, micro * processes)]


def _batches(run: Run, total: int) -> Iterator[list[int]]:
    """Rows of every optimizer step from the current one on; a function of seed and step alone."""
    size = run.recipe.train.global_batch
    per_epoch = math.ceil(len(run.train_rows) / size)
    for step in range(run.step, total):
        epoch, index = divmod(step, per_epoch)
        if step == run.step or index == 0:
            order = global_batches(len(run.train_rows), size, run.recipe.seed, epoch)
        yield order[index]


def total_steps(recipe: Recipe, rows: int) -> int:
    """Optimizer steps of the whole run; never a function of the number of processes."""
    steps = max(1, round(recipe.train.epochs * math.ceil(rows / recipe.train.global_batch)))
    return min(steps, recipe.train.max_steps) if recipe.train.max_steps else steps


def lr_factor(step: int, total: int, recipe: Recipe) -> float:
    """Share of the peak learning rate in optimizer step `step` (from 0): linear warm-up, then the schedule."""
    options = recipe.train
    warmup = (
        options.warmup if isinstance(options.warmup, int) and options.warmup >= 1 else round(options.warmup * total)
    )
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[options.schedule]
    return options.min_lr + (1 - options.min_lr) * shape


def _set_lr(run: Run, total: int) -> None:
    factor = lr_factor(run.step, total, run.recipe)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor * (run.step / total >= group.get("starts", 0.0))


def _noise(run: Run, features: Any, micro: int) -> Tensor | None:
    width = run.recipe.objective.feature_noise
    if not width:
        return None
    size = features.final.shape[-1] + (0 if features.taps is None else features.taps.shape[-1])
    generator = torch.Generator(features.final.device).manual_seed(_key(run, micro))
    noise = torch.rand(*features.final.shape[:2], size, generator=generator, device=features.final.device)
    return ((noise - 0.5) * 2 * width).to(features.final.dtype)


def _key(run: Run, micro: int) -> int:
    """A seed for what is random in one micro-batch."""
    return ((run.recipe.seed * 1_000_003 + run.step) * 1009 + run.accelerator.process_index) * 101 + micro


def _log(run: Run, bar: tqdm, losses: Tensor, hits: Tensor, norm: float) -> None:
    values = {f"train/loss_{j}": x for j, x in enumerate(losses.tolist())}
    values |= {f"train/hit_{j}": x for j, x in enumerate(hits.tolist())}
    values |= {"train/lr": run.optimizers[0].param_groups[0]["lr"], "train/grad_norm": norm}
    bar.set_postfix({"loss": f"{losses.mean().item():.3f}", "hit0": f"{hits[0].item():.2f}"})
    run.accelerator.log(values, step=run.step)


def _validate(run: Run, bar: tqdm, total: int) -> None:
    """Estimates the acceptance length, now and then decodes for real, and keeps the best drafter."""
    recipe, accelerator = run.recipe, run.accelerator
    bar.set_description(f"{run.drafter.kind}, validating")
    run.objective.eval()
    every = recipe.train.decode_every
    due = every and (run.step % every == 0 or run.step == total)
    with adapted(run.drafter):  # the target that it will serve
        estimate: Estimate = validate(run.drafter, run.target, run.validation_rows, run.validation_features, recipe)
        results: dict[str, Any] = {"step": run.step, **estimate.to_dict()}
        if run.decode is not None and due and accelerator.is_main_process:
            results["tau_decoded"] = run.decode(run.drafter, run.target, recipe.train.decode_prompts)
    if recipe.backbone.r:
        results["target_kl"] = target_kl(run.drafter, run.target, run.validation_rows, recipe.train.micro_batch)
    run.objective.train()
    accelerator.log({f"validation/{k}": v for k, v in results.items() if isinstance(v, float)}, step=run.step)
    # With a fixed draft length a step costs the same whatever the weights, so more tokens a step is more speed.
    if every and run.decode:
        score = results.get("tau_decoded", -math.inf)  # scores of two kinds are not compared
    else:  # without rows to judge by, the latest is the best
        score = estimate.tau if len(run.validation_rows) else float(run.step)
    if accelerator.is_main_process:
        decoded = f", decoded {results['tau_decoded']:.2f}" if "tau_decoded" in results else ""
        depths = estimate.survival_text()
        bar.write(f"step {run.step}: acceptance length {estimate.tau:.3f} (estimate{decoded}), by depth {depths}")
    if score > run.best:
        run.best = score
        run.history["results"] = results
        if accelerator.is_main_process:
            run.drafter.meta["rank_hits"] = estimate.rank_hits
            save_drafter(
                run.drafter, run.output, run.target, {**run.facts, "rank_hits": estimate.rank_hits, "results": results}
            )
    bar.set_description(run.drafter.kind)
    accelerator.wait_for_everyone()


def _save(run: Run) -> None:
    if run.accelerator.is_main_process:
        facts = {"step": run.step, "best": run.best, "history": run.history, "recipe": run.recipe.to_dict()}
        facts |= {"embed_scale": getattr(run.drafter, "embed_scale", 1.0)}
        save_state(run.output, run.drafter, run.optimizers, facts)


# ---- set-up


def _setup(
    recipe: Recipe,
    target: Target,
    accelerator: Accelerator,
    decode: Decode | None,
    state: tuple[dict[str, Tensor], dict[str, Any]] | None,
) -> Run:
    with accelerator.main_process_first():
        if accelerator.is_main_process and recipe.data.source == "synthesis":
            synthesize(recipe, target)
        rows, validation, report = load_rows(
            recipe, target.tokenizer, vocab_size=target.vocab_size, max_positions=target.max_positions
        )
    drafter, vocab_facts = make_drafter(recipe, target, rows, state)
    if accelerator.is_main_process:
        print(report)
        size = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
        print(
            f"{drafter.kind}: {size / 1e6:.1f} M trainable parameters; draft vocabulary {vocab_facts['size']}", end=""
        )
        print(f" ({vocab_facts['coverage']:.1%} covered)")
    store = make_store(target, rows, drafter, recipe, accelerator.is_main_process)
    held_out = make_store(target, validation, drafter, recipe, accelerator.is_main_process, not recipe.backbone.r)
    check_features(target, store)  # before hours are spent on them, and again as they come back from disk
    text = Path(recipe.synthesis.folder) if recipe.data.source == "synthesis" else None
    with accelerator.main_process_first():
        store.prepare(text)
        held_out.prepare(text)
        if text and accelerator.is_main_process:
            drop_written(text)
    check_features(target, store)
    objective = make_objective(drafter, target, recipe)
    optimizers = make_optimizers(drafter, recipe)
    if state:
        restore(state[0], drafter, optimizers)
    objective, *optimizers = accelerator.prepare(objective, *optimizers)
    facts = {
        **provenance(recipe.to_dict()),
        "data": {
            "samples": len(rows),
            "tokens": report.tokens,
            "supervised": report.supervised,
            "dropped": dict(report.dropped),
        },
        "draft_vocab": vocab_facts,
        "processes": accelerator.num_processes,
    }
    run = Run(
        recipe, target, accelerator, drafter, objective, optimizers, rows, validation, store, held_out, facts, decode
    )
    if state:
        run.step, run.best, run.history = state[1]["step"], state[1]["best"], state[1]["history"]
        if isinstance(drafter, EagleDrafter):  # 1.0 in states from before there was a scale
            drafter.embed_scale = state[1].get("embed_scale", 1.0)
    _start_trackers(run)
    if accelerator.is_main_process and run.step:
        print(f"continuing {recipe.output} at step {run.step}")
    return run


def _start_trackers(run: Run) -> None:
    output, accelerator, recipe = run.output, run.accelerator, run.recipe
    if accelerator.is_main_process:
        (output / RESOLVED).write_text(json.dumps(recipe.to_dict(), indent=2) + "\n")
        JsonLines.cut(output, run.step)
    init = {"wandb": {"mode": recipe.train.wandb_mode, "dir": str(output), "name": output.name}}
    accelerator.init_trackers("headstart", init_kwargs=init)
