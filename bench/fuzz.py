"""Feeds bad input to every way in for some minutes, and counts what came of it: no traceback, nothing lost in silence.

The generators and ways in are those of tests/lawful/test_fuzz_input.py, with other examples for every `--seed`. Each
example that ends in a traceback, or loses something without a word, is printed; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
import traceback
import warnings
from collections import Counter
from typing import Any

from hostile_cases import ERROR, LOADED, SKIPPED, Case, Lost, cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import HypothesisWarning

TRACEBACK, LOST = "traceback", "lost"
COLUMNS = (ERROR, SKIPPED, LOADED, LOST, TRACEBACK)
HANGS = 120
"""Seconds after which one example counts as a hang, which ends the program with the place where it hangs."""


class Over(Exception):
    """The time of a case is over."""


def fuzz(case: Case, number: int, seconds: float, most: int) -> tuple[Counter[str], dict[str, str]]:
    """What came of a case's examples, and one story for each place where something broke."""
    counts: Counter[str] = Counter()
    stories: dict[str, str] = {}
    end = time.monotonic() + seconds

    @seed(number)
    @settings(
        max_examples=most, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(case.examples)
    def fed(example: Any) -> None:
        if time.monotonic() > end:
            raise Over
        faulthandler.dump_traceback_later(HANGS, exit=True)
        try:
            came = case.feed(example)
        except Exception as error:
            came = LOST if isinstance(error, Lost) else TRACEBACK
            place = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} in {place.filename.rpartition('/')[2]}:{place.lineno}"
            stories.setdefault(key, f"{str(error)[-600:]}\n    from {repr(example)[:600]}")
        counts[came] += 1
        faulthandler.cancel_dump_traceback_later()

    try:
        fed()
    except Over:
        pass
    faulthandler.cancel_dump_traceback_later()
    return counts, stories


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--minutes", type=float, default=4, help="in all, shared by the kinds of input (default 4)")
    made.add_argument("--examples", type=int, default=2000, help="of each kind at most (default 2000)")
    made.add_argument("--only", default="", help="kinds whose name holds this text")
    args = made.parse_args()
    warnings.simplefilter("ignore", HypothesisWarning)
    chosen = [case for case in cases() if args.only in case.name]
    end, bad = time.monotonic() + 60 * args.minutes, 0
    print(f"{'kind of input':38}{'cases':>8}" + "".join(f"{name:>14}" for name in COLUMNS))
    for k, case in enumerate(chosen):
        share = (end - time.monotonic()) / (len(chosen) - k)
        counts, stories = fuzz(case, args.seed, share, args.examples)
        bad += counts[LOST] + counts[TRACEBACK]
        print(f"{case.name:38}{counts.total():8,}" + "".join(f"{counts[name]:14,}" for name in COLUMNS), flush=True)
        for key, story in stories.items():
            print(f"  {key}: {story}", flush=True)
    print(f"{bad} cases ended in a traceback, or lost something in silence (seed {args.seed})")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
