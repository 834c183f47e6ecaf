"""Pretraining of encoder-only language models, from raw text to a released-format checkpoint."""
