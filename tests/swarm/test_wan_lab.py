"""The shipped swarm in the WAN lab: nodes far apart, two of three behind NAT, one at half speed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.wan import needs_wan, parts

pytestmark = [*needs_wan, pytest.mark.swarm, pytest.mark.timeout(400)]
ATOLL = str(Path(sys.executable).parent / "atoll")


def test_all_train_to_one_model_also_behind_nat(tmp_path):
    text = parts(3, rtt_ms=40, nat=True)
    topology = tmp_path / "nat.toml"
    topology.write_text(text.replace('name = "h2"', 'name = "h2"\nnat = false\nspeed = 0.5'))
    command = [ATOLL, "lab", "run", str(topology), "--tokens", "80000", "--minutes", "5", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["lab_run"]
    assert result["anchors_equal"]
    assert result["tokens"] >= 80_000
    hosts = {host["name"]: host for host in result["hosts"]}
    assert all(host["rounds_committed"] > 0 and host["steps"] > 0 for host in hosts.values()), hosts
    assert all(host["sent_megabytes"] > 1 for host in hosts.values())
    assert hosts["h2"]["steps"] < max(hosts["h0"]["steps"], hosts["h1"]["steps"])
    assert 0.3 < result["utilisation"] <= 1
