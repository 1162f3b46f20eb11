"""Names of recipe.config."""

from recipe.config import BLOCK, counts_in, counts_of

__all__ = ["BLOCK", "counts_in", "counts_of"]
