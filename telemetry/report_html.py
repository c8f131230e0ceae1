"""The report as one self-contained page: inline pictures, no scripts, no requests, readable on a phone."""

from __future__ import annotations

from html import escape

from telemetry.report import Report, Section
from telemetry.report_text import CHANGE_COLUMNS, cell, change_rows
from telemetry.svg import bands, chart

_STYLE = """
:root{--ink:#1b1f24;--paper:#fff;--soft:#57606a;--rule:#d0d7de;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#a40e26;--c5:#6e7781;--c6:#1b7c83;--c7:#7d4e00}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--soft:#9da7b3;--rule:#30363d;
--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#ff7b72;--c5:#b1bac4;--c6:#39c5cf;--c7:#d29922}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .3rem}p{margin:.2rem 0;color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{color:var(--soft)}
dd{margin:0;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem}caption{text-align:left;color:var(--soft)}
th,td{padding:.2rem .6rem;border-bottom:1px solid var(--rule);text-align:left;white-space:nowrap}
td.wide{white-space:normal}td.n{text-align:right;font-variant-numeric:tabular-nums}svg{width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;margin:0;padding:0;font-size:.85rem}.key{width:30px}
.axis{font-size:11px;fill:var(--soft)}.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}.mark{stroke:var(--c4);stroke-width:1.5;stroke-dasharray:3 3}
@media (max-width:600px){.axis{font-size:18px}.line{stroke-width:3}}
.line{fill:none;stroke-width:2}.area{stroke:none;opacity:.85}.probe{opacity:.45}
""" + "".join(
    f".s{number}{{fill:var(--c{number})}}.s{number}.line{{fill:none;stroke:var(--c{number})}}" for number in range(8)
)


def render(report: Report) -> str:
    """The whole page."""
    end = max((picture.seconds[-1] for picture in report.charts if picture.seconds), default=0.0)
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
    charts = "".join(f"<h2>{escape(picture.title)}</h2>{chart(picture, report.marks)}" for picture in report.charts)
    body = (
        f"<h1>Run {escape(report.run_id)}</h1><dl>{facts}</dl>{_levers(report)}{charts}"
        f"<h2>Gate over time</h2><p>Pale blocks are probes; hold a block for its reason.</p>{bands(report.bands, end)}"
        + "".join(_section(section) for section in report.sections)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Metrale: run {escape(report.run_id)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _levers(report: Report) -> str:
    if not report.changes:
        return ""
    rows = [
        "<tr>" + "".join(f'<td class="wide">{escape(text)}</td>' for text in row) + "</tr>"
        for row in change_rows(report)
    ]
    heads = "".join(f"<th>{escape(name)}</th>" for name in CHANGE_COLUMNS)
    return (
        "<h2>Levers</h2><p>Numbers are the dashed marks in the pictures. Effects compare decode steps before and after"
        " at equal batch width.</p>"
        f'<div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'
    )


def _section(section: Section) -> str:
    head = f"<h2>{escape(section.title)}</h2><p>{escape(section.note)}</p>"
    if not section.rows:
        return head + '<p class="empty">Nothing to show.</p>'
    columns = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in section.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td{_numeric(value)}>{escape(cell(value))}</td>" for value in row) + "</tr>"
        for row in section.rows
    )
    return f'{head}<div class="scroll"><table><tr>{columns}</tr>{rows}</table></div>'


def _numeric(value: object) -> str:
    return ' class="n"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
