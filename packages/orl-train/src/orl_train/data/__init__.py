"""Training data: tokenizer, tasks and noisy batches."""
