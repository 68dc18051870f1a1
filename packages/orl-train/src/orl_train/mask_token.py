"""The mask token of a masked-family model that is made from a model without one."""

from collections.abc import Collection

from tokenizers import Tokenizer

from orl_core.errors import ConfigError

DEFAULT_MASK = "<|MASK|>"


def choose_mask_token(
    tokenizer: Tokenizer, rows: int, name: str | None = None, taken: Collection[int] = ()
) -> tuple[str, int]:
    """(name, id) of the mask token; a new name is added to `tokenizer`.

    rows: of the embedding. name: an existing token, or a new one that takes the first row beyond the tokenizer; None
    looks for "<|MASK|>". taken: ids with another purpose, such as those that end an answer.
    Raises ConfigError; the vocabulary is never resized.
    """
    wanted, used = name or DEFAULT_MASK, max(tokenizer.get_vocab().values()) + 1
    index = tokenizer.token_to_id(wanted)
    if index is None and name is not None and used < rows:
        tokenizer.add_special_tokens([name])
        index = tokenizer.token_to_id(name)
    if index is None:
        advice = _advice(tokenizer, rows, used)
        raise ConfigError(f"the masked family needs a mask token and the tokenizer has no {wanted!r}. {advice}")
    if index >= rows:
        raise ConfigError(f"mask token {wanted!r} has id {index}, beyond the {rows} rows of the embedding")
    if index in taken:
        advice = _advice(tokenizer, rows, used)
        raise ConfigError(f"mask token {wanted!r} ends or pads answers of this model. {advice}")
    return wanted, index


def _advice(tokenizer: Tokenizer, rows: int, used: int) -> str:
    special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    text = "Choose one with --mask-token: a token that no text uses"
    if special:
        text += f" (special tokens are {', '.join(special[:20])}{', ...' if len(special) > 20 else ''})"
    if used < rows:
        return f"{text}, or a new name, which takes row {used}, the first of {rows - used} unused rows of the embedding"
    return f"{text}. A new name is not possible: all {rows} rows of the embedding are in use"
