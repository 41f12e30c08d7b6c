"""python -m tests.conditions --out FOLDER [--only NAME …] [--workers N] [-- PYTEST-ARGUMENT …]

Runs the test suite under conditions that a developer's machine does not have: one core, cores that are busy with
something else, other locales and time zones, a home folder that cannot be written, no network but loopback, another
user than root. Each run leaves FOLDER/NAME.log and a line in FOLDER/runs.jsonl; the same command goes on with those
that are not there.

The last line is `N runs, K with failures`, and the exit code is 0 only if K is 0 and N is not. A condition that this
machine does not allow (a locale that is not installed, a user who may not read the interpreter) is named and left out.
Another user has a clone of what is committed; SPT_GOLDEN and SPT_DATA_DIR name the folders that lie beside a checkout.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOBODY = 65534
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
LOOPBACK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


class Condition(NamedTuple):
    environment: Mapping[str, str] = MappingProxyType({})
    prefix: tuple[str, ...] = ()  # before the interpreter
    burners: int = 0  # processes that do nothing but work
    user: bool = False  # another one than root: with a checkout, a home and a folder for temporary files of its own


CONDITIONS = {
    "quiet": Condition(),
    "one-core": Condition(prefix=("taskset", "--cpu-list", "0")),
    "busy": Condition(burners=2),
    "one-busy-core": Condition(prefix=("taskset", "--cpu-list", "0"), burners=2),
    "turkish": Condition({"LC_ALL": "tr_TR.UTF-8", "LANGUAGE": "tr"}),  # whose lower case of I is not i
    "german": Condition({"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"}),  # 0,5
    "chinese-gbk": Condition({"LC_ALL": "zh_CN.GBK"}),  # text that is not UTF-8
    "ascii": Condition({"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
    "kiritimati": Condition({"TZ": "Pacific/Kiritimati"}),  # UTC+14
    "pago-pago": Condition({"TZ": "Pacific/Pago_Pago"}),  # UTC-11
    "st-johns": Condition({"TZ": "America/St_Johns"}),  # half an hour off
    "no-time-zone": Condition({"TZ": "Nowhere/At_all"}),
    "no-home": Condition({"HOME": "/proc/home"}),  # not even root can make it
    "home-is-a-file": Condition({"HOME": "/dev/null"}),
    "no-network": Condition(prefix=LOOPBACK),
    "no-network-one-core": Condition(prefix=("taskset", "--cpu-list", "0", *LOOPBACK)),
    "another-user": Condition(prefix=AS_NOBODY, user=True),
    "another-user-one-core": Condition(prefix=("taskset", "--cpu-list", "0", *AS_NOBODY), user=True),
    "another-user-no-home": Condition({"HOME": "/proc/home"}, AS_NOBODY, user=True),
    "narrow-dumb-terminal": Condition({"COLUMNS": "30", "TERM": "dumb", "NO_COLOR": "1"}),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conditions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of logs; the same command goes on with it")
    parser.add_argument("--only", action="append", choices=CONDITIONS, help="one of the conditions (repeat)")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest, of each run")
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "runs.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    done = {run["condition"]: run for run in map(json.loads, lines) if run["pytest"] == options.pytest}
    for name in options.only or CONDITIONS:
        if name in done:
            continue
        if (why := impossible(CONDITIONS[name])) is not None:
            say(f"{name}: left out, {why}")
            continue
        done[name] = run_suite(name, options.out.resolve(), options.workers, options.pytest)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[name]) + "\n")
        say(f"{name}: {done[name]['said']}, exit code {done[name]['code']}, {done[name]['seconds']:.0f} s")
    ended = [done[name] for name in options.only or CONDITIONS if name in done]
    failed = [run for run in ended if run["code"] != 0]
    say(f"{len(ended)} runs, {len(failed)} with failures")
    return 0 if ended and not failed else 1


def run_suite(name: str, out: Path, workers: int, arguments: list[str]) -> dict[str, object]:
    condition = CONDITIONS[name]
    with place(condition) as (folder, own), busy(condition.burners), (out / f"{name}.log").open("wb") as log:
        command = [*condition.prefix, sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        command += ["--numprocesses", str(workers), "--dist", "worksteal", *arguments]
        started = time.monotonic()
        environment = {**os.environ, **own, **condition.environment}
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    text = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    ends = re.findall(r"^=* ?(\d+ (?:passed|failed|error|skipped).*?) in [\d.]+s", text, re.M)
    return {
        "condition": name,
        "pytest": arguments,
        "code": done.returncode,
        "said": ends[-1] if ends else "nothing",
        "failed": sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M))),
        "seconds": round(time.monotonic() - started, 1),
    }


@contextmanager
def place(condition: Condition) -> Iterator[tuple[Path, dict[str, str]]]:
    """The checkout that is tested and what its processes are told of folders; another user has all of its own."""
    if not condition.user:
        yield ROOT, {}
        return
    folder = Path("/var/tmp") / f"spt-conditions-{os.getpid()}"  # not below a folder that only root may enter
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for each in ("home", "tmp"):
            (folder / each).mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / "spt"], check=True)
        (folder / "spt/.venv").symlink_to(Path(sys.prefix))
        subprocess.run(["chown", "--recursive", "--no-dereference", f"{NOBODY}:{NOBODY}", folder], check=True)
        yield folder / "spt", {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "USER": "nobody"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def busy(burners: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burners)]
    try:
        yield started
    finally:
        for burner in started:
            burner.kill()
            burner.wait()


def impossible(condition: Condition) -> str | None:
    """Why this machine does not allow a condition; None if it does."""
    if absent := [tool for tool in ("locale", *condition.prefix[:1]) if shutil.which(tool) is None]:
        return f"there is no program {absent[0]}"
    wanted = condition.environment.get("LC_ALL", "POSIX")
    listed = subprocess.run(["locale", "-a"], capture_output=True, text=True).stdout.lower().split()
    if wanted.lower().replace("-", "") not in [name.replace("-", "") for name in listed]:
        return f"the locale {wanted} is not installed"
    tried = subprocess.run([*condition.prefix, sys.executable, "-c", ""], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"{condition.prefix[0]}: {tried.stderr.strip()[-200:]}"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
