"""The shipped swarm in the WAN lab: nodes far apart, two of three behind NAT, one at half speed."""

import json
import subprocess
import sys
from pathlib import Path

from support.process_swarm import SWARM_TEST
from support.wan import needs_wan, parts

from atoll.core.manifest import Head
from atoll.core.verdicts import partial_contributions
from atoll.node.state.manifests import ManifestStore

pytestmark = [*needs_wan, *SWARM_TEST]
STEP_SECONDS = 0.1
ATOLL = str(Path(sys.executable).parent / "atoll")


def test_all_train_to_one_model_also_behind_nat(tmp_path):
    text = parts(3, rtt_ms=40, nat=True)
    text = text.replace('name = "h2"', 'name = "h2"\nnat = false\nspeed = 0.5')
    result = run(tmp_path, text, "--tokens", "80000", "--step-seconds", str(STEP_SECONDS))
    assert result["anchors_equal"]
    assert result["tokens"] >= 80_000
    hosts = {host["name"]: host for host in result["hosts"]}
    assert all(host["rounds_committed"] > 0 and host["steps"] > 0 for host in hosts.values()), hosts
    assert all(host["sent_megabytes"] > 1 for host in hosts.values())
    slow_steps = result["seconds"] * hosts["h2"]["speed"] / STEP_SECONDS  # no more than its pace allows
    assert hosts["h2"]["steps"] <= 1.1 * slow_steps + 30  # some before it was first seen
    assert 0 < result["utilisation"] <= 1


def test_who_can_only_be_relayed_has_its_part_in_rounds(tmp_path):
    """Two of three take no calls, not even each other's: what they say to each other goes through the seed."""
    text = parts(3, rtt_ms=40, nat=True, hole_punching=False).replace('name = "h2"', 'name = "h2"\nnat = false')
    result = run(tmp_path, text, "--tokens", "110000", "--keep", str(tmp_path / "kept"))
    assert result["anchors_equal"]
    rounds = manifests(tmp_path / "kept" / "h2")
    counted = [sum(item.weight > 0 for item in manifest.contributions) for manifest in rounds]
    begun = counted.index(3)  # before, not everybody had loaded
    whole = [manifest for manifest in rounds[begun:] if not partial_contributions(manifest)]
    every = [manifest for manifest in whole if sum(item.weight > 0 for item in manifest.contributions) == 3]
    assert len(every) >= 5, counted
    assert len(every) >= 0.7 * (len(counted) - begun), counted  # a machine that stands still may cost one its place


def run(tmp_path, topology, *flags):
    path = tmp_path / "nat.toml"
    path.write_text(topology)
    command = [ATOLL, "lab", "run", str(path), "--minutes", "15", "-o", "json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["lab_run"]


def manifests(node):
    """Of all rounds after genesis that this node holds, in order."""
    store = ManifestStore(node / "runs" / "demo" / "manifests", "demo")
    numbers = sorted(int(path.stem) for path in (node / "runs" / "demo" / "manifests").glob("*.manifest"))
    return [Head(store.get(number)).manifest for number in numbers if number]
