"""A result in one line."""

from dlmrt.result import GenerationResult


def summary(result: GenerationResult) -> str:
    """Tokens, tokens per forward, forwards, tokens per second and why the answer ended."""
    return (
        f"{len(result.token_ids)} tokens · {result.tpf:.2f} tokens per forward · {result.forwards} forwards · "
        f"{result.tokens_per_second:.0f} tokens/s · {result.finish_reason}"
    )
