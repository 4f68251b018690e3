"""Tasks of the upper layers alone, which share the others on one text."""

from __future__ import annotations

import numpy as np
import pytest
from support import device_params, make_head, make_task, shallow

from jpets.app.commands.training.command import settings_of
from jpets.deltas import first_layer
from jpets.errors import InvalidInput
from jpets.training.methods import checked_settings, direct_recipe, first_stage

BACKBONE = shallow(layers=3)
CONFIG = BACKBONE.config


@pytest.mark.parametrize("method", ["adapter", "lora", "ia3", "bitfit"])
@pytest.mark.parametrize("layers", ["upper", "1,2"])
def test_its_deltas_leave_the_lower_layers_alone(method: str, layers: str) -> None:
    settings = settings_of([f"layers={layers}"])
    (delta,) = direct_recipe(method, settings, CONFIG, device_params(BACKBONE)).deltas
    assert list(delta.settings["layers"]) == [1, 2]
    head = make_head(np.random.default_rng(0), CONFIG.hidden_size, 3)
    assert first_layer(make_task(BACKBONE, "some", [delta], head), CONFIG) == 1


def test_other_settings_stay_and_methods_without_layers_refuse() -> None:
    assert checked_settings("lora", {"rank": 2, "layers": [0]}, CONFIG) == {"rank": 2, "layers": [0]}
    assert checked_settings("lora", {"rank": 2, "layers": "upper"}, CONFIG) == {"rank": 2, "layers": [1, 2]}
    for method in ("prompt", "frozen", "full"):
        with pytest.raises(InvalidInput):
            first_stage(method, {"layers": "upper"}, CONFIG, device_params(BACKBONE), 1, 0)
