"""The million schedules of `make soak` in slices: `PYTHONPATH=tests python -m support.soak_schedules FIRST COUNT`.

Prints the totals as it goes, so that a slice that was stopped says how far it came; ends with 1 and the seed of the
first schedule that fails. With `--gaps` it runs schedules of lasting faults instead, and prints the longest time
without a commit while a majority could commit (support/commit_gaps.py), as JSON lines.
"""

import argparse
import json
import time
from dataclasses import asdict

from support.commit_gaps import longest_gaps
from support.fault_schedules import running_totals

EVERY_SECONDS = 30.0


def main(first: int, count: int) -> None:
    """Run the slice."""
    began = told = time.monotonic()
    for totals in running_totals(first, count):
        now, done = time.monotonic(), totals["schedules"]
        if now - told >= EVERY_SECONDS or done == count:
            told = now
            print(f"seeds {first}..{first + done - 1} in {now - began:.0f} s: {dict(totals)}", flush=True)


def measure_gaps(first: int, count: int) -> None:
    """Measure the slice; its longest gap in the last line."""
    told = time.monotonic()
    for done, longest, rounds in longest_gaps(first, count):
        now = time.monotonic()
        if now - told >= EVERY_SECONDS or done == count:
            told = now
            line = {"first": first, "schedules": done, "rounds": rounds, "longest_gap": asdict(longest)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m support.soak_schedules", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--gaps", action="store_true", help="measure the longest time without a commit")
    options = parser.parse_args()
    (measure_gaps if options.gaps else main)(options.first, options.count)
