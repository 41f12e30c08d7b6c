"""Prepares the data that the arguments describe, and prints the most memory that no file stood behind, in bytes.

In a process of its own, with less kept in memory than usual: tests/test_large_data.py compares sizes.
"""

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

from spt.data import cache
from spt.tasks import custom, parallel

parallel.IN_MEMORY = parallel.AT_ONCE = 2**22


def without_files() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def main() -> None:
    config = custom.Config.model_validate_json(sys.argv[1])
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, without_files())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as folder:
        cache.prepare_once(Path(folder) / "prepared", lambda: custom.load(config, Path(".")))
        data = cache.read_prepared(Path(folder) / "prepared")
        rows = {name: len(split) for name, split in data.splits.items()}
    over.set()
    watcher.join()
    sys.stdout.write(json.dumps({"bytes": most, "rows": rows}))


if __name__ == "__main__":
    main()
