"""The page, its JSON, metrics and probes, over real HTTP on loopback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from integration.coordinator.lab import SECONDS, coordinator, http_client

from atoll.coordinator.state.draft import Step
from atoll.coordinator.store.records import Change, Evaluation, NodeMetrics
from atoll.coordinator.web.app import SETTLED_ROUNDS
from atoll.v1 import admin_pb2 as admin


async def test_page_assets_status_metrics_and_probes(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, http_client(home) as web:
        await home.create_run()
        await home.node("ann")
        page = await web.get("/")
        assert page.status_code == 200
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for name in ("app.js", "charts.js", "compare.js", "dom.js", "style.css", "ring.svg"):
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


async def test_the_page_has_the_training_loss_of_evaluated_rounds_new_and_old(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, http_client(home) as web:
        await home.create_run()

        async def store(*rows: Change) -> None:
            await home.controller.do(lambda state, now: Step(state, None, rows))

        async def losses() -> list[float | None]:
            (run,) = (await web.get("/api/status")).json()["runs"]
            return [point.get("train_loss") for point in run["losses"]]

        def reported(number: int, peer_id: str, loss: float) -> NodeMetrics:
            return NodeMetrics("reef", number, peer_id, 0, loss, 1e-4, 10, 2.0, 1.0, 1.0, 0.0, 1.0, 5, 5)

        run, settled = home.controller.state.runs["reef"], SETTLED_ROUNDS
        await home.controller.do(
            lambda state, now: Step(replace(state, runs={"reef": replace(run, head_round=settled + 2)}), None)
        )
        await store(*(Evaluation("reef", number, 4.0, number) for number in (1, 2, settled + 2)))
        await store(reported(1, "a", 3.0), reported(1, "b", 5.0), reported(settled + 2, "a", 2.0))
        assert await losses() == [4.0, None, 2.0]
        await store(reported(1, "c", 1.0), reported(2, "c", 1.0), reported(settled + 2, "b", 3.0))
        assert await losses() == [4.0, None, 2.5]  # old rounds are read once


async def test_a_page_elsewhere_cannot_read_this_one_by_a_name_of_its_own(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, http_client(home) as web:
        assert (await web.get("/api/status", headers={"host": "evil.example"})).status_code == 400


async def test_the_page_learns_what_differs_between_runs(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home, http_client(home) as web:
        text = (await home.create_run()).spec_toml
        other = text.replace('name = "reef"', 'name = "kelp"').replace("stop_tokens = 10000", "stop_tokens = 20000")
        await home.admin.CreateRun(admin.CreateRunRequest(spec_toml=other), timeout=SECONDS)
        found = await web.get("/api/differences", params={"run": ["reef", "kelp"]})
        assert found.json() == {
            "version": 1,
            "runs": ["reef", "kelp"],
            "differences": [{"key": "run.stop_tokens", "values": [10000, 20000]}],
        }
        assert (await web.get("/api/differences", params={"run": "reef"})).json()["differences"] == []
        assert (await web.get("/api/differences")).json()["differences"] == []
        for wrong in (["reef", "nobody"], ["reef\x1b"], [f"r{number}" for number in range(100)]):
            refused = await web.get("/api/differences", params={"run": wrong})
            assert refused.status_code == 404
            assert "exist" in refused.json()["error"]
