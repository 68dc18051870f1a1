"""A byte-level BPE tokenizer built from a task's own text.

Numbers are split into groups of at most two digits together with the space before them, and a line break stands alone.
Every byte has a token, so any text can be encoded.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, EOS, MASK = "<pad>", "<eos>", "<mask>"
CHAT_TEMPLATE = "{{ messages[-1]['content'] + '\\n' }}"  # a line break after the last tag would be dropped


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 4096, min_frequency: int = 20) -> Tokenizer:
    """Trains the tokenizer; ids 0, 1, 2 are <pad>, <eos>, <mask>. Deterministic for the same texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d{1,2}|\n"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[PAD, EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The tokenizer_config.json that lets transformers load it and renders a prompt as `{prompt}\\n`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "mask_token": MASK,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
