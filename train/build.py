"""What a recipe asks for, made: accelerator, drafter, optimizers, features, log; and the checks before any work."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor

from drafters.build import TrainedDrafter, build_eagle, build_medusa
from drafters.checkpoint import load_drafter
from drafters.eagle import NORMS, EagleDrafter
from drafters.errors import UserError
from drafters.files import CONFIG, WEIGHTS
from drafters.medusa import MedusaDrafter
from drafters.packing import native_bf16
from drafters.target import Target
from drafters.vocab import choose_draft_vocab, coverage
from train.data import EncodedData
from train.features import FeatureStore, feature_key
from train.objectives import Objective
from train.recipe import DrafterOptions, Recipe

RESOLVED = "recipe.resolved.json"


def make_accelerator(recipe: Recipe) -> Accelerator:
    """The recipe's precision and trackers; processes may wait for days while the main one writes text."""
    options = recipe.train
    mode = options.mixed_precision
    if mode == "auto":
        mode = "bf16" if torch.cuda.is_available() or native_bf16(torch.device("cpu")) else "no"
    trackers = [JsonLines(Path(recipe.output)) if t == "jsonl" else t for t in options.trackers]
    return Accelerator(
        mixed_precision=mode,
        log_with=trackers,
        project_dir=recipe.output,
        cpu=recipe.target.device == "cpu",
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))],
    )


def check_before_data(recipe: Recipe, target: Target, processes: int) -> None:
    """Refuses all that can be refused before data is made, which may take hours."""
    options = recipe.train
    if options.global_batch % (options.micro_batch * processes):
        raise UserError(
            f"train.global_batch={options.global_batch} is not a multiple of train.micro_batch={options.micro_batch} x "
            f"{processes} processes; lower train.micro_batch"
        )
    if recipe.data.max_length > target.max_positions:
        raise UserError(
            f"data.max_length={recipe.data.max_length} exceeds the target's {target.max_positions} positions; lower it"
        )
    vocab = recipe.drafter.draft_vocab
    if isinstance(vocab, int) and vocab > target.vocab_size:
        raise UserError(
            f"drafter.draft_vocab={vocab} exceeds the target's {target.vocab_size} tokens; lower it or set null"
        )
    if target.lm_head.weight.numel() == 0:
        raise UserError("the target's head is empty in this process (sharded parameters?); load the target unsharded")
    _check_output(recipe)
    if recipe.drafter.init:
        _continued(recipe, target)
    else:  # a drafter of two words has all the shapes but one
        _fresh(recipe, target, torch.arange(2, device=target.device))
    for folder in (recipe.output, recipe.train.features):
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)


def _check_output(recipe: Recipe) -> None:
    """A run writes model.safetensors and config.json: it must not replace a target's, or another drafter's."""
    output, init = Path(recipe.output), recipe.drafter.init
    if output.exists() and not output.is_dir():
        raise UserError(f"output={output} is a file; name a folder")
    ours = (output / RESOLVED).is_file() and not (init and Path(init).resolve() == output.resolve())
    found = [name for name in (WEIGHTS, CONFIG) if (output / name).exists()]
    if found and not ours:
        raise UserError(
            f"output={output} holds a model that this run would overwrite ({found[0]}); choose another output"
        )


def check_same_recipe(recipe: Recipe, stored: dict[str, Any], output: Path) -> None:
    """A run folder is continued with its own recipe only; what may change changes no number."""
    free = {"log_every", "save_every_seconds", "trackers", "wandb_mode", "features"}
    now = recipe.to_dict()
    for section, values in now.items():
        for key, value in values.items() if isinstance(values, dict) else [(section, values)]:
            before = stored.get(section, {}).get(key) if isinstance(values, dict) else stored.get(section)
            if before != value and key not in free:
                name = f"{section}.{key}" if isinstance(values, dict) else section
                raise UserError(
                    f"output={output} holds a run with {name}={before}, not {value}; "
                    "choose another output, or delete that folder"
                )


def make_drafter(
    recipe: Recipe, target: Target, rows: EncodedData, state: tuple[dict[str, Tensor], dict[str, Any]] | None
) -> tuple[TrainedDrafter, dict[str, Any]]:
    """The drafter to train and, for the record, its vocabulary's size and coverage of the training text.

    A resumed run keeps the vocabulary it began with, and so does a drafter that is continued.
    """
    counts = rows.supervised_counts(target.vocab_size)
    if recipe.drafter.init:
        drafter = _continued(recipe, target)
        ids = drafter.draft_ids
    else:
        ids = choose_draft_vocab(counts, recipe.drafter.draft_vocab, target.eos_token_ids)
        if state and "draft_ids" in state[0]:
            ids = state[0]["draft_ids"]
        drafter = _fresh(recipe, target, None if ids is None else ids.to(target.device))
    if isinstance(drafter, EagleDrafter) and drafter.kind == "eagle1":
        drafter.scale_embeddings(1 / float(target.embedding.float().square().mean().sqrt()))
    if not recipe.drafter.train_head:
        for name, weight in drafter.named_parameters():
            if _is_head(name, drafter):
                weight.requires_grad_(False)
    share = coverage(counts, None if ids is None else ids.cpu())
    return drafter, {"size": target.vocab_size if ids is None else len(ids), "coverage": share}


def _fresh(recipe: Recipe, target: Target, ids: Tensor | None) -> TrainedDrafter:
    options = recipe.drafter
    torch.manual_seed(recipe.seed)  # the starting weights
    drafter: TrainedDrafter
    if options.kind in ("medusa", "hydra"):
        drafter = build_medusa(
            target, ids, options.heads, options.layers, options.warm_head, options.zero_blocks, options.kind
        )
    else:
        drafter = build_eagle(
            target,
            ids,
            int(options.kind[-1]),
            options.taps,
            options.intermediate_size,
            options.num_heads,
            options.num_kv_heads,
            options.warm_head,
            options.warm_layer,
            _norms(recipe),
        )
    return drafter.to(target.device)


def _continued(recipe: Recipe, target: Target) -> TrainedDrafter:
    options = recipe.drafter
    assert options.init is not None
    drafter = load_drafter(options.init, target, pack=False, dtype=torch.float32)
    if drafter.kind != options.kind:
        raise UserError(f"drafter.init={options.init} is {drafter.kind}, not drafter.kind={options.kind}")
    if getattr(drafter, "adapter", None) is not None:
        raise UserError(
            f"drafter.init={options.init} was trained with an adapter on its target; start from other heads"
        )
    for name, has in _shape(drafter).items():
        asked = getattr(options, name)
        if asked not in (has, getattr(DrafterOptions, name, None)):  # a default asks for nothing
            raise UserError(f"drafter.init={options.init} has drafter.{name}={has}, not {asked}; remove one of them")
    for name in _norms(recipe):
        if not isinstance(drafter, EagleDrafter) or name not in drafter.config.norms:
            raise UserError(f"drafter.init={options.init} was made without drafter.{name}=true; remove one of them")
    return drafter.requires_grad_(True)


def _shape(drafter: TrainedDrafter) -> dict[str, Any]:
    """What a continued drafter is already, by the recipe's keys."""
    if isinstance(drafter, MedusaDrafter):
        return {"heads": drafter.config.heads, "layers": drafter.config.layers}
    llama = drafter.config.llama
    return {
        "taps": drafter.taps,
        "intermediate_size": llama.intermediate_size,
        "num_heads": llama.num_attention_heads,
        "num_kv_heads": llama.num_key_value_heads,
    }


def _norms(recipe: Recipe) -> list[str]:
    return [name for name in NORMS if getattr(recipe.drafter, name)]


def make_objective(drafter: TrainedDrafter, target: Target, recipe: Recipe) -> Objective:
    """What is trained; with `backbone.r`, the target gets an adapter that the drafter then holds."""
    if not recipe.backbone.r:
        return Objective(drafter, target, recipe.objective)
    from train.joint import Backbone, JointObjective  # peft is slow to import

    assert isinstance(drafter, MedusaDrafter)
    torch.manual_seed(recipe.seed)  # the adapter's starting weights
    drafter.adapter = Backbone(target, recipe.backbone)
    return JointObjective(drafter, target, recipe)


def release(drafter: TrainedDrafter) -> None:
    """Gives the target back as it was before `make_objective`."""
    if isinstance(drafter, MedusaDrafter) and drafter.adapter is not None:
        drafter.adapter.close()
        drafter.adapter = None


def make_store(
    target: Target, rows: EncodedData, drafter: TrainedDrafter, recipe: Recipe, main: bool, cache: bool = True
) -> FeatureStore:
    """Where the features of these rows come from; only the main process writes, and nothing where `cache` is false."""
    root = recipe.train.features or f"{recipe.output}/features"
    folder = Path(root) / feature_key(target, rows)
    limit = recipe.train.cache_gb if recipe.train.cache_features and cache else 0.0
    return FeatureStore(target, rows, drafter.taps, folder, limit, main)


def make_optimizers(drafter: TrainedDrafter, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for the layers' matrices if the recipe says so; each group knows its peak learning rate."""
    options = recipe.train
    named = [(n, p) for n, p in drafter.named_parameters() if p.requires_grad]
    adapter = [p for n, p in named if n.startswith("adapter.")]
    named = [(n, p) for n, p in named if not n.startswith("adapter.")]
    matrices = [p for n, p in named if p.dim() == 2 and not _is_head(n, drafter)] if options.optimizer == "muon" else []
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": options.weight_decay, "peak_lr": options.lr},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "peak_lr": options.lr},
        {
            "params": adapter,
            "weight_decay": 0.0,
            "peak_lr": options.lr / recipe.backbone.head_lr_multiple,
            "starts": recipe.backbone.heads_only,  # share of the steps before it learns
        },
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=options.lr, betas=options.betas)
    ]
    if matrices:
        if not native_bf16(matrices[0].device):
            print("warning: train.optimizer=muon computes in bfloat16, which this CPU only emulates: use adamw here")
        group = {"params": matrices, "peak_lr": options.matrix_lr}
        optimizers.append(
            torch.optim.Muon(
                [group], lr=options.matrix_lr, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


def _is_head(name: str, drafter: TrainedDrafter) -> bool:
    if isinstance(drafter, MedusaDrafter):
        return name.split(".")[2] == str(drafter.config.layers)
    return name == "lm_head.weight"


class JsonLines(GeneralTracker):
    """One JSON object a line in `metrics.jsonl`: step, time and values."""

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, folder: Path):
        super().__init__()
        self.path = folder / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        """The resolved recipe lies beside the log already."""

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        """Appends one line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **values}) + "\n")

    @staticmethod
    def cut(folder: Path, step: int) -> None:
        """Drops what was logged after the step that a resumed run starts from."""
        path = folder / "metrics.jsonl"
        if path.is_file():
            lines = [
                line
                for line in path.read_text().splitlines()
                if line.endswith("}") and json.loads(line)["step"] <= step
            ]
            path.write_text("".join(line + "\n" for line in lines))
