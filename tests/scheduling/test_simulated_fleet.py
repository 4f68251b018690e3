"""The profile that simulations are run from."""

from __future__ import annotations

from benches.scheduling.migration import METHODS, read_fleet
from results.documents import RESULTS


def test_the_profile_of_the_page_has_the_classes_of_today() -> None:
    """Else no command below the page's tables of simulations would run."""
    fleet = read_fleet(RESULTS / "cpu-2core" / "profile-minilm.json", "minilm-l6", METHODS.split(","), 0.25)
    assert fleet.cluster(2, 8).rate(seed=0) > 0
