"""The process that tries candidates: ``python -m jpets.engine.kernels.process DEVICE``, with the device's number.

The first line of standard input says what to try, of which family. See ``trials`` for what it answers.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from jpets.engine.kernels.calls import Call, Operator, Table
from jpets.engine.kernels.description import describe
from jpets.engine.kernels.trial import Trials
from jpets.engine.kernels.trials import Name, found_line, left_line, trying_line

log = logging.getLogger(__name__)

BROKEN = 3
"""Exit code where the device answers no more: a new process goes on with the next candidate."""


def try_all(
    calls: Iterable[Call],
    wanted: Sequence[Name],
    table: Table,
    device: jax.Device,
    tell: Callable[[str], object],
    works: Callable[[jax.Device], bool],
) -> bool:
    """Tells of each wanted candidate before and after its trial. Returns whether the device still works.

    Candidates are left out that cannot be compared, as the reference fails, or that the device has no room for.
    """
    by_name = {call.name: call for call in calls}
    trials: dict[tuple[str, str], Trials | None] = {}
    for name in wanted:
        operator, shape, candidate = name
        if (operator, shape) not in trials:
            trials = {(operator, shape): _made(table[operator], by_name[operator, shape], device)}
        own = trials[operator, shape]
        if own is None:
            continue
        tell(trying_line(name))
        outcome = own.outcome(candidate)
        tell(left_line(name) if outcome is None else found_line(name, outcome))
        if (outcome is None or outcome.out) and not works(device):
            return False
    return True


def _made(operator: Operator, call: Call, device: jax.Device) -> Trials | None:
    """The trials of a call, in which the reference has run; None where it cannot."""
    try:
        return Trials(operator, call, device, usual=operator.default(describe(device)))
    except Exception:  # lowering, compiling and running may raise anything
        log.warning("a reference failed: its candidates are not tried", exc_info=True)
        return None


def answers(device: jax.Device) -> bool:
    """Whether the device computes anything: after some errors it does not until the process ends."""
    try:
        return float(jnp.sum(jax.device_put(jnp.ones(8), device))) == 8.0
    except Exception:  # any error means no
        log.debug("the device does not answer", exc_info=True)
        return False


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    from jpets.engine.kernels.class_calls import class_calls, every_call
    from jpets.engine.kernels.operators import OPERATORS
    from jpets.engine.programs.program import key_from_json
    from jpets.engine.workloads.registry import family_from_json

    work = json.loads(sys.stdin.readline())
    device = jax.local_devices()[int(sys.argv[1])]
    calls = every_call(class_calls(family_from_json(work["family"]), key_from_json(work["program"]))).values()
    wanted = [(str(operator), str(shape), str(candidate)) for operator, shape, candidate in work["wanted"]]
    if not try_all(calls, wanted, OPERATORS, device, tell, answers):
        sys.exit(BROKEN)


if __name__ == "__main__":
    main()
