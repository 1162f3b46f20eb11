"""Names of recipe.config."""

from recipe.config import AUTO

__all__ = ["AUTO"]
