"""Settings of the pages: `make docs` builds them, and every warning is an error."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent / "_ext")]

project = "cosmos-rl-flows"
author = "the authors of cosmos-rl-flows"
release = version_of("cosmos-rl-flows")
extensions = ["myst_nb", "sphinx.ext.autodoc", "recipe_fields", "reward_table"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["pages.css"]
# For output of commands and trees of folders. Blocks of code name their language.
highlight_language = "none"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# The outputs that a notebook holds are shown; a test runs it.
nb_execution_mode = "off"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# References to types of libraries, and of modules that have no page here, may be unresolved.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(Tensor|device|(dict|tuple)\[str.*|typing\.Literal.*|"
        r"(torch|numpy|np|pd|collections|contextlib|diffusers|pathlib|annotated_types|pydantic|_Pydantic).*|"
        r"ConfigError|ArtifactError|UnavailableError|Coefficients|types\.Annotated|[A-Za-z]*(Options|Config))",
    ),
    ("py:class", r"cosmos_rl_core\.rewards\._batches\.(Item|Found)"),
    ("py:.*", r"(cosmos_rl_core\.(config|sampling|parallel|outside_plugins)|stages\.(execution|artifacts))\..*"),
]
