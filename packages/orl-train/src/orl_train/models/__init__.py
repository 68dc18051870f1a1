"""Trainable models: each implements orl_core.protocols.Denoiser and saves an ordinary Hugging Face folder."""
