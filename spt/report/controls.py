"""Controls: arms that say what SPT - scratch is made of. Each is held against both, seed by seed.

Everything of a control is over the seeds at which it, scratch and SPT have all finished, so that its two differences
add up to SPT - scratch over these seeds.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from spt.report.arms import Arm, Comparison, cost_ratios, summarise_arm
from spt.report.verdict import Difference, PairedContrast, adjusted_fields, ended_by_clock, final_score
from spt.runs.index import Failure, control_outcomes
from spt.runs.plan import Ended, Factor, Place, Record
from spt.runs.result import Result

FAMILY = "contrasts with controls of this report"

# Of each control: what it has, and what SPT has beyond that.
QUESTIONS = {
    "frozen": ("the pretrained features alone, under a trained head", "what training all weights adds"),
    "parts": ("only {} of the pretrained network", "what the rest of it adds"),
    "shuffled": ("pretraining on shuffled steps", "what their order adds"),
    "other": ("pretraining on the inputs of {}", "what the task's own inputs add"),
    "joint": ("pretraining's loss beside the task's own, times {}", "what a first stage adds"),
}


class ControlSeed(Record):
    """A control at one seed. A missing score has its reason among the control's failures."""

    seed: int
    split: str | None = None  # where a study has several
    score: float | None
    state: Ended | Literal["done"]
    run: str
    pretrain_run: str | None


class Control(Record):
    """An arm beside scratch and SPT, of one row. Means, costs and differences are over the n seeds that all three
    arms have finished; the score of a control is over its own where there is no such seed."""

    label: str  # of the row
    arm: str
    factors: dict[str, Factor]
    source: str
    metric: str
    n: int
    planned: int
    scratch: float | None
    spt: float | None
    score: float | None
    cost: Arm | None
    ratios: dict[str, float | None]  # control : scratch, by field of `Cost`, its pretraining included
    over_scratch: PairedContrast  # control - scratch; Holm over all contrasts with controls of the report
    below_spt: PairedContrast  # SPT - control
    verdict: str
    seeds: tuple[ControlSeed, ...]
    failures: tuple[Failure, ...]

    @property
    def contrasts(self) -> tuple[PairedContrast, PairedContrast]:
        return self.over_scratch, self.below_spt


class _Compared(NamedTuple):
    """A control's runs, and its differences from both arms before any adjustment."""

    comparison: Comparison
    arm: str
    ended: dict[Place, Result | Failure]
    triples: list[tuple[Result, Result, Result]]  # scratch, SPT and control of the same seed, all finished
    over_scratch: Difference
    below_spt: Difference

    def identity(self) -> frozenset[object]:
        """Which runs are compared, whatever their row is called."""
        runs = self.comparison.runs
        return frozenset(
            (runs.root.resolve(), cell.arm, cell.seed, cell.run)
            for cell in (*runs.cells, *runs.controls)
            if cell.arm in ("scratch", "spt", self.arm)
        )


def compare_controls(rows: Sequence[Comparison]) -> tuple[Control, ...]:
    """Every control of the rows, which have their labels. All contrasts are one family; those of the same runs count
    once."""
    compared = [_compare(comparison, arm) for comparison in rows for arm in _arms(comparison)]
    identities = [each.identity() for each in compared]
    first = [2 * identities.index(identity) + side for identity in identities for side in range(2)]
    differences = [difference for each in compared for difference in (each.over_scratch, each.below_spt)]
    updates = adjusted_fields(differences, FAMILY, first)
    contrasts = [
        PairedContrast(
            first=difference.names[0],
            second=difference.names[1],
            difference=difference.test.mean if difference.test else None,
            **difference.fields() | update,
        )
        for difference, update in zip(differences, updates, strict=True)
    ]
    return tuple(_control(each, *contrasts[2 * i : 2 * i + 2]) for i, each in enumerate(compared))


def _arms(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(cell.arm for cell in comparison.runs.controls))


def _compare(comparison: Comparison, arm: str) -> _Compared:
    runs, row = comparison.runs, comparison.row
    outcomes = control_outcomes(runs, row.metric)
    ended = {place: outcomes[place, arm] for place in runs.places}
    scratch, spt = comparison.results("scratch"), comparison.results("spt")
    triples = [
        (scratch[place], spt[place], result)
        for place, result in ended.items()
        if isinstance(result, Result) and place in scratch and place in spt
    ]
    about = {
        "metric": row.metric,
        "higher_is_better": row.higher_is_better,
        "planned": len(runs.places),
        "smoke": row.smoke or any(isinstance(result, Result) and result.smoke for result in ended.values()),
        "decisions": ("first", "second"),
    }
    return _Compared(
        comparison,
        arm,
        ended,
        triples,
        Difference.of([((own,), (scratch,)) for scratch, _, own in triples], names=(arm, "scratch"), **about),
        Difference.of([((spt,), (own,)) for _, spt, own in triples], names=("SPT", arm), **about),
    )


def _control(compared: _Compared, over_scratch: PairedContrast, below_spt: PairedContrast) -> Control:
    comparison, arm, ended, triples = compared[:4]
    sides = [summarise_arm([triple[i] for triple in triples]) for i in range(3)]
    scratch, spt, own = (side.score if side else None for side in sides)
    if not triples:
        alone = summarise_arm([result for result in ended.values() if isinstance(result, Result)])
        own = alone.score if alone else None
    clock = ended_by_clock({arm: [own for *_, own in triples]})
    controls = [cell for cell in comparison.runs.controls if cell.arm == arm]
    failures = tuple(outcome for outcome in ended.values() if isinstance(outcome, Failure))
    if comparison.row.only is not None and _is_untouched(ended):
        failures = ()  # it was not asked for, as the row's other arm was not
    row, cells = comparison.row, {Place(cell.seed, cell.split): cell for cell in controls}
    return Control(
        label=row.label,
        arm=arm,
        factors=row.factors,
        source=row.source,
        metric=row.metric,
        n=len(triples),
        planned=row.planned,
        scratch=scratch,
        spt=spt,
        score=own,
        cost=sides[2],
        ratios=cost_ratios(sides[0], sides[2]),
        over_scratch=over_scratch,
        below_spt=below_spt,
        verdict="; ".join(filter(None, [_sentence(arm, over_scratch, below_spt), clock])),
        seeds=tuple(
            ControlSeed(
                **place._asdict(),
                score=final_score(outcome) if isinstance(outcome, Result) else None,
                state=outcome.state if isinstance(outcome, Failure) else "done",
                run=cells[place].run if place in cells else "",
                pretrain_run=cells[place].parent if place in cells else None,
            )
            for place, outcome in ended.items()
        ),
        failures=failures,
    )


def _is_untouched(ended: Mapping[Place, Result | Failure]) -> bool:
    """No run of this control was started."""
    return all(isinstance(outcome, Failure) and outcome.state == "missing" for outcome in ended.values())


def _sentence(arm: str, over_scratch: PairedContrast, below_spt: PairedContrast) -> str:
    kind, _, value = arm.partition("=")
    has, beyond = QUESTIONS[kind]
    has = has.format(" and ".join(value.split("+")))
    if over_scratch.verdict == below_spt.verdict:  # nothing can be said, for the same reason
        return f"{has}: {over_scratch.verdict}"
    return f"{has}: {over_scratch.verdict}; {beyond}: {below_spt.verdict}"
