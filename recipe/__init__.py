"""GPT-2 pre-training recipe: text -> shards -> checkpoints that `transformers` loads."""

__version__ = "0.1.0"
