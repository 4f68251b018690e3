"""``/``: one page for people. It loads nothing from elsewhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from html import escape
from string import Template
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from serving.requests.context import Context, Here, server_version

router = APIRouter(tags=["operation"])

SHOWN_TASKS = 200
SHOWN_LABELS = 8
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="10"><title>jpets</title><style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid #8884; vertical-align: top }
.n { text-align: right; font-variant-numeric: tabular-nums }
.yes { color: #188038 } .no { color: #c5221f } small { opacity: .7 }
</style></head><body>
<h1>jpets <small>$version</small></h1>
<p><b class="$ready_class">$ready</b> · <b class="$live_class">$live</b> · backbone <code>$backbone</code>
 · <a href="/docs">API</a> · <a href="/metrics">metrics</a></p>
<h2>Traffic</h2><table>$counters</table>
<h2>Tasks</h2><table><tr><th>id</th><th class="n">version</th><th>methods</th><th>head</th><th>labels</th>
<th class="n">KiB</th></tr>$tasks</table>$more
</body></html>
""")


@router.get("/", response_class=HTMLResponse, summary="Status page")
async def status_page(here: Here) -> HTMLResponse:
    found, following = await asyncio.to_thread(here.listed, SHOWN_TASKS)
    services, first = here.services, here.services.first
    what, done, total = first.phase
    ready = "ready" if first.ready else f"not ready ({what} {done}/{total})" if total else f"not ready ({what})"
    page = PAGE.substitute(
        version=escape(server_version()),
        ready=escape(ready),
        ready_class="yes" if first.ready else "no",
        live="live" if services.live else "not live",
        live_class="yes" if services.live else "no",
        backbone=escape(first.backbone.name),
        counters="".join(f'<tr><td>{escape(k)}</td><td class="n">{v}</td></tr>' for k, v in _counters(here).items()),
        tasks="".join(_row(stored.id, stored.version, stored.metadata, stored.bytes) for stored in found),
        more="<p>… and more: GET /v1/tasks lists them all.</p>" if following else "",
    )
    return HTMLResponse(page, headers=HEADERS)


def _counters(here: Context) -> dict[str, str]:
    engines = [engine.report() for engine in here.services.started if "admin" in here.asker.scopes]
    if not engines:
        return {}
    devices = [device for engine in engines for device in engine.devices]
    answers = sum((Counter(device.answers) for device in devices), Counter[str]())
    computed, real = sum(device.computed_tokens for device in devices), sum(device.real_tokens for device in devices)
    measured = sum(device.costs.measured for device in devices)
    classes = measured + sum(device.costs.coarse for device in devices)
    return {
        "queries answered": f"{answers['ok']:,}",
        "queries failed": f"{answers.total() - answers['ok']:,}",
        "queries waiting": f"{sum(device.waiting for device in devices):,}",
        "batches": f"{sum(device.batches for device in devices):,}",
        "tokens that were not padding": f"{real / computed:.0%}" if computed else "-",
        "compilations that a query waited for": f"{sum(device.request_path_compiles for device in devices):,}",
        "kinds of deltas with measured costs": f"{measured:,} of {classes:,}",
        "devices": f"{max(len(engine.devices) for engine in engines):,}",
        "tasks on them": f"{sum(device.tasks.tiers['device'] for device in devices):,}",
        "tasks that are known": f"{sum(engine.known for engine in engines):,}",
    }


def _row(id: str, version: int, document: Mapping[str, Any], size: int) -> str:
    methods = ", ".join(delta["method"] for delta in document["deltas"]) or "none"
    labels = list(document.get("labels", ()))
    shown = ", ".join(labels[:SHOWN_LABELS]) + (f" … ({len(labels)})" if len(labels) > SHOWN_LABELS else "")
    return (
        f'<tr><td><code>{escape(id)}</code></td><td class="n">{version}</td><td>{escape(methods)}</td>'
        f'<td>{escape(document["head"]["type"])}</td><td>{escape(shown)}</td><td class="n">{size / 1024:,.0f}</td></tr>'
    )
