"""`python -m benchmarks [NAME …]`: run benchmarks one after another, then print what fell short."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.common import RESULTS

ALL = (
    "codecs", "join", "startup", "swarm_vs_ddp", "recovery", "faults", "newcomers", "parity", "recipe", "allreduce",
    "exchange_cpu", "utilisation", "join_wan", "nat", "planner", "memory", "pipeline",
    "pipeline_loss", "pipeline_faults", "second_copies", "planner_lab", "planner_changes", "faults_wan", "byzantine",
    "sybils", "trust", "training_audits", "daemons", "rounds_at_size", "retention", "data", "data_build",
    "data_coverage", "data_restart", "seed", "muon",
)  # fmt: skip


def main() -> int:
    names = sys.argv[1:] or ALL
    failed = [name for name in names if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode]
    short = []
    for name in names:
        path = RESULTS / f"{name}.json"
        if path.exists():
            short += [(name, row) for row in json.loads(path.read_text())["acceptance"] if not row["holds"]]
    for name, row in short:
        print(f"falls short: {name}: {row['name']}: {row['value']} (target {row['target']})")
    for name in failed:
        print(f"could not run: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
