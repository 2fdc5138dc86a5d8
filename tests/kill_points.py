"""Kill each rank at everything it does on disk while it saves, and prove that the run goes on as if it never happened.

    make kill_points

Two saves in a run of four steps, so half of the kills find an older checkpoint and half do not; with the saves in the
training loop, and with `--async_save` in a thread beside it. One line per kill, and exit status 1 if any run differs.
"""

import shutil
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
sys.path.insert(0, str(Path(__file__).parent / "saving"))

from test_checkpoint import SAMPLE, kill_points, killed_and_resumed
from tqdm import tqdm


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kill-points-"))
    rows = folder / "train.jsonl"
    lines = (SAMPLE / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    whole = folder / "whole"
    events = kill_points(rows, folder, whole)
    points = [
        (more, rank, number, event)
        for more in ((), ("--async_save",))
        for rank in (0, 1)
        for number, event in enumerate(events[rank], start=1)
    ]
    failed = 0
    for more, rank, number, event in tqdm(points, unit="kill"):
        try:
            found = killed_and_resumed(rows, whole, folder, rank, number, *more)
            tqdm.write(f"rank {rank} {' '.join(more)} {event}: killed, checkpoints left: {found}, equal end state")
        except AssertionError:
            failed += 1
            tqdm.write(f"rank {rank} {' '.join(more)} {event}: FAILED\n{traceback.format_exc()[-3000:]}")
    shutil.rmtree(folder)
    print(f"{len(points)} kills, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
