"""Evaluation through `transformers` alone: nothing here imports the training code."""
