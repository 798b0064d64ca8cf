"""The page: one HTML file without scripts, other files or addresses."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stages.reporting.curves import Curve
from stages.reporting.numbers import number, signed


def render(**values: Any) -> bytes:
    """Fill in ``templates/page.html``. Every value is escaped."""
    environment = Environment(
        loader=PackageLoader("stages.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "signed": signed, "svg": _svg}
    return environment.get_template("page.html").render(values).encode()


def _svg(curve: Curve) -> Markup:
    # The only values in it are numbers and the names of axes in the code.
    return Markup(curve.svg())
