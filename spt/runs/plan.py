"""`study.json`: every run that a study planned, finished or not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from spt.errors import DataError, displayable
from spt.runs.files import check_regular

ArmName = Literal["scratch", "spt"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)
# An arm of a study: one of these two, or a control (spt/studies/arms.py).
ArmText = Annotated[str, Field(pattern=r"^(scratch|spt|frozen|shuffled|(parts|other|joint)=.+)$")]
Ended = Literal["running", "failed", "diverged", "stopped", "missing", "unreadable", "unusable"]
FolderName = Annotated[str, Field(pattern=r"^[^/\\]*[^/\\.][^/\\]*$")]  # beside the study: not a path
Factor = str | int | float | bool | None  # what a study varies, at one of its levels
Kind = Literal["compare", "models", "variants", "compute", "data", "size", "init", "reach", "objective", "tune"]
Axis = Literal["epochs", "examples", "flops", "time"]
SearchProtocol = Literal["trials", "compute"]  # what a search holds equal between the arms
Smoke = bool | Literal["full"]  # a few steps of a small network, or ("full") of the recipe's own sizes
PLAN = "study.json"
PROGRESS = "progress.json"  # while a study is carried out: the time that is left, and when that was estimated


def displayable_text(value: Any) -> Any:
    """A text, or a tuple that holds some, as it can be shown to people; anything else as it is."""
    if type(value) is tuple:
        return tuple(displayable(part) if isinstance(part, str) else part for part in value)
    return displayable(value) if isinstance(value, str) else value


class Record(BaseModel):
    """What a plan or a report says, with texts that are read from files made fit for people."""

    model_config = ConfigDict(frozen=True)

    @field_validator("*", mode="after")
    @classmethod
    def _displayable(cls, value: Any) -> Any:
        return displayable_text(value)


class Total(Record):
    """The budget that both arms of a compute-matched row share, pretraining included."""

    axis: Axis
    amount: float  # epochs, training sequences, operations, or device seconds


class ReceptiveField(Record):
    """How far the network of a row sees, in steps to each side (before it, if causal)."""

    layer: int  # a kernel or an attention of it
    layers: int
    network: int  # all of them together, at most


class Place(NamedTuple):
    """Where the arms of a row meet: at a seed and, where a study has several, on a split of the data."""

    seed: int
    split: str | None = None

    def __str__(self) -> str:
        return str(self.seed) if self.split is None else f"{self.seed}, {self.split}"


class StudyRow(Record):
    """A row of a study: what both of its arms share."""

    name: str  # of the recipe
    task: str
    model: str
    factors: dict[str, Factor] = {}  # what the study varies, at this row's level
    total: Total | None = None
    changes: dict[str, Factor] = {}  # of the recipe's model, which made it as large as the others
    seen: ReceptiveField | None = None  # where that is what the study varies


class PlannedCell(Record):
    """One arm of a row at one seed, and the folders that hold it."""

    row: int = 0  # index into the study's rows
    arm: ArmText
    seed: int
    split: str | None = None  # one of the study's
    run: FolderName  # finetuning
    parent: FolderName | None = None  # pretraining


class PlannedTrial(Record):
    """One setting tried by a search, in one arm, with one seed."""

    arm: ArmName
    number: int  # of the setting, from 0, among those of the arm
    seed: int
    run: FolderName
    parent: FolderName | None = None


class PlannedSearch(Record):
    """What was tried for a row of a tuning study, chosen on validation only."""

    row: int
    protocol: SearchProtocol = "trials"
    settings: dict[ArmName, tuple[dict[str, Factor], ...]]  # by number
    relative: tuple[str, ...] = ()  # settings that were given as multiples of the arm's own value
    trials: tuple[PlannedTrial, ...]
    chosen: dict[ArmName, int] = {}  # number of the setting that is best on validation; empty until all are done

    @field_validator("settings", mode="before")
    @classmethod
    def _by_arm(cls, settings: Any) -> Any:
        """A plan from before pretraining was tuned has one list for both arms."""
        if isinstance(settings, list):
            return dict.fromkeys(ARMS, settings)
        return {**dict.fromkeys(ARMS, ()), **settings} if isinstance(settings, dict) else settings

    def space(self, *arms: ArmName) -> dict[str, tuple[Factor, ...]]:
        """Of each setting the values that were tried in these arms, in order."""
        tried: dict[str, set[Factor]] = {}
        for values in (values for arm in arms for values in self.settings[arm]):
            for name, value in values.items():
                tried.setdefault(name, set()).add(value)
        return {name: tuple(sorted(values, key=_order)) for name, values in tried.items()}


class PlannedBaseline(Record):
    """An answer without a network that rows of the study are held against, and the folder that holds it."""

    name: str
    rows: tuple[int, ...]  # which have its data and its metric
    seed: int | None = None  # None: it stands for every seed
    split: str | None = None  # one of the study's
    run: FolderName


def _order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, before words."""
    return (False, float(value), "") if isinstance(value, int | float) else (True, 0.0, str(value))


class StudyPlan(Record):
    """`study.json`: every run that a study planned, finished or not."""

    format: Literal[2] = 2
    kind: Kind = "compare"
    command: str = ""
    created: str = ""
    smoke: Smoke = False
    seeds: tuple[int, ...]
    splits: tuple[str, ...] = ()  # of the data, where the study has several
    rows: tuple[StudyRow, ...]
    arms: tuple[ArmText, ...] = ARMS  # with controls
    cells: tuple[PlannedCell, ...]
    searches: tuple[PlannedSearch, ...] = ()
    baselines: tuple[PlannedBaseline, ...] = ()
    notes: tuple[str, ...] = ()  # decisions of the planning that a reader must know

    @model_validator(mode="after")
    def _rows_are_listed(self) -> "StudyPlan":
        named = [cell.row for cell in self.cells] + [search.row for search in self.searches]
        named += [row for baseline in self.baselines for row in baseline.rows]
        if not all(0 <= row < len(self.rows) for row in named):
            raise ValueError("a cell names a row that is not listed")
        return self


def read_plan(folder: Path) -> StudyPlan:
    """The plan of the study in this folder. Raises DataError, OutputError."""
    path = folder / PLAN
    check_regular(path)
    try:
        return StudyPlan.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path} is not a study: {place + ': ' if place else ''}{first['msg']}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a study: it is not UTF-8 text") from error


def factors_text(factors: Mapping[str, Factor]) -> str:
    """`share 0.2`, for people."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in factors.items())


def setting_text(setting: Mapping[str, Factor]) -> str:
    """A setting of a search; one without values is the recipe as it stands."""
    return factors_text(setting) or "the recipe's own"


def arm_text(arm: str) -> str:
    return "SPT" if arm == "spt" else arm


def starts_at_random(arm: str) -> bool:
    """Has an arm no first stage?"""
    return arm == "scratch" or arm.startswith("joint=")


def value_text(value: Factor) -> str:
    return f"{value:g}" if isinstance(value, float) else "null" if value is None else str(value)


def run_names(plan: StudyPlan) -> list[str]:
    """Every run folder that a study needs, once, pretraining before what starts from it."""
    trials = [(trial.parent, trial.run) for search in plan.searches for trial in search.trials]
    pairs = trials + [(cell.parent, cell.run) for cell in plan.cells]
    return list(dict.fromkeys(name for pair in pairs for name in pair if name))
