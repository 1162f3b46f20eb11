"""Evaluation through `transformers` alone: of recipe/ it imports recipe/utils only."""
