"""The page, its JSON, metrics and probes, over real HTTP on loopback."""

from __future__ import annotations

from pathlib import Path

import httpx
from integration.coordinator.lab import coordinator


async def test_page_assets_status_metrics_and_probes(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, httpx.AsyncClient(base_url=f"http://{home.endpoints.http}") as web:
        await home.create_run()
        await home.node("ann")
        page = await web.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in ("app.js", "charts.js", "dom.js", "style.css", "ring.svg"):
            asset = await web.get(f"/assets/{name}")
            assert asset.status_code == 200
            assert "http://" not in asset.text.replace("http://www.w3.org/2000/svg", "")  # nothing from elsewhere
            assert "https://" not in asset.text
        status = (await web.get("/api/status")).json()
        assert (status["version"], status["runs"][0]["state"], status["nodes"][0]["name"]) == (1, "waiting", "ann")
        assert status["events"][0]["kind"] == "token.used-up"
        assert 'atoll_run_head_round{run="reef"} 0.0' in (await web.get("/metrics")).text
        assert (await web.get("/livez")).text == "ok\n"
        assert (await web.get("/readyz")).status_code == 200
        home.controller.store_failure = "the disk is full"
        assert (await web.get("/readyz")).status_code == 503
        assert (await web.get("/assets/../app.py")).status_code == 404
        assert (await web.post("/api/status")).status_code == 405


async def test_a_page_elsewhere_cannot_read_this_one_by_a_name_of_its_own(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, httpx.AsyncClient(base_url=f"http://{home.endpoints.http}") as web:
        assert (await web.get("/api/status", headers={"host": "evil.example"})).status_code == 400
