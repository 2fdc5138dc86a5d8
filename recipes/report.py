"""Make the report of a run again from its output folder, or compare several runs.

    python recipes/report.py OUTPUT_DIR [--plan]
    python recipes/report.py DIR1 DIR2 ... [--output_dir X]

One folder: report.md and its plots, in the folder itself or in --output_dir; with --plan the memory that the planner
predicts for that run stands beside what was measured. Several: comparison.md and comparison.png, in the current
directory or in --output_dir. Works while a run is going on.
"""

import argparse
import sys
from pathlib import Path

from tools.report.comparison import compare_runs_report
from tools.report.run_report import read_run, write_report


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a run's report again, or compare several runs.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="OUTPUT_DIR", help="The --output_dir of a run.")
    parser.add_argument("--output_dir", type=Path, help="Where to write, if not in the folder (of several: not here).")
    parser.add_argument("--plan", action="store_true", help="Predict the run's memory first (half a minute).")
    arguments = parser.parse_args()
    try:
        for folder in arguments.folders:
            read_run(folder)
            if arguments.plan:
                plan_beside(folder)
    except (ValueError, OSError) as error:  # names the file
        sys.exit(f"Error: {error}")
    try:
        if len(arguments.folders) == 1:
            print(write_report(arguments.folders[0], arguments.output_dir))
        else:
            print(compare_runs_report(arguments.folders, arguments.output_dir or Path(".")))
    except (OSError, ImportError) as error:
        sys.exit(f"Error: {error}")
    except Exception as error:  # whatever a damaged file makes of the arithmetic
        folders = ", ".join(map(str, arguments.folders))
        what = "a file there holds other values than a run writes: run.json, wrap_report.json, plan.json, metrics.jsonl"
        sys.exit(f"Error: {folders}: {what} ({type(error).__name__}: {error}); mend it or move it away")


def plan_beside(folder: Path) -> None:
    """plan.md, plan.json and plan.png of a run, into its folder."""
    from tools.planner.plan_report import write_report as write_plan  # only here: it needs torch
    from tools.planner.planned_step import plan_run

    write_plan([plan_run(folder)], folder)


if __name__ == "__main__":
    main()
