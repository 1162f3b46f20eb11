"""Prints the directory of a run, for the Makefile, which samples from the run that it has just made."""

from recipe.config import parse_config

print(parse_config().run.output_dir)
