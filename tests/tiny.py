"""Tiny tokenizers (and models) built from scratch, so that tests need neither network nor downloads."""

from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from drafters.target import Target, wrap_target

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """\
{{ '<|begin_of_text|>' }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

GEMMA = """\
{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

INST = """\
{{ '<s>' }}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "inst": INST}
"""Chat templates in the shape of four model families; none carries `{% generation %}` tags."""

END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "inst": "</s>"}
"""The token that each template puts after an assistant's text."""

SPECIAL = (
    ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
    + ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    + ("<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>")
)

_CORPUS = (
    "the quick brown fox jumps over the lazy dog while a small model writes the training text for its own drafter",
    "user assistant system hello how are you today I am fine thank you what is the capital of France it is Paris",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen",
    "speculative decoding drafts several tokens and lets the target verify them all at once without changing the text",
    "def add(left, right): return left + right; for item in range(10): print(item) # counts from 0 to 9",
)


@cache
def _byte_level_bpe(vocab_size: int) -> str:
    """Returns a byte-level BPE of exactly `vocab_size` entries as JSON; the same one every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise AssertionError(f"the corpus gives {tokenizer.get_vocab_size()} entries, not {vocab_size}")
    return tokenizer.to_str()


def make_tokenizer(template: str | None = "chatml", vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Builds a deterministic byte-level BPE tokenizer that has every template's special tokens.

    Args:
        template: a key of `TEMPLATES`, a Jinja template itself, or None for a tokenizer without one.
        vocab_size: exact number of entries, special tokens included (269 to about 600).

    Returns:
        A tokenizer whose eos is the template's end of turn (`<|im_end|>` by default) and whose pad token is `<|pad|>`.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_byte_level_bpe(vocab_size)),
        eos_token=END_OF_TURN.get(template or "chatml", "<|im_end|>"),
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = None if template is None else TEMPLATES.get(template, template)
    return tokenizer


def make_model(family: str = "llama", vocab_size: int = 512, layers: int = 4, seed: int = 0, **overrides: Any) -> Any:
    """A random causal LM in float32: "llama", "qwen3", "mistral" (window 8), "gemma2" (mixed, window 8)."""
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # wide, so that greedy choices are far from ties
    }
    if family in ("mistral", "gemma2"):
        shape["sliding_window"] = 8
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **(shape | overrides))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_target(family: str = "llama", template: str | None = "chatml", seed: int = 0, **overrides: Any) -> Target:
    """A tiny random target with a real tokenizer and chat template."""
    model = make_model(family, seed=seed, **overrides)
    tokenizer = make_tokenizer(template, vocab_size=model.config.vocab_size)
    model.generation_config.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
    return wrap_target(model, tokenizer, f"tiny-{family}")
