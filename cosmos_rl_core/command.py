"""The command ``cosmos-flows``: checks that ``flows`` and ``stages`` are this project's, then runs ``flows``.

Both names are short, so other distributions may have packages of the same name. This module is in ``cosmos_rl_core``,
a name that no other distribution uses, so Python finds it in any case.
"""

import gc
import importlib.util
import runpy
import sys
from pathlib import Path

from cosmos_rl_core.errors import ConfigError, visible

PACKAGES = ("flows", "stages")
OWNER = "cosmos-rl-flows"
"""Name of this distribution. Each of the packages has it in the docstring of its ``__init__.py``."""


def check_packages() -> None:
    """Raise :class:`ConfigError` if Python finds another project's ``flows`` or ``stages``. Imports neither."""
    home = Path(__file__).parents[1]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None or spec.origin is None else Path(spec.origin)
        ours = origin is not None and origin.parents[1] == home
        if origin is None or not ours or OWNER not in origin.read_text(encoding="utf-8"):
            found = origin or (spec and spec.submodule_search_locations) or "no such package"
            reason = f"must lie in {home}, found {found}"
            advice = f"install {OWNER} into a virtual environment of its own, and check PYTHONPATH"
            other = "another project has a package of this name"
            raise ConfigError(f"the package {name!r} of {OWNER} {reason}: {other}; {advice}")


def main() -> None:
    """Check the packages, then run the command line of ``flows``."""
    try:
        check_packages()
    except ConfigError as error:
        print(visible(str(error)), file=sys.stderr)
        sys.exit(error.exit_code)
    # Imported modules stay to the end; searching them for garbage takes a tenth of the time of a short command.
    gc.disable()
    runpy.run_module(PACKAGES[0], run_name="__main__")
