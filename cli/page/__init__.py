"""An artifact as one page of HTML that needs nothing beside it: `page`."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from fxc.cache import Artifact
from fxc.cli import render
from fxc.cli.page.pieces import anchor
from fxc.cli.page.view import View, layout, view

__all__ = ["page", "render_page"]


def page(artifact: Artifact) -> str:
    """The page: partition, pieces, passes, binaries, build, proof and key. The same artifact gives the same text.

    Raises:
        DamagedError: a file that it shows is missing or altered.
    """
    code, graph, pieces = (
        _source(artifact, name) for name in ("transformed_code.py", "computation_graph.py", "pieces.py")
    )
    return render_page(view(artifact.manifest, code, graph, pieces))


def render_page(shown: View) -> str:
    """The text of a page. What it shows is escaped, and the browser is told to run the page's own script alone."""
    import jinja2  # takes as long as all that `inspect` needs otherwise

    loader = jinja2.FunctionLoader(_text)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    filters = {"anchor": anchor, "layout": layout, "bytes": render.size_bytes, "duration": render.duration}
    environment.filters.update(filters, sha256=_sha256, error=_error)
    return environment.get_template("page.html").render(view=shown, style=_text("style.css"), script=_text("script.js"))


def _text(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _error(value: float) -> str:
    """`2.5e-07`, `0`."""
    return f"{value:.1e}" if value else "0"


def _sha256(text: str) -> str:
    """As a content security policy has it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _source(artifact: Artifact, name: str) -> str:
    """A file of the first rank, as all ranks have the same graph; empty where an older build made none."""
    ranks = artifact.manifest.ranks
    places = [f"{first}/{name}" for first in sorted(ranks)[:1] if f"{first}/{name}" in ranks[first].files]
    return "".join(artifact.read(place).decode() for place in places)
