"""`python -m recipe.data.prepare`: text to token shards, before training."""

import sys

from recipe.data.prepare.pipeline import main

sys.exit(main())
