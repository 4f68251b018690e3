"""Write ``tests/fixtures/imports/<library>/<case>``: checkpoints of PEFT and of adapters with their own logits.

The cases are those of ``imported_models``; the environments are those of ``make_fixtures.py``. Inputs are those of
``tiny-bert/outputs.npz``.
"""

from __future__ import annotations

import shutil
from typing import Annotated, Any

import numpy as np
import typer
from imported_models import HUB, PEFT, Library, write
from make_fixtures import stored_inputs
from reference_models import FIXTURES

SEED = 11


def main(library: Annotated[Library, typer.Argument(help="whose checkpoints")]) -> None:
    """Write the fixtures of one library."""
    cases: dict[Library, Any] = {"peft": PEFT, "adapters": HUB}
    for name in cases[library]:
        folder = FIXTURES / "imports" / library / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        logits = write(library, name, folder, stored_inputs(), SEED)
        np.savez_compressed(folder / "outputs.npz", logits=logits)
        size = sum(path.stat().st_size for path in folder.iterdir())
        typer.echo(f"{library}/{name}: {logits.shape} {size / 1e3:.0f} kB")


if __name__ == "__main__":
    typer.run(main)
