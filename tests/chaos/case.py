"""One case: a few disturbances in one folder, the command until it is done, and the comparison with a quiet day."""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.commands import ALONE, SAVING, SCENARIOS, WORKERS, Scenario, around, write_inputs
from tests.chaos.compare import differences
from tests.chaos.hooks.sitecustomize import PHASES
from tests.chaos.kinds import KINDS, PATIENCE, ROOM, Kind
from tests.chaos.process import Command, end_all, is_stopped, send

ROOT = Path(__file__).resolve().parent.parent.parent
HOOKS = Path(__file__).resolve().parent / "hooks"
ATTEMPTS = 3  # of the same command, until it is done
LONGEST = 200.0  # seconds that a command without trouble may take
LEFT = 75.0  # seconds after which a process whose command has died is a fault
TRACEBACK = re.compile(r"^Traceback \(most recent call last\)|^\s+File \"/", re.M)
OK = 0


class Quiet(NamedTuple):
    """An undisturbed day of a scenario."""

    runs: Path
    seconds: float  # of the first command
    events: dict[str, int]  # moments in it, by phase


@cache
def can_mount() -> bool:
    """May this process mount file systems, where nobody else sees them?"""
    probe = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /tmp"]
    return shutil.which("unshare") is not None and subprocess.run(probe, capture_output=True).returncode == 0


@cache
def source_digest() -> str:
    """Of the code under test and its commit, which reports name: another state has quiet days of its own."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True).stdout
    files = [path for room in ("spt", "models", "tasks", "recipes") for path in sorted((ROOT / room).rglob("*.py"))]
    return hashlib.sha256(commit + b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


class Case:
    """The place where a scenario's commands run: a file system of its own, where one can be mounted."""

    def __init__(self, state: Path, scenario: Scenario, number: int, mounts: bool, plant: bool = False) -> None:
        self.scenario, self.plant, self.number, self.mounts = scenario, plant, number, mounts
        # All cases use the same paths: reports name them.
        self.place, self.log = state / "place", state / "logs" / f"{number:05d}"
        self.runs, self.cache, self.work = (self.place / name for name in ("runs", "cache", "work"))
        self.problems: list[str] = []  # what should not have been
        self.notes: list[str] = []  # what has been done
        self.saving = SAVING
        self.spoiled: set[str] = set()  # files of finished runs that we have damaged
        self._count, self._began = 0, 0.0
        self._moment = self.log / "moment"

    def __enter__(self) -> "Case":
        shutil.rmtree(self.log, ignore_errors=True)
        self.log.mkdir(parents=True)
        self.place.mkdir(parents=True, exist_ok=True)
        if self.mounts:
            _mount("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", self.place)
        for left in self.place.iterdir():
            shutil.rmtree(left)
        write_inputs(self.work)
        (self.place / "tmp").mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        end_all(0)
        if self.problems:
            shutil.copytree(self.runs, self.log / "runs", dirs_exist_ok=True) if self.runs.exists() else None
        if self.mounts:
            subprocess.run(["umount", "--lazy", self.place], capture_output=True)
        if not self.problems:
            shutil.rmtree(self.log, ignore_errors=True)

    def start(self, words: Sequence[str], name: str = "", *, warm: bool = False, **hooks: Any) -> Command:
        """A command with these hooks; `warm`, one that is forked, whatever the scenario says."""
        self._count += 1
        self._began = time.time()
        settings = {"roots": [str(self.runs), str(self.cache)], "plant": self.plant, **hooks}
        environment = around(os.environ, self.place, f"{HOOKS}{os.pathsep}{ROOT}")
        environment["CHAOS"] = json.dumps(settings)
        log = self.log / f"{self._count}{name and '-'}{name}"
        return Command(words, self.work, environment, log, self.scenario.cold and not warm)

    def words(self, command: Sequence[str]) -> list[str]:
        return [*command, *self.saving, "--cpu"]

    def disturb(self, kind: Kind, quiet: Quiet, chance: random.Random) -> bool:
        """Carry out the commands until one of them has been disturbed; False if they were through before."""
        order = list(self.scenario.commands)
        first = chance.randrange(len(order))
        for position, words in enumerate(order):
            if position < first:
                command = self.start(self.words(words))
                if self.judge(command, self._refusals()) != OK:
                    return False
                continue
            return self._disturb(self.words(words), kind, quiet, chance)
        return False

    def _disturb(self, words: Sequence[str], kind: Kind, quiet: Quiet, chance: random.Random) -> bool:
        hooks = {name: chance.randrange(1 << 30) for name in kind.hooks}
        if kind.name == "unsynced":
            hooks["synced"] = str(self.log / "synced")
        self._moment.unlink(missing_ok=True)
        phases = sorted(phase for phase in quiet.events if phase != "import" or self.scenario.cold)
        delay = 0.0
        if self.plant:  # within the first training, which then goes on without its optimizer's state
            count = chance.randint(3, 6)
            hooks |= {"watch": ["training", count, str(self._moment)], "stops": True}
            when = f"training {count}"
        elif chance.random() < 0.25 or kind.name == "clock":
            delay = chance.uniform(0, quiet.seconds)
            when = f"after {delay:.2f} s"
        else:
            phase = chance.choice(phases)
            count = chance.randint(1, max(1, quiet.events[phase] // (2 if self.scenario.has_children else 1)))
            stops = chance.random() < 0.7
            hooks |= {"watch": [phase, count, str(self._moment)], "stops": stops}
            delay = 0.0 if stops else chance.choice([0.0, 0.001, 0.003, 0.01, 0.03])
            when = f"{phase} {count}"
        command = self.start(words, kind.name.replace(" ", "-"), **hooks)
        if not self._reached(command, bool(hooks.get("watch")), hooks.get("stops", False)):
            self.judge(command, self._refusals())
            return False
        time.sleep(delay)
        if command.code() is not None:
            self.judge(command, self._refusals())
            return False
        self.say(f"{kind.name} at {when}")
        kind.strike(self, command, chance)
        self.judge(command, (*kind.codes, *self._refusals()))
        return True

    def _reached(self, command: Command, watched: bool, stops: bool) -> bool:
        """Wait for the moment, and until the process has stopped itself; False if the command ends before."""
        end = time.monotonic() + LONGEST
        while watched and not self._moment.exists() and command.code() is None and time.monotonic() < end:
            time.sleep(0.001)
        while watched and stops and command.code() is None and not is_stopped(self.stopped_process()):
            time.sleep(0.001)
        return command.code() is None

    def stopped_process(self) -> int:
        """The process that has stopped itself at the moment that was drawn; 0 if none has."""
        try:
            return int(self._moment.read_text())
        except (OSError, ValueError):
            return 0

    def resume(self) -> None:
        """Let go on what stopped itself at the moment that was drawn."""
        if pid := self.stopped_process():
            send([pid], signal.SIGCONT)

    def judge(self, command: Command, codes: Sequence[int]) -> int | None:
        """Wait for a command; it has to end with 0 or one of these codes, in good order."""
        code = command.wait(LONGEST)
        text, name = command.text(), command.log.name
        if code is None:
            self.problems.append(f"{name} still ran after {LONGEST:.0f} s")
            send(command.family(), signal.SIGKILL)
            command.wait(PATIENCE)
        elif code not in (OK, *codes):
            self.problems.append(f"{name} ended with {code}: {_last_line(text)}")
        elif code > 0 and "spt: " not in text:
            self.problems.append(f"{name} ended with {code} without a sentence")
        if TRACEBACK.search(text):
            self.problems.append(f"{name} printed a traceback: {_last_line(text)}")
        self.settle()
        self.say(f"{code}")
        return code

    def settle(self) -> None:
        """Nothing may be left that the command has started."""
        if left := end_all(LEFT):
            self.problems.append(f"left at work: {'; '.join(left)}")

    def finish(self, chance: random.Random) -> None:
        """Every command again until it is done, without trouble; what workers have begun, one process may end."""
        for words in self.scenario.commands:
            if words[-2:] == WORKERS and chance.random() < 0.7:
                words = (*words[:-2], *ALONE)
            for attempt in range(1, ATTEMPTS + 1):
                command = self.start(self.words(words), "finish", warm=True)
                code = self.judge(command, self._refusals())
                if code == OK:
                    break
                if not self._follow_advice(command.text()) and attempt == ATTEMPTS:
                    self.problems.append(f"not done after {ATTEMPTS} attempts: {_last_line(command.text())}")

    _has_damage = False

    def _refusals(self) -> tuple[int, ...]:
        """Codes with which any command may end once files were damaged."""
        return (3, 6, 7, 8) if self._has_damage else ()

    def damaged(self, path: Path, how: str) -> None:
        """Take note of what we have damaged: a file of a finished run is not made again."""
        self._has_damage = True
        self.say(f"{how} {self.name_of(path)}")
        if path.is_relative_to(self.runs):
            name = path.relative_to(self.runs).as_posix()
            run = self.runs / name.partition("/")[0]
            if (run / "result.json").exists() or name.endswith(("result.json", "metrics.jsonl")):
                self.spoiled.add(name)

    def _follow_advice(self, text: str) -> bool:
        """Move away the folder that a message names, as it says."""
        for path in re.findall(rf"{re.escape(str(self.place))}/(?:runs|cache/tasks)/([\w.-]+)", text):
            for folder in (self.runs / path, self.cache / "tasks" / path):
                if folder.is_dir() and re.search("move|delete|remove", text):
                    shutil.rmtree(folder)
                    self.say(f"removed {folder.name}, as said")
                    return True
        return False

    def compare(self, quiet: Quiet) -> None:
        finished = {name for name in self.spoiled if not name.endswith("result.json")}
        self.problems += differences(
            quiet.runs, self.runs, exact=self.scenario.exact, without=finished, reports=not self._has_damage
        )
        self.problems += [f"left in the cache: {path.name}" for path in self.cache.rglob("*.tmp")]

    def say(self, text: str) -> None:
        self.notes.append(text)

    def name_of(self, path: Path) -> str:
        return path.relative_to(self.place).as_posix()

    def lines(self, name: str) -> list[str]:
        path = self.log / name
        return path.read_text().splitlines() if path.exists() else []

    def written(self) -> Iterator[Path]:
        """Files of runs and prepared data written since the last command was started."""
        for folder in (self.runs, self.cache):
            for path in folder.rglob("*"):
                if path.is_file() and path.stat().st_mtime >= self._began:
                    yield path

    def used_bytes(self) -> int:
        status = os.statvfs(self.place)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def limit_room(self, size: int) -> None:
        _mount("-o", f"remount,size={size}", self.place)

    def limit_room_beyond(self, spare: int) -> None:
        """Leave `spare` bytes; a command that is not stopped may have written more since they were counted."""
        for attempt in range(50):
            try:
                return self.limit_room(max(4096, self.used_bytes() + spare))
            except subprocess.CalledProcessError:  # no room is smaller than what is used
                if attempt == 49:
                    raise

    @contextlib.contextmanager
    def read_only(self, folder: Path) -> Iterator[None]:
        _mount("--bind", folder, folder)
        try:
            for _ in range(50):  # busy while a file that was opened here is open for writing
                with contextlib.suppress(subprocess.CalledProcessError):
                    _mount("-o", "remount,bind,ro", folder)
                    break
                time.sleep(0.01)
            yield
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was printed"])[-1][:300]


def quiet_day(state: Path, scenario: Scenario, mounts: bool) -> Quiet:
    """The scenario without any disturbance: made once, kept in the state folder."""
    folder = state / f"quiet-{source_digest()}" / re.sub(r"\W+", "-", scenario.name)
    if not (folder / "quiet.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        with Case(state, scenario, 0, mounts) as case:
            seconds, events = 0.0, dict.fromkeys(PHASES, 0)
            for number, words in enumerate(scenario.commands):
                began = time.monotonic()
                path = case.log / f"events{number}"
                if case.judge(case.start(case.words(words), events=str(path)), ()) != OK:
                    raise RuntimeError(f"an undisturbed command fails: {case.problems}")
                seconds = max(seconds, time.monotonic() - began)
                for phase in path.read_text().split():
                    events[phase] += 1
            shutil.copytree(case.runs, folder / "runs")
        events = {phase: count // len(scenario.commands) for phase, count in events.items() if count}
        (folder / "quiet.json").write_text(json.dumps({"seconds": seconds, "events": events}))
    kept = json.loads((folder / "quiet.json").read_text())
    same = SCENARIOS[scenario.same_as] if scenario.same_as else scenario
    runs = folder / "runs" if same is scenario else quiet_day(state, same, mounts).runs
    return Quiet(runs, kept["seconds"], kept["events"])


def run_case(state: Path, seed: int, number: int, *, mounts: bool, plant: bool, only: str | None) -> dict[str, Any]:
    """A case, drawn from the seed and its number; what was done and what was not as it should be."""
    chance = random.Random(f"{seed}/{number}")
    scenario, kinds = draw(chance, mounts, plant, only)
    quiet = quiet_day(state, scenario, mounts)
    began, done = time.monotonic(), []
    with Case(state, scenario, number, mounts, plant) as case:
        if not plant and chance.random() < 0.15:
            case.saving = ()
            case.say("no checkpoint within a minute")
        for kind in kinds:
            if case.disturb(kind, quiet, chance):
                done.append(kind.name)
            if case.problems:
                break
        case.finish(chance)
        case.compare(quiet)
        return {
            "case": number,
            "scenario": scenario.name,
            "kinds": done,
            "notes": case.notes,
            "problems": case.problems[:20],
            "seconds": round(time.monotonic() - began, 2),
        }


def draw(chance: random.Random, mounts: bool, plant: bool, only: str | None) -> tuple[Scenario, list[Kind]]:
    """A scenario, and one to three kinds of disturbance for it."""
    known = [SCENARIOS[only]] if only else list(SCENARIOS.values())
    known = [scenario for scenario in known if not plant or not (scenario.cold or scenario.has_children)]
    scenario = chance.choices(known, [scenario.weight for scenario in known])[0]
    kinds = [
        kind
        for kind in KINDS.values()
        if (mounts or kind.needs != "mount") and (scenario.has_children or kind.needs != "children")
    ]
    if plant:
        kinds = [KINDS["SIGKILL"], KINDS["SIGTERM"]]
    count = chance.choices([1, 2, 3], [6, 3, 1])[0]
    return scenario, chance.choices(kinds, [kind.weight for kind in kinds], k=count)
