"""The summary of a training: the chosen settings, the baselines, and whether it beat them."""

from __future__ import annotations

from collections.abc import Mapping

from jpets.training.metrics import main_name
from jpets.training.session import Result

IDLE = "training gained nothing over the usual answer or a linear head on the frozen backbone"


def chosen(result: Result, method: str) -> str:
    """Rates, batches and updates of a run."""
    plan = result.plan
    return (
        f"{method} at {result.outcome.rate:.1e}, head at {plan.head_rate:.1e}, batches of {plan.batch}, "
        f"{len(result.losses) // plan.accumulate} updates in at most {plan.epochs} epochs"
    )


def held_against(result: Result) -> Mapping[str, float]:
    """The main score of each baseline on the texts held out, next to the task's own."""
    known = {"majority": result.beside.majority, "frozen": result.beside.frozen}
    return {f"{name}_{main_name(own)}": own[main_name(own)] for name, own in known.items() if own}
