"""The frozen target: any HF causal LM, unmodified, with its hidden states named and its cache under our control.

Shapes: B batch, N new positions, S visible positions, D hidden width, V vocabulary, A tapped layers.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafters import attention as _attention
from drafters.cache import KVCache
from drafters.errors import UserError
from drafters.files import META
from drafters.kernels import compiled
from drafters.llama import FastDecoder, is_supported
from drafters.locate import resolve_path
from drafters.packing import Packed, Product, install, native_bf16, pack_linears, product, remove
from drafters.variants import load_model, refuse, refuse_state, split_adapter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Features:
    """What one forward of the target gives.

    Attributes:
        final: (B, N, D), hidden states after the final norm: what the target's head reads.
        taps: (B, N, A * D), the tapped layers side by side in ascending order, or None.
    """

    final: Tensor
    taps: Tensor | None

    def rows(self, index: slice | list[int]) -> "Features":
        """Those of some positions: (B, M, D) and (B, M, A * D)."""
        return Features(self.final[:, index], None if self.taps is None else self.taps[:, index])

    @staticmethod
    def join(parts: "Sequence[Features]") -> "Features":
        """Positions one behind the other; all parts have the same taps, or none."""
        if len(parts) == 1:
            return parts[0]
        taps = [part.taps for part in parts if part.taps is not None]
        return Features(torch.cat([part.final for part in parts], dim=1), torch.cat(taps, dim=1) if taps else None)


@dataclass
class Target:
    """A frozen causal LM. Build it with `load_target`.

    Tapped layers are counted as in HF `hidden_states`: 0 is the embedding, k the output of the first k blocks.
    The output of the last block is always taken *before* the final norm (HF lists it after; vLLM reads it before);
    the normed one is `Features.final`.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    attention: str
    fingerprint: dict[str, Any] = field(default_factory=dict)
    packed: Packed = field(default_factory=list)
    fast: FastDecoder | None = None
    _fast_head: Product | None = None
    _captured: dict[int, Tensor] = field(default_factory=dict)
    _hooked: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.config = self.model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        self._embedding: Any = self.model.get_input_embeddings()
        self.blocks = _find_blocks(self.decoder, self.config.num_hidden_layers, self.name)
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.lm_head: Any = self.model.get_output_embeddings()
        if self.lm_head is None:
            raise UserError(f"target {self.name!r} has no output head; headstart needs a causal language model")
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.max_positions: int = getattr(self.config, "max_position_embeddings", None) or 1 << 20
        kinds = set(getattr(self.config, "layer_types", None) or [])
        self.window: int | None = getattr(self.config, "sliding_window", None)
        if kinds and "sliding_attention" not in kinds:
            self.window = None
        self.mixed_windows = self.window is not None and kinds >= {"full_attention", "sliding_attention"}
        self.eos_token_ids = _eos_ids(self.model, self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the target's weights."""
        return self.lm_head.weight.dtype

    @property
    def embedding(self) -> Tensor:
        """The input embedding, (V, D)."""
        return self._embedding.weight

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the hidden states; see `FastDecoder`."""
        return self.dtype if self.fast is None else self.fast.dtype

    @property
    def is_packed(self) -> bool:
        """Whether `pack` found something to make faster."""
        return bool(self.packed) or self.fast is not None

    def default_taps(self) -> tuple[int, ...]:
        """The layers that EAGLE-3's own code taps, 2, L // 2 and L - 3; spread out where a small target has none."""
        L = self.num_layers
        taps = (2, L // 2, L - 3)
        if len(set(taps)) == 3 and taps == tuple(sorted(taps)) and taps[0] >= 1:
            return taps
        return tuple(sorted({1, max(1, (L + 1) // 2), L}))

    def check_taps(self, taps: Sequence[int]) -> tuple[int, ...]:
        """Returns the taps as a tuple.

        Raises:
            UserError: ids out of range, repeated or not ascending.
        """
        if not taps or any(not 0 <= k <= self.num_layers for k in taps) or list(taps) != sorted(set(taps)):
            raise UserError(
                f"drafter.taps={list(taps)}: distinct ascending layers of 0..{self.num_layers} are allowed "
                f"(0 = embeddings, k = output of the first k blocks); {list(self.default_taps())} would do"
            )
        return tuple(taps)

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation in the target's own chat template.

        Raises:
            UserError: the tokenizer has no template, the template refuses the messages, or an id is not the model's.
        """
        if not self.tokenizer.chat_template:
            raise UserError(
                f"target {self.name!r} has no chat template; pass token ids, or add a chat_template to its tokenizer"
            )
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=add_generation_prompt, return_dict=False
            )
        except Exception as error:  # jinja raises whatever the template's author chose
            raise UserError(f"the chat template of {self.name!r} refuses these messages: {error}") from error
        if max(ids, default=0) >= self.vocab_size:
            raise UserError(
                f"the tokenizer of {self.name!r} gives token id {max(ids)}, but the model has only {self.vocab_size}; "
                "use the tokenizer that belongs to it"
            )
        return list(ids)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` rows, draft nodes included."""
        return KVCache(capacity)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> Features:
        """One forward of the target's decoder; the head is not applied.

        Args:
            ids: (B, N).
            positions: (B, N), rotary positions (a tree node stands at committed length + depth).
            cache: rows of earlier tokens; this call writes behind them and commits nothing.
            mask: boolean (B or 1, 1, N, S), S = committed + N; None: causal.
            taps: layers to capture.

        Returns:
            Features, see there.
        """
        N = ids.shape[1]
        seen = cache.length if cache is not None else 0
        plain_backend = self.attention == _attention.NAME
        windowed = self.window is not None and seen + N > self.window
        if mask is None and (windowed or (N > 1 and seen > 0) or not plain_backend):
            mask = torch.ones(N, seen + N, dtype=torch.bool, device=ids.device).tril(seen)[None, None]
        masks: Any = mask
        if self.window is not None:
            keys = cache.note_positions(positions) if cache is not None else positions
            if mask is not None:
                near = positions[:, None, :, None] - keys[:, None, None, :] < self.window  # (B, 1, N, S)
                local = mask & near
                masks = {"full_attention": mask, "sliding_attention": local} if self.mixed_windows else local
        if self.attention == "eager" and masks is not None:  # eager adds its mask to the scores
            masks = (
                {k: self._additive(m) for k, m in masks.items()} if isinstance(masks, dict) else self._additive(masks)
            )

        if self.fast is not None and plain_backend and not isinstance(masks, dict):
            return Features(*self.fast(ids, positions, cache, masks, taps))
        for k in taps:
            self._hook(k)
        self._captured.clear()
        out = self.decoder(
            input_ids=ids, position_ids=positions, cache=cache, attention_mask=masks, use_cache=cache is not None
        )
        tapped = torch.cat([self._captured[k] for k in taps], dim=-1) if taps else None  # (B, N, A * D)
        self._captured.clear()
        return Features(out.last_hidden_state, tapped)

    def head(self, hidden: Tensor) -> Tensor:
        """The target's logits for final hidden states: (..., D) -> (..., V), soft cap and scale included."""
        return self.shape_logits((self._fast_head or self.lm_head)(hidden))

    @property
    def logit_scale(self) -> float:
        """What `shape_logits` multiplies by, for a head that has to give the same logits without it."""
        scale, divisor = (getattr(self.config, name, None) for name in ("logit_scale", "logits_scaling"))
        return (1.0 if scale is None else scale) / (1.0 if divisor is None else divisor)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """What some families do behind the head: Cohere multiplies, Granite divides, Gemma caps."""
        scale = getattr(self.config, "logit_scale", None)
        if scale is not None:
            logits = logits * scale
        divisor = getattr(self.config, "logits_scaling", None)
        if divisor is not None:
            logits = logits / divisor
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows of the output head for these token ids, (len(ids), D)."""
        return self.lm_head.weight.detach()[ids]

    @contextlib.contextmanager
    def attention_backend(self, name: str) -> Iterator[None]:
        """Runs the target on another attention backend for a while, as HF's own `generate` needs.

        "sdpa" becomes "eager" for a family that has none, such as Gemma 2.
        """
        name = "eager" if name == "sdpa" and not getattr(self.model, "_supports_sdpa", True) else name
        self.model.set_attn_implementation(name)
        before, self.attention = self.attention, name
        try:
            yield
        finally:
            self.attention = before
            self.model.set_attn_implementation(before)

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[None]:
        """The model as transformers itself would run it, for a while: its own attention and linear products."""
        remove(self.packed)  # the fast loop is passed by: it is no part of the model
        try:
            with self.attention_backend("sdpa"):
                yield
        finally:
            install(self.packed)

    @torch.no_grad()  # not inference mode: weights made here may take part in a backward pass later (Medusa-2)
    def pack(self) -> "Target":
        """Makes steps faster where this machine and model allow; results stay within rounding.

        A Llama-shaped model gets a loop of its own, once that gives the same hidden states as the model's modules;
        any other has its linear products prepacked on a CPU.
        """
        if self.is_packed:
            return self
        if is_supported(self.decoder, self.config) and self.attention == _attention.NAME and not self.mixed_windows:
            expected = self._two_steps()
            self.fast = FastDecoder(self.decoder, self.config)
            gap = (self._two_steps() - expected).norm() / expected.norm()
            if gap <= (1e-4 if self.dtype == torch.float32 else 0.2):  # bfloat16 itself is off by 0.09 in SmolLM2
                self._fast_head = product(self.lm_head.weight, self.lm_head.bias, self.fast.pack)
                return self
            self.fast = None
        if self.device.type == "cpu":
            self.packed = pack_linears(self.model)
        return self

    def _two_steps(self) -> Tensor:
        """Final hidden states of a few tokens, read into a new cache and after what it holds."""
        ids, cache = torch.arange(5, device=self.device)[None], self.new_cache(5)
        first = self.forward(ids[:, :3] % self.vocab_size, ids[:, :3], cache).final
        cache.commit(3)
        mask = torch.ones(2, 5, dtype=torch.bool, device=self.device).tril(3)[None, None]
        second = self.forward(ids[:, 3:] % self.vocab_size, ids[:, 3:], cache, mask).final
        return torch.cat([first, second], dim=1).float()

    def _additive(self, mask: Tensor) -> Tensor:
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(self.dtype).min
        )

    def _hook(self, k: int) -> None:
        if k in self._hooked:
            return
        self._hooked.add(k)

        def capture(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[k] = output[0] if isinstance(output, tuple) else output

        def capture_input(_module: nn.Module, inputs: Any, kwargs: Any) -> None:
            self._captured[k] = inputs[0] if inputs else kwargs["hidden_states"]

        if k == 0:  # what the first block reads: embeddings after any scaling
            self.blocks[0].register_forward_pre_hook(capture_input, with_kwargs=True)
        else:
            self.blocks[k - 1].register_forward_hook(capture)


def load_target(
    name: str,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    attention: str = _attention.NAME,
    trust_remote_code: bool = False,
    pack: bool = True,
) -> Target:
    """Loads a frozen target.

    Args:
        name: a hub id, a folder (a LoRA adapter's too: merged into its base), a GGUF file, or an alias of
            `locate.ALIASES` (a packaged file, converted once).
        dtype: "bfloat16", "float16", "float32", or "auto": bfloat16 where the hardware computes in it, else float32.
        device: None takes CUDA when present.
        attention: "headstart" (ours), or a backend of transformers ("sdpa", "eager").
        trust_remote_code: run model code that ships with the weights; only on the user's word.
        pack: on a CPU, keep a second, prepacked copy of the linear weights (up to 4 GB) for faster steps.

    Raises:
        UserError: not found, not a causal LM, a state that cannot be rolled back, an unknown dtype.
    """
    place = _place(device)
    torch_dtype = resolve_dtype(dtype, place)
    base, adapter = split_adapter(resolve_path(name))
    if os.path.isfile(os.path.join(base, META)):
        raise UserError(f"target.name={name!r} is a drafter's folder; name the model that it drafts for")
    path, own = resolve_path(base), adapter is not None and (adapter / "tokenizer_config.json").is_file()
    code = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **code)
        refuse(config, name)
        model = load_model(path, adapter, config, dtype=torch_dtype, attn_implementation=attention, **code)
        tokenizer = AutoTokenizer.from_pretrained(adapter if own else path, **code)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, ImportError, json.JSONDecodeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"target.name={name!r} cannot be loaded: {first}") from error
    nn.Module.to(model, place)
    target = wrap_target(model, tokenizer, name, attention)
    return target.pack() if pack else target


def wrap_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, attention: str = _attention.NAME
) -> Target:
    """Freezes a model that is already in memory and makes it a target (see `load_target`)."""
    refuse(model.config, name)
    if getattr(model, "_is_stateful", False):
        refuse_state(name, model.config.model_type)
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
    model.eval().requires_grad_(False)
    target = Target(model, tokenizer, name, attention)
    target.fingerprint = _fingerprint(target)
    _check_head(target)
    return target


def _place(device: str | torch.device | None) -> torch.device:
    """The device by its name; tries it, so that one that is not there fails before any weight is read."""
    try:
        own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # a launcher's processes take a GPU each
        place = torch.device(device or (own if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"target.device={str(device)!r} cannot be used: {reason}") from error
    return place


def resolve_dtype(dtype: str, device: str | torch.device | None = None) -> torch.dtype:
    """ "auto" is bfloat16 where the hardware computes in it or `packing` has a kernel for it, else float32.

    Otherwise a CPU emulates every product: one row is still fast, but eight rows cost eight times one.
    """
    if dtype == "auto":
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return torch.bfloat16 if native_bf16(place) or compiled() is not None else torch.float32
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}, auto is allowed")
    return DTYPES[dtype]


def _find_blocks(decoder: nn.Module, count: int, name: str) -> nn.ModuleList:
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return child
    raise UserError(f"target {name!r}: found no list of {count} decoder blocks in {type(decoder).__name__}")


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    ids: list[int] = []
    generation = getattr(model, "generation_config", None)
    for value in (getattr(generation, "eos_token_id", None), tokenizer.eos_token_id):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _fingerprint(target: Target) -> dict[str, Any]:
    """What a drafter was made for: config, tokenizer, template and a hash over sampled weights."""
    shape = {
        k: v for k, v in sorted(target.config.to_dict().items()) if isinstance(v, int | float) and not k.startswith("_")
    }
    vocabulary = json.dumps(sorted(target.tokenizer.get_vocab().items(), key=lambda item: item[1]))
    return {
        "name": target.name,
        "model_type": target.config.model_type,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "config": _sha(json.dumps(shape, sort_keys=True)),
        "tokenizer": _sha(vocabulary),
        "template": _sha(str(target.tokenizer.chat_template)),
        "weights": weights_digest(target.model.state_dict()),
    }


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """A hash over sampled weights; sampled in bfloat16, so that one model in two dtypes has one digest."""
    digest = hashlib.sha256()
    for key, weight in sorted(state.items()):
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 16)][:16].to(torch.bfloat16).view(torch.int16).cpu()
        digest.update(f"{key}{tuple(weight.shape)}{sample.tolist()}".encode())
    return digest.hexdigest()[:16]


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.inference_mode()
def _check_head(target: Target) -> None:
    """`head(final)` must be the model's own logits: families differ in what stands behind the head."""
    if getattr(target.lm_head, "in_features", target.hidden_size) != target.hidden_size:
        raise UserError(
            f"target {target.name!r} ({target.config.model_type}): its head reads {target.lm_head.in_features} "
            f"numbers, its blocks give {target.hidden_size}; this architecture is not supported"
        )
    ids = torch.arange(3, device=target.device)[None] % target.vocab_size
    positions = torch.arange(3, device=target.device)[None]
    with target.attention_backend("eager"):  # an independent path: no mask or kernel of ours
        expected = target.model(input_ids=ids).logits.float()
    ours = target.head(target.forward(ids, positions).final).float()
    scale = expected.abs().max().clamp(min=1.0)
    limit = 1e-4 if target.dtype == torch.float32 else 5e-2
    if not torch.isfinite(expected).all():
        raise UserError(f"target {target.name!r} gives non-finite logits in {target.dtype}")
    if (ours - expected).abs().max() > limit * scale:
        raise UserError(
            f"target {target.name!r} ({target.config.model_type}): its head applied to its final hidden state does not "
            "give its logits; this architecture is not supported"
        )
