"""The page of zarrfs info --html: one self-contained file with a map of the chunks of each array."""

from __future__ import annotations

import html
from typing import Any

from zarrfs.cli import nodetext
from zarrfs.config.values import human

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --soft: #888; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 64em; padding: 0 1em; }}
h1 {{ font-size: 1.3em; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.05em; margin: 0 0 .3em; overflow-wrap: anywhere; }}
section {{ border-top: 1px solid var(--line); padding: .8em 0; }}
section.array {{ display: grid; grid-template-columns: minmax(20em, 1fr) auto; gap: .4em 1.5em; }}
section h2 {{ grid-column: 1 / -1; }}
dl {{ display: grid; grid-template-columns: 7em 1fr; margin: 0; gap: .1em .8em; align-content: start; }}
dt, .note {{ color: var(--soft); }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
figure svg {{ border: 1px solid var(--line); max-width: 100%; }}
figure {{ margin: 0; text-align: right; }} figcaption {{ color: var(--soft); font-size: .85em; }}
.bad {{ color: #c33; }}
.legend i {{ display: inline-block; width: 1em; height: 1em; vertical-align: -.15em; }}
</style></head><body>
"""
# of levels 0 (no chunk of a cell exists) to 8 (all exist), distinguishable also without colour vision
_COLOURS = ("#d9d9de", "#cfe8b5", "#b1dcae", "#8fcfa9", "#6bbfa6", "#48aba2", "#2c909b", "#1c718d", "#17507a")
_LEGEND = (
    '<p class="note legend">Maps of chunks: '
    + "".join(f'<i style="background: {colour}"></i>' for colour in _COLOURS)
    + " from none to all of the chunks that a cell stands for.</p>\n"
    '<svg width="0" height="0"><pattern id="lines" width="1" height="1" patternUnits="userSpaceOnUse">'
    '<path d="M1 0v1h-1" fill="none" stroke="canvas" stroke-width=".15"/></pattern></svg>\n'
)


def page(about: dict[str, Any]) -> str:
    """Render the data of `zarrfs info --json` as a page with maps."""
    nodes = about["nodes"]
    title = html.escape(str(about.get("source") or about.get("key") or "/"))
    parts = [_HEAD.format(title=title), f"<h1>{title}</h1>\n", _summary(about, nodes), _LEGEND]
    parts += [_section(node) for node in nodes]
    return "".join([*parts, "</body></html>\n"])


def _summary(about: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    arrays = [node for node in nodes if "shape" in node]
    logical, stored = (sum(node.get(name) or 0 for node in arrays) for name in ("logical_bytes", "stored_bytes"))
    initialised = sum(node["chunks_initialised"] for node in arrays)
    total = sum(node["chunks_total"] for node in arrays)
    rows = {
        "kind": about.get("kind"),
        "nodes": f"{len(arrays):,} arrays, {sum(node['type'] == 'group' for node in nodes):,} groups",
        "chunks": f"{initialised:,} of {total:,}",
        "size": f"{human(stored)} stored, {human(logical)} decoded",
        "warnings": "; ".join(about.get("warnings") or ()),
    }
    return _facts(rows)


def _facts(rows: dict[str, Any]) -> str:
    lines = (
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>" for name, value in rows.items() if value
    )
    return f"<dl>{''.join(lines)}</dl>\n"


def _section(node: dict[str, Any]) -> str:
    name = html.escape("/" + node["path"])
    problem = f'<p class="bad">{html.escape(node["problem"])}</p>' if node.get("problem") else ""
    if "shape" not in node:
        return f'<section><h2>{name} <span class="note">{node["type"]}</span></h2>{problem}</section>\n'
    rows = {
        "shape": nodetext.extents(node["shape"]),
        "dtype": nodetext.dtype(node["dtype"]),
        "chunks": nodetext.chunks(node),
        "codecs": ", ".join(nodetext.codecs(node)),
        "initialised": nodetext.initialised(node),
        "decoded": nodetext.size(node["logical_bytes"]),
        "stored": nodetext.size(node["stored_bytes"]) + (f" (1 : {node['ratio']:.1f})" if node["ratio"] else ""),
        "format": node["generation"],
    }
    return f'<section class="array"><h2>{name}</h2>{_facts(rows)}{_map(node)}{problem}</section>\n'


def _map(node: dict[str, Any]) -> str:
    """Draw the cells of a map, of which each run of equal levels in a row is a rectangle."""
    found, grid = node["map"], node["grid"]
    if not found["cells"]:
        return '<p class="note">no chunks</p>'
    rows, columns, at = found["rows"], found["columns"], 0
    shapes: dict[str, str] = {}
    for run in found["cells"].split(" "):
        level, _, count = run.partition("x")
        end = at + int(count or 1)
        while at < end:
            row, column = divmod(at, columns)
            width = min(end - at, columns - column)
            shapes[level] = shapes.get(level, "") + f"M{column} {row}h{width}v1h-{width}z"
            at += width
    drawn = [f'<path fill="{_COLOURS[int(level)]}" d="{shape}"/>' for level, shape in shapes.items() if level != "-"]
    cell = max(2, min(16, 384 // columns, 256 // rows))
    lines = ['<rect width="100%" height="100%" fill="url(#lines)"/>'] if cell > 5 else []
    size = f'width="{columns * cell}" height="{rows * cell}" viewBox="0 0 {columns} {rows}"'
    split = found["row_dimensions"]
    how = f", rows: dimension {_range(0, split)}, columns: {_range(split, len(grid))}" if split else ""
    caption = f"<figcaption>grid {nodetext.extents(grid)}{how}</figcaption>"
    return f'<figure><svg {size} shape-rendering="crispEdges">{"".join([*drawn, *lines])}</svg>{caption}</figure>'


def _range(start: int, stop: int) -> str:
    return str(start) if stop - start == 1 else f"{start} to {stop - 1}"
