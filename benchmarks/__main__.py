"""All measurements and figures of the pages, on this machine: about two hours on two cores.

    python -m benchmarks                     # -> benchmarks/results/*.json, docs/benchmarks.png, docs/size.png
    python -m benchmarks --rounds 1 --results /tmp/results --figures /tmp/results
    python -m benchmarks --missing       # go on after an interruption: what has no file in the results yet

Each file and figure names the processor, its threads and the version of torch. Cockpit is measured too where it is
installed (extra `bench`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks.figure import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of each measurement (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where measurements go (default: %(default)s)")
    parser.add_argument("--figures", type=Path, default=Path("docs"), help="where figures go (default: %(default)s)")
    parser.add_argument("--missing", action="store_true", help="skip what has a file in the results")
    args = parser.parse_args()
    args.figures.mkdir(parents=True, exist_ok=True)
    rounds, runs = ["--rounds", str(args.rounds)], ["--runs", str(min(3, args.rounds))]
    programs = [
        *((f"overhead_{model}", ["overhead", "--model", model, *rounds]) for model in ("mlp", "3c3d", "gpt", "vit")),
        ("overhead_gpt2", ["overhead", "--model", "gpt2", *rounds, "--only", "GradNorm", "NormTest", "economy"]),
        *((f"memory_{model}", ["memory", "--model", model, *runs]) for model in ("mlp", "3c3d", "gpt", "gpt2")),
        ("memory_gpt2_ddp", ["memory", "--model", "gpt2", "--ranks", "2", "--only", "GradNorm", *runs]),
        ("scaling", ["scaling"]),
        ("collective", ["collective"]),
        ("hidden", ["hidden", *rounds]),
        ("sharded", ["sharded", *rounds]),
        ("size", ["size", *rounds, "--figure", str(args.figures / "size.png")]),
    ]
    for name, (program, *options) in programs:
        found = args.results / f"{name}.json"
        if args.missing and found.exists():
            continue
        print(f"\n{name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{program}", *options, "--json", str(found)], check=True)
    drawn = ["--results", str(args.results), "--out", str(args.figures / "benchmarks.png")]
    subprocess.run([sys.executable, "-m", "benchmarks.figure", *drawn], check=True)


if __name__ == "__main__":
    main()
