"""MIME bundles of values, for the shell that has no IPython to make them.

Owns: which of Jupyter's `_repr_*_` methods count, and what they may return. Must not know: frames, cells.
"""

import sys

_METHODS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("application/pdf", "_repr_pdf_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
)

# Nothing can have given these a method, so nobody has to ask.
_BARE = frozenset((int, str, float, bool, complex, bytes, bytearray, list, tuple, dict, set, frozenset, type, range))


def _ask(value, method, *args, **kwargs):
    """What a display method answers, or None. A display method that fails must not take the value with it."""
    found = getattr(type(value), method, None)
    if found is None:
        return None
    try:
        return found(value, *args, **kwargs)
    except NotImplementedError:
        return None
    except Exception as error:
        print(f"{type(value).__name__}.{method} failed: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def _png_of_figure(value):
    """A figure of matplotlib has no display method for it: IPython has a formatter of its own."""
    figures = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, getattr(figures, "Figure", ())):
        return None
    if not value.axes and not value.lines:
        return None
    import io

    file = io.BytesIO()
    value.savefig(file, format="png", dpi=value.dpi, bbox_inches="tight")
    return file.getvalue()


def bundle_of(value):
    """(data, metadata) of a value; None when it has displayed itself. Raises what `repr` raises."""
    kind = type(value)
    if kind in _BARE:
        return {"text/plain": repr(value)}, {}
    if getattr(kind, "_ipython_display_", None) is not None:
        try:
            value._ipython_display_()
            return None
        except NotImplementedError:
            pass
    data, metadata = {}, {}
    whole = _ask(value, "_repr_mimebundle_", include=None, exclude=None)
    if isinstance(whole, tuple) and len(whole) == 2:
        whole, metadata = whole
    if isinstance(whole, dict):
        data = dict(whole)
    for mime, method in _METHODS:
        if mime in data:
            continue
        part = _ask(value, method)
        if isinstance(part, tuple) and len(part) == 2:
            part, metadata[mime] = part
        if part is not None:
            data[mime] = part
    if "image/png" not in data:
        png = _png_of_figure(value)
        if png is not None:
            data["image/png"] = png
    if "text/plain" not in data:
        data = {"text/plain": repr(value), **data}
    return data, metadata
