"""`python -m recipe.data.prepare`: text to token shards, before training."""

import sys

from recipe.data.prepare.pipeline import main
from recipe.redaction import keep_secrets

keep_secrets()
sys.exit(main())
