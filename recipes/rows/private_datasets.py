"""datasets' private names. tests/test_private.py fails where one moves."""

from datasets import Dataset


def fingerprint(rows: Dataset) -> str:
    """datasets' own identity of rows and all that was done to them. Public way looked for: `map` makes the next one of
    it without telling it; Hasher.hash(rows) would hash where the rows are cached."""
    return rows._fingerprint
