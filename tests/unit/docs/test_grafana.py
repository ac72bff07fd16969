"""The dashboard asks for metrics and labels that the coordinator serves, and for all of them."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

from .shipped import ROOT, table

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/atoll.json").read_text())


def served() -> dict[str, set[str]]:
    """Labels of each metric, as the operator's guide lists them."""
    rows = [row for row in table(ROOT / "docs/guide/operator.md") if row[0].startswith("`atoll_")]
    return {
        name: set(re.findall(r"`(\w+)`", labels))
        for names, labels in rows
        for name in re.findall(r"`(atoll_\w+)`", names)
    }


def test_every_metric_is_drawn_and_none_that_does_not_exist() -> None:
    asked = re.findall(r"atoll_\w+", json.dumps(DASHBOARD["panels"]))
    assert set(asked) == served().keys()


def test_every_label_is_one_of_its_metrics() -> None:
    labels = served()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name, selected in re.findall(r"(atoll_\w+)(?:{([^}]*)})?", target["expr"]):
                assert set(re.findall(r"(\w+)=~", selected)) <= labels[name], panel["title"]
            known = set.union(*(labels[name] for name in re.findall(r"atoll_\w+", target["expr"])))
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known, panel["title"]


def test_panels_have_a_title_and_a_unit_and_do_not_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_guide_lists_exactly_the_metrics_of_the_coordinator() -> None:
    source = (ROOT / "coordinator/atoll/coordinator/web/metrics.py").read_text()
    assert {name.removesuffix("_total") for name in served()} == set(re.findall(r'"(atoll_\w+)"', source))
