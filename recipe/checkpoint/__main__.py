"""`python -m recipe.checkpoint`: list or verify the checkpoints of a run."""

import sys

from recipe.checkpoint.format import main

sys.exit(main())
