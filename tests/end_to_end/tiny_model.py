"""A tiny random Llama with a byte-level tokenizer, saved as a Hugging Face folder: real in every part but its size."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

EOS_ID = 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    max_position_embeddings: int = 4096,
    eos_token_id: int = EOS_ID,
    head_dim: int = 8,
) -> Path:
    """Vocabulary: the 256 bytes by value, <pad> 256, <eos> 257. Deterministic in `seed`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.3,
        eos_token_id=eos_token_id,
        pad_token_id=256,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", chat_template=CHAT_TEMPLATE
    )
