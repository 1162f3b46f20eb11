"""Python imports this module as it starts, where PYTHONPATH names its folder: it loads the plugin into every process of
a run that is launched as a user launches it."""

import os

if os.environ.get("RECIPE_FAULT"):
    from tests.faults import plugin

    plugin.install(os.environ["RECIPE_FAULT"])
