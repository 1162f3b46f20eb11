"""Python imports this module when it starts with this folder on PYTHONPATH: it installs the plugin in every process of
a run that is launched as a user launches it."""

import os

if os.environ.get("RECIPE_FAULT"):
    from tests.faults import plugin

    plugin.install(os.environ["RECIPE_FAULT"])
