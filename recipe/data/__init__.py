"""Text to token shards, and token shards to batches."""
