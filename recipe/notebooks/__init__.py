"""Notebooks for Kaggle and Colab, and what they share (session.py)."""
