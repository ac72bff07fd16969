"""HTTP application on loopback: status page, `/api/status`, `/api/differences`, `/metrics`, `/livez`, `/readyz`.

It only reads and has no login, so it listens on loopback. Requests must name the host that it listens on. Otherwise a
foreign web page could read this one through a DNS name of its own (DNS rebinding).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from atoll.coordinator.controller import Controller
from atoll.coordinator.store.records import Evaluation
from atoll.coordinator.store.store import RoundMeans, Store
from atoll.coordinator.web.status import MAX_LOSSES, RECENT_EVENTS, RECENT_ROUNDS, VERSION, Logs, status
from atoll.core.spec_difference import spec_differences

ASSETS = Path(__file__).parent / "assets"
LOOPBACK = ["localhost", "127.0.0.1", "[::1]"]
MAX_COMPARED = 8  # number of runs
SETTLED_ROUNDS = 64  # number of rounds: a node may report a round later than others
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def create_app(controller: Controller, registry: CollectorRegistry, http_host: str) -> Starlette:
    """The application; it reads from `controller` and `registry`."""
    site = _Site(controller, registry)
    hosts = LOOPBACK if http_host in ("localhost", "127.0.0.1", "::1") else ["*"]
    return Starlette(
        routes=[
            Route("/", site.page),
            Route("/api/status", site.status),
            Route("/api/differences", site.differences),
            Route("/metrics", site.metrics),
            Route("/livez", site.livez),
            Route("/readyz", site.readyz),
            Mount("/assets", StaticFiles(directory=ASSETS)),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)],
    )


class _Site:
    def __init__(self, controller: Controller, registry: CollectorRegistry) -> None:
        self._controller = controller
        self._registry = registry
        # of the last call, by run and round; a deleted run may have had the same name
        self._old_means: dict[tuple[str, int], dict[int, RoundMeans | None]] = {}

    async def page(self, _request: Request) -> Response:
        return FileResponse(ASSETS / "index.html", headers=_HEADERS)

    async def status(self, _request: Request) -> Response:
        state = self._controller.state
        logs = await self._controller.read(self._logs)
        return JSONResponse(status(state, self._controller.moment(), logs, installed_version()), headers=_HEADERS)

    async def differences(self, request: Request) -> Response:
        """The keys in which the specs of the runs `?run=…&run=…` differ, with their values."""
        runs, names = self._controller.state.runs, list(dict.fromkeys(request.query_params.getlist("run")))
        if len(names) > MAX_COMPARED or any(name not in runs for name in names):
            told = f"name at most {MAX_COMPARED} runs that exist: ?run=NAME&run=NAME"
            return JSONResponse({"error": told}, 404, headers=_HEADERS)
        found = spec_differences([runs[name].spec_toml for name in names])
        rows = [{"key": key, "values": values} for key, values in found.items()]
        return JSONResponse({"version": VERSION, "runs": names, "differences": rows}, headers=_HEADERS)

    async def metrics(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def livez(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, _request: Request) -> Response:
        store_failure = self._controller.store_failure
        return PlainTextResponse(
            f"not ready: {store_failure}\n" if store_failure else "ok\n", 503 if store_failure else 200
        )

    def _logs(self, store: Store) -> Logs:
        state = self._controller.state
        runs = {(run.run_id, run.created_ms) for run in state.runs.values()}
        self._old_means = {key: held for key, held in self._old_means.items() if key in runs}
        evaluations = {run_id: store.evaluations(run_id, MAX_LOSSES) for run_id in state.runs}
        return Logs(
            evaluations=evaluations,
            means={run_id: self._means(store, run_id, rows) for run_id, rows in evaluations.items()},
            rounds={run_id: store.newest_rounds(run_id, RECENT_ROUNDS) for run_id in state.runs},
            events=store.events(max(0, state.last_event_id - RECENT_EVENTS), RECENT_EVENTS),
        )

    def _means(self, store: Store, run_id: str, evaluations: tuple[Evaluation, ...]) -> tuple[RoundMeans, ...]:
        """Metrics of the evaluated rounds. Old rounds are read only once, because many nodes have many rows."""
        run = self._controller.state.runs[run_id]
        key, settled = (run_id, run.created_ms), run.head_round - SETTLED_ROUNDS
        rounds = [row.round for row in evaluations]
        known = {number: found for number, found in self._old_means.get(key, {}).items() if number <= settled}
        read = {item.round: item for item in store.round_means(run_id, [it for it in rounds if it not in known])}
        means = {number: known[number] if number in known else read.get(number) for number in rounds}
        self._old_means[key] = {number: found for number, found in means.items() if number <= settled}
        return tuple(found for found in means.values() if found is not None)


def installed_version() -> str:
    """Version of the installed distribution; empty in a bare source tree."""
    try:
        return version("atoll")
    except PackageNotFoundError:
        return ""
