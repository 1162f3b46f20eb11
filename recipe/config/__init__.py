"""The configuration of a run: its fields and their limits, recipes and the command line, and batch arithmetic."""

from recipe.config.batch import BatchPlan, Due, batch_arithmetic, due_at
from recipe.config.fields import (
    AUTO,
    DEFAULTS,
    FIELDS,
    MIXTURE_PERIOD,
    QUIET,
    ROOT,
    SHAPE_FIELDS,
    UNDECIDED,
    Config,
    DataConfig,
    MixtureEntry,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    data_sets,
    hyperparameters,
)
from recipe.config.mixture import counts_in, counts_of, entries_in
from recipe.config.parse import check_repo_name, parse_config
