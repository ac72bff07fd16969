"""The million schedules of `make soak` in slices: `PYTHONPATH=tests python -m support.soak_schedules FIRST COUNT`.

Prints the totals as it goes, so that a slice that was stopped says how far it came; ends with 1 and the seed of the
first schedule that fails.
"""

import sys
import time

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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
