"""How verify.py answers: the table, the verdict, the exit status, JSON."""

import argparse
import json
import math
import re
import sys
from dataclasses import asdict

from .cases import Check

COLUMNS = ("loss", "gradient", "norm", "later", "weights")
EXACT, WRONG, UNPROVED = 0, 1, 2  # exit statuses


def table(checks: list[Check]) -> list[str]:
    """The checks as aligned lines: measured errors beside the tolerance."""
    lines = [f"{'check':<28}" + "".join(f"{column:>10}" for column in COLUMNS) + f"{'tolerance':>11}"]
    for check in checks:
        errors = "".join(f"{check.errors[column]:>10.1e}" if check.errors else " " * 10 for column in COLUMNS)
        tolerance = f"{check.tolerance:>11.0e}" if check.tolerance else " " * 11
        status = "-" if not check.is_proof else "pass" if check.is_passed else "FAIL"
        lines.append(f"{check.name:<28}{errors}{tolerance}  {status:<4}  {check.detail}".rstrip())
    return lines


def exit_status(checks: list[Check]) -> int:
    """EXACT if all proofs hold, WRONG if one does not, UNPROVED if the tiny model itself does not run."""
    failed = [check for check in checks if check.is_proof and not check.is_passed]
    return EXACT if not failed else WRONG if any(check.can_run for check in failed) else UNPROVED


def unproved(checks: list[Check]) -> list[str]:
    """Names of the checks that leave something open."""
    return [
        check.name
        for check in checks
        if "not proved" in check.detail or not check.can_run or not (check.is_proof or check.is_passed)
    ]


def why_unproved(checks: list[Check]) -> str:
    """Why nothing could be proved."""
    return next(f"could not be proved: {check.detail}" for check in checks if not check.can_run)


def verdict(checks: list[Check]) -> str:
    """The last line's answer."""
    status, names = exit_status(checks), unproved(checks)
    if status == UNPROVED:
        return why_unproved(checks) + ","
    if status == WRONG:
        return "does NOT train exactly"
    return "trains exactly" + (f", but for {len(names)} thing(s) not proved," if names else "")


def json_report(model: str, yaml: str, num_processes: int, checks: list[Check]) -> str:
    """The answer as one JSON object; an error that is not a finite number becomes 1e308, since JSON has no infinity."""
    status = exit_status(checks)
    report = {"model": model, "yaml": yaml, "num_processes": num_processes, "is_exact": status == EXACT}
    report |= {"error": why_unproved(checks)} if status == UNPROVED else {}
    lines = [asdict(check) for check in checks]
    for line in lines:
        line["errors"] = {name: error if math.isfinite(error) else 1e308 for name, error in line["errors"].items()}
    return json.dumps({**report, "not_proved": unproved(checks), "checks": lines}, allow_nan=False)


def print_json(status: int, printed: str, errors: str) -> int:
    """Print one JSON object, whatever became of the command that printed this; returns its exit status."""
    sys.stderr.write(errors)
    lines = printed.splitlines()
    if status == 0 and not (lines and lines[-1].startswith("{")):  # --help
        print(printed, end="")
        return status
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model_name_or_path", "--accelerate_config"):
        parser.add_argument(name, nargs="?")
    given = parser.parse_known_args()[0]
    report = {"model": given.model_name_or_path, "yaml": given.accelerate_config, "is_exact": False}
    report |= json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if status != 0 and (report["is_exact"] or "checks" not in report):
        found = re.search(r"^Error: (.*?)(\n\n|\Z)", errors, re.DOTALL | re.MULTILINE)
        text = found[1] if found else (errors.strip().splitlines() or ["no message"])[-1]
        report |= {"is_exact": False, "error": text.strip()}
    print(json.dumps(report))
    return status
