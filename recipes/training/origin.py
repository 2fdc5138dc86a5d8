"""Where a copied script is from: the record that copy_recipe.py leaves beside it."""

import json
from pathlib import Path

RECORD = Path(".recipe", "record.json")  # in the folder of a copied script


def origin_lines(folder: Path) -> list[str]:
    """A line on the version that the script in this folder was copied from; none where it is no copy."""
    path = folder / RECORD
    if not path.is_file():
        return []
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return [f"copied from fsdp recipes {record['version']} ({record['date']})"]
    except (ValueError, KeyError, TypeError):  # no reason to end a run
        return [f"copied from fsdp recipes, of a version that {path} does not say: it is damaged"]
