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

from jpets.engine.kernels.calls import Call, Table
from jpets.engine.kernels.trial import Outcome, Trials
from jpets.engine.kernels.trials import Name, found_line, trying_line
from jpets.errors import one_line

log = logging.getLogger(__name__)

BROKEN = 3
"""Exit code where the device answers no more: a new process goes on with the next candidate."""


def try_all(
    calls: Iterable[Call],
    wanted: Sequence[Name],
    operators: Table,
    device: jax.Device,
    tell: Callable[[str], object],
    works: Callable[[jax.Device], bool],
) -> bool:
    """Tells of each wanted candidate before and after its trial. Returns whether the device still works."""
    by_name = {call.name: call for call in calls}
    trials: dict[tuple[str, str], Trials] = {}
    for name in wanted:
        operator, shape, candidate = name
        tell(trying_line(name))
        try:
            if (operator, shape) not in trials:
                trials = {(operator, shape): Trials(operators[operator], by_name[operator, shape], device)}
            outcome = trials[operator, shape].outcome(candidate)
        except Exception as error:  # the reference's: out of memory, say
            log.debug("a reference failed", exc_info=True)
            outcome = Outcome(out=f"there was nothing to compare with: {type(error).__name__}: {one_line(error)[:300]}")
        tell(found_line(name, outcome))
        if outcome.out and not works(device):
            return False
    return True


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
