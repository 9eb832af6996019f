"""Where a drafter's inputs come from: the frozen target in process, with a store on disk between epochs.

Rows of the store are computed in fixed blocks, whatever order training visits them in, so a resumed run reads the very
same numbers. Text that the target has just written brings its features with it: they are what the target computed to
write it.

Shapes: B rows, T positions, D hidden width, A tapped layers.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from drafters.errors import UserError
from drafters.files import replacing
from drafters.target import Features, Target
from train.data import EncodedData, collate
from train.recipe import Recipe
from train.sources import read_jsonl

BLOCK_ROWS = 16


@torch.no_grad()
def target_features(target: Target, ids: Tensor, taps: Sequence[int]) -> Features:
    """The target's hidden states for rows padded on the right, (B, T); what stands in the padding is of no use.

    Causal attention keeps padding out of the real positions, so no padding mask is needed.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(len(ids), -1)
    return target.forward(ids, positions, taps=taps)


class FeatureStore:
    """Features of a set of rows: on disk in bfloat16 when they fit, else computed for every batch.

    Args:
        target: the frozen target.
        data: the rows.
        taps: tapped layers.
        folder: where the store is; its name must change whenever the features would.
        limit_gb: the most it may take; 0 keeps nothing.
        main: only the main process writes.
    """

    def __init__(
        self, target: Target, data: EncodedData, taps: Sequence[int], folder: Path, limit_gb: float, main: bool = True
    ):
        self.target, self.data, self.taps, self.folder = target, data, tuple(taps), folder
        self.pad_id = target.tokenizer.pad_token_id or 0
        lengths = [len(ids) for ids in data.rows["input_ids"]]
        self.order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))  # rows of one length pad least
        self.place = {row: divmod(k, BLOCK_ROWS) for k, row in enumerate(self.order)}
        self.lengths = lengths
        self.bytes = sum(lengths) * (1 + len(self.taps)) * target.hidden_size * 2
        self.stored = 0 < self.bytes <= limit_gb * 1e9
        self.ready = False
        self._files: dict[int, dict[str, Tensor]] = {}
        if self.stored and main:
            free = shutil.disk_usage(_existing(folder)).free
            if self.bytes > 0.9 * free:
                raise UserError(
                    f"features of {sum(lengths)} tokens need {self.bytes / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; "
                    "set train.cache_features=false or lower synthesis.tokens"
                )

    def prepare(self, text: Path | None = None) -> None:
        """Fills the store, block by block; a killed run goes on where it stopped.

        Args:
            text: the folder of synthesis, whose features are taken where they lie there.
        """
        if not self.stored:
            return
        written = _written(text) if text else {}
        self.folder.mkdir(parents=True, exist_ok=True)
        blocks = range(0, len(self.order), BLOCK_ROWS)
        missing = [start for start in blocks if not self._complete(start // BLOCK_ROWS)]
        tokens = sum(self.lengths[row] for start in missing for row in self.order[start : start + BLOCK_ROWS])
        with tqdm(total=tokens, unit="tok", desc="target features", dynamic_ncols=True, disable=not missing) as bar:
            for start in missing:
                rows = self.order[start : start + BLOCK_ROWS]
                path = self._path(start // BLOCK_ROWS)
                taps = {*self.taps, *(self._taps(start // BLOCK_ROWS) or ())}  # what another drafter left here stays
                _save(path, self._taken(rows, taps, written) or self._computed(rows, sorted(taps)))
                bar.update(sum(self.lengths[row] for row in rows))
        self.ready = True

    def _computed(self, rows: list[int], taps: list[int]) -> dict[str, Tensor]:
        """Features of a block by reading its rows, one behind the other: (tokens, D) by name."""
        batch = self.data.batch(rows, self.pad_id)
        features = target_features(self.target, batch["input_ids"].to(self.target.device), taps)
        kept = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
        parts = {"final": features.final}
        if features.taps is not None:
            tapped = features.taps.split(self.target.hidden_size, dim=-1)
            parts |= {f"tap_{k}": tap for k, tap in zip(taps, tapped, strict=True)}
        return {name: part[kept.to(part.device)].to(torch.bfloat16).cpu() for name, part in parts.items()}

    def _taken(
        self, rows: list[int], taps: set[int], written: dict[bytes, tuple[Path, int]]
    ) -> dict[str, Tensor] | None:
        """The same from where the text was written; None where any of it is missing."""
        places = [written.get(_digest(self.data[row]["input_ids"])) for row in rows]
        names = ["final", *(f"tap_{k}" for k in sorted(taps))]
        parts: dict[str, list[Tensor]] = {name: [] for name in names}
        for row, place in zip(rows, places, strict=True):
            if place is None:
                return None
            try:
                with safe_open(place[0], framework="pt") as file:
                    if not set(names) <= set(file.keys()):
                        return None
                    for name in names:
                        # the last token was never read; what follows it is not there to be learned
                        read = file.get_slice(name)[place[1] : place[1] + self.lengths[row] - 1]
                        parts[name].append(F.pad(read, (0, 0, 0, 1)))
            except FileNotFoundError:  # another run has taken it and dropped it
                return None
        return {name: torch.cat(part) for name, part in parts.items()}

    def get(self, rows: Sequence[int], ids: Tensor) -> Features:
        """Features of these rows, padded like `ids` (B, T), in the target's dtype and on its device."""
        if not self.ready:
            return target_features(self.target, ids, self.taps)
        D, A = self.target.hidden_size, len(self.taps)
        final = torch.zeros(len(rows), ids.shape[1], D, dtype=torch.bfloat16)
        taps = torch.zeros(len(rows), ids.shape[1], A, D, dtype=torch.bfloat16)
        for i, row in enumerate(rows):
            block, index = self.place[row]
            tensors = self._open(block)
            start = sum(self.lengths[r] for r in self.order[block * BLOCK_ROWS : block * BLOCK_ROWS + index])
            end = start + self.lengths[row]
            final[i, : end - start] = tensors["final"][start:end]
            for a, k in enumerate(self.taps):
                taps[i, : end - start, a] = tensors[f"tap_{k}"][start:end]
        device, dtype = self.target.device, self.target.dtype
        return Features(final.to(device, dtype), taps.flatten(2).to(device, dtype) if A else None)

    def _open(self, block: int) -> dict[str, Tensor]:
        if block not in self._files:  # memory-mapped: the page cache decides what stays in memory
            with safe_open(self._path(block), framework="pt") as file:
                self._files[block] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return self._files[block]

    def _complete(self, block: int) -> bool:
        taps = self._taps(block)
        return taps is not None and taps >= set(self.taps)

    def _taps(self, block: int) -> set[int] | None:
        """Layers that a block holds; None if it is not there whole (safetensors compares length and header)."""
        try:
            with safe_open(self._path(block), framework="pt") as file:
                return {int(name.removeprefix("tap_")) for name in file.keys() if name != "final"}  # noqa: SIM118
        except (FileNotFoundError, SafetensorError):
            return None

    def _path(self, block: int) -> Path:
        return self.folder / f"block-{block:05d}.safetensors"


@torch.no_grad()
def check_features(target: Target, store: FeatureStore) -> None:
    """Gate one of DESIGN.md, decision 11, on the first rows of every run: the features used give the target's logits.

    Raises:
        UserError: zero, constant or non-finite features, or a head that does not reproduce the model's own logits.
    """
    rows = store.order[-2:]
    batch = collate([store.data[row] for row in rows], store.pad_id)
    ids = batch["input_ids"].to(target.device)
    features = store.get(rows, ids)
    length = min(int(batch["lengths"].min()) - 1, 128)  # of written text the last token has none
    parts = {"final hidden state": features.final[:, :length]}
    if features.taps is not None:
        for k, tap in zip(store.taps, features.taps[:, :length].split(target.hidden_size, dim=-1), strict=True):
            parts[f"hidden state of layer {k}"] = tap
    for name, part in parts.items():
        flat = part.float().flatten(0, 1)  # (rows, D)
        if not torch.isfinite(flat).all():
            raise UserError(f"the target's {name} has non-finite values; try target.dtype=float32")
        if len(flat) > 1 and bool((flat.std(0) == 0).all()):
            what = "the same at every position" if flat.any() else "zero"
            raise UserError(f"the target's {name} is {what}; nothing can be learned from it")
    with target.attention_backend("eager"):  # the model's own path, no part of ours
        expected = target.model(input_ids=ids[:, :length]).logits.float()
    ours = target.head(features.final[:, :length]).float()
    gap = float((ours - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    limit = 1e-3 if target.dtype == torch.float32 and not store.ready else 6e-2  # bfloat16 has 8 bits
    if gap > limit:
        raise UserError(
            f"the target's logits, recomputed from the features used, differ by {gap:.1%} of their range "
            f"(limit {limit:.1%}); delete {store.folder}, or report this architecture ({target.config.model_type})"
        )


def taps_to_keep(recipe: Recipe, target: Target) -> tuple[int, ...] | None:
    """Layers to keep while the target writes; None where features are not stored, or would not fit."""
    taps: tuple[int, ...] = ()
    if recipe.drafter.kind == "eagle3":
        taps = target.check_taps(recipe.drafter.taps or target.default_taps())  # before hours of writing
    most = 2 * recipe.synthesis.tokens * (1 + len(taps)) * target.hidden_size * 2  # templates are not counted as tokens
    return taps if recipe.train.cache_features and most <= recipe.train.cache_gb * 1e9 else None


def save_written(shard: Path, taps: Sequence[int], rows: Sequence[Tensor]) -> None:
    """Keeps the features of a shard's rows beside it, in their order: (T - 1, 1 + taps, D) each, or none of a row."""
    if rows:
        flat, lengths = torch.cat(list(rows)), torch.tensor([len(row) for row in rows])
        names = ["final", *(f"tap_{k}" for k in taps)]
        tensors = {name: flat[:, i] for i, name in enumerate(names)}
        _save(shard.with_suffix(".safetensors"), {**tensors, "lengths": lengths})


def drop_written(text: Path) -> None:
    """Deletes what `save_written` left, once the stores have it."""
    for file in text.glob("shard-*.safetensors"):
        file.unlink()


def _written(text: Path) -> dict[bytes, tuple[Path, int]]:
    """Where each row's features lie: file and first row in it."""
    places: dict[bytes, tuple[Path, int]] = {}
    for file in sorted(text.glob("shard-*.safetensors")):
        if not file.with_suffix(".jsonl").is_file():  # killed in between
            continue
        rows = [row["input_ids"] for row in read_jsonl(file.with_suffix(".jsonl")) if row]
        try:
            with safe_open(file, framework="pt") as kept:
                lengths = kept.get_tensor("lengths").tolist()
        except (SafetensorError, FileNotFoundError):  # damaged, or dropped by another run that has it
            continue
        starts = np.cumsum([0, *lengths]).tolist()
        for ids, length, start in zip(rows, lengths, starts, strict=False):
            if length == len(ids) - 1:
                places[_digest(ids)] = file, start
    return places


def _digest(ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(ids, dtype=np.int64).tobytes()).digest()


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    with replacing(path) as file:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


def feature_key(target: Target, data: EncodedData) -> str:
    """Names a store by the target and the rows; drafters that tap different layers share it."""
    digest = hashlib.sha256(json.dumps([target.fingerprint["weights"], str(target.dtype), data.key]).encode())
    for part in data.rows.with_format("numpy").iter(batch_size=1024):  # two splits of one source may look alike
        digest.update(np.concatenate(part["input_ids"]).tobytes())
    return digest.hexdigest()[:16]


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
