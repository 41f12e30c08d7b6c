"""Errors a user can cause or meet, each with the exit code it ends the command with.

| code | meaning                                                                  |
|------|--------------------------------------------------------------------------|
| 0    | done                                                                     |
| 1    | a bug of ours                                                            |
| 2    | wrong usage or a wrong recipe                                            |
| 3    | data missing or invalid                                                  |
| 4    | a back end, an optional package, memory or one of the processes is gone  |
| 5    | the loss stopped being finite                                            |
| 6    | a checkpoint cannot be used (other architecture, other data, damaged)    |
| 7    | the output folder cannot be used (locked, unwritable, full)              |
| 8    | a comparison finished, but some of its runs failed                       |
| 75   | stopped on request, can be resumed                                       |
| 130  | interrupted from the keyboard, can be resumed                            |

Launchers turn any child's code into 1, so a run's `status.json` repeats it.

What an error says may come from a library that was given a password, and ends in logs, run folders and reports: secrets
are hidden from it.
"""

import os
import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

HIDDEN = "***"
SHORTEST = 6  # characters of a secret: what is shorter stands in many texts by chance
# In names of variables, as a part between underscores; not TOKENS, TOKENIZERS_…, KEYBOARD, AUTHOR or PATH.
_SECRET_NAME = re.compile(
    r"(?:^|_)([A-Z0-9]*(TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|(API|SECRET|ACCESS|ACCOUNT|PRIVATE)KEYS?)"
    r"|KEYS?|AUTH|PASS|PAT|PWD|COOKIE)\d*(?:_|$)"
    r"|(^|_)(token|secret|password|passwd|api_?key)$"
)
# NAME=VALUE, but not NAME=$OTHER, which tells nothing.
_ASSIGNMENT = re.compile(r"(?<![\w.])(\w{1,99})=(?!['\"]?\$)('[^']*'|\"[^\"]*\"|[^\s'\"]+)")
_IN_URL = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")  # user:password, or a token alone; a password may hold an @ itself

LONGEST_WORD, LONGEST_LINE = 400, 4000  # characters that are displayed whole: paths and lists of names are shorter
# Of control characters all but tab and new line, with what turns the direction of a line or ends it, and what UTF-8 has
# no bytes for (file names may hold it).
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_LONG_LINE = re.compile(rf".{{{LONGEST_LINE + 1},}}")


def visible(text: str) -> str:
    """Text of unknown origin without characters that act on a terminal or break a file: they are written as escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def displayable(text: str) -> str:
    """Visible text of unknown origin, what is very long without its middle."""
    text = visible(text)
    if len(text) <= LONGEST_WORD:
        return text
    return _LONG_LINE.sub(_ends, _LONG_WORD.sub(_ends, text))


def _ends(found: re.Match[str]) -> str:
    long = found[0]
    return f"{long[:100]}…{long[-40:]} ({len(long):,} characters)"


class SptError(Exception):
    """Something the user can act on: the message is one sentence, no traceback is shown."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(displayable(str(message)))

    def __str__(self) -> str:
        return hide_secrets(super().__str__())


class UsageError(SptError):
    """A command line or a recipe that cannot be carried out."""

    exit_code = 2


class RecipeError(UsageError):
    """Every complaint about a recipe at once, each with its dotted place."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            message = f"{source}: {self.problems[0]}"
        else:
            message = f"{source}: {len(self.problems)} problems\n" + "\n".join(f"  {p}" for p in self.problems)
        super().__init__(message)


class DataError(SptError):
    """Data that is missing or not what it should be."""

    exit_code = 3


class BackendError(SptError):
    """A kernel, a device or an optional package that is not there."""

    exit_code = 4


class DivergedError(SptError):
    """A loss that is no longer a finite number; the last good checkpoint is kept."""

    exit_code = 5


class CheckpointError(SptError):
    """A checkpoint of another architecture, of other data, or damaged."""

    exit_code = 6


class OutputError(SptError):
    """A run folder that is in use elsewhere, cannot be written, or lies on a full disk (then `hopeless` for all)."""

    exit_code = 7

    def __init__(self, message: str, hopeless: bool = False) -> None:
        super().__init__(message)
        self.hopeless = hopeless


class RunInUse(OutputError):
    """A run that another process has."""


class RunTakenOver(RunInUse):
    """A run that this process had until another took it for dead."""


class FailedRuns(SptError):
    """A comparison that went through to the end although some of its runs failed."""

    exit_code = 8


class Stopped(BaseException):
    """A request to stop (SIGTERM): the state was saved and the same command continues.

    No `Exception`: nothing has gone wrong, and what goes on after an error must not go on after this.
    """

    exit_code = 75


class Interrupted(Stopped, KeyboardInterrupt):
    """Ctrl-C: the state was saved and the same command continues."""

    exit_code = 130


def one_line(error: BaseException) -> str:
    """Kind and first line of somebody else's error, for a sentence of ours."""
    first = hide_secrets(str(error).strip()).partition("\n")[0]
    return displayable(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def hide_secrets(text: str) -> str:
    """A text for people or files, with `***` for what this process's environment holds as secret, by the variable's
    name, and for what stands before the @ of an address."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    return _IN_URL.sub(HIDDEN, text)


def hide_assigned_secrets(text: str) -> str:
    """Besides, what the text itself assigns to a name of a secret: `export API_TOKEN=***`.

    Not to a dotted name: `model.key=3` is a recipe's value, which decides what is computed.
    """

    def hide(match: re.Match[str]) -> str:
        return f"{match[1]}={HIDDEN}" if _SECRET_NAME.search(match[1]) else match[0]

    return _ASSIGNMENT.sub(hide, hide_secrets(text))


def _secrets() -> list[str]:
    """The secrets of the environment, also as a quotation escapes them; the longest first: one may contain another."""
    from json import dumps  # not at once: a command can answer a signal only when this is loaded

    secrets: set[str] = set()
    for name, value in os.environ.items():
        values = {found.partition(":")[2] or found for found in _IN_URL.findall(value)}  # of a proxy, an index
        if _SECRET_NAME.search(name.upper()) and not (os.path.isabs(value) and os.path.exists(value)):
            values |= {value, *value.splitlines()}
        for part in value.split(";"):  # of a connection string: AccountKey=…
            key, _, assigned = part.partition("=")
            if assigned and _SECRET_NAME.search(key.strip().upper()):
                values.add(assigned.strip())
        values |= {unquote(each) for each in values}
        secrets |= values | {written for each in values for written in (repr(each)[1:-1], dumps(each)[1:-1])}
    return sorted((each for each in secrets if len(each) >= SHORTEST), key=len, reverse=True)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`'; did you mean X?'` for the nearest known name, or the list of all when none is near and they are few."""
    from difflib import get_close_matches  # not at once: a command can answer a signal only when this is loaded

    options = sorted(known)
    near = get_close_matches(name, options, n=1, cutoff=0.6)
    near = near or [option for option in options if name == "".join(word[:1] for word in option.split("_"))]  # lr, wd
    if near:
        return f"; did you mean {near[0]}?"
    if options and len(options) <= 24:
        return f"; known: {', '.join(options)}"
    return ""
