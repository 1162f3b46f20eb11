"""Prints the output_dir of a command line's run, for the Makefile, which samples from the run it has just trained."""

from recipe.config import parse_config

print(parse_config().run.output_dir)
