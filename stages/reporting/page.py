"""HTML pages from the templates of this folder."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from stages.reporting.numbers import number, signed


def render(template: str, **values: Any) -> bytes:
    """Fill in a template. Every value is escaped."""
    environment = Environment(
        loader=PackageLoader("stages.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "signed": signed}
    return environment.get_template(template).render(values).encode()
