"""What ``jpets task show`` says of a task's file."""

from __future__ import annotations

from typing import Any

import pytest

from jpets.app.commands.tasks.commands import _where


@pytest.mark.parametrize(
    ("deltas", "told"),
    [
        ([], "in its head alone"),
        ([{"method": "lora", "layers": [3, 4, 5]}], "from layer 3 on, of 6"),
        ([{"method": "lora", "layers": [3, 5]}, {"method": "adapter", "layers": [2]}], "from layer 2 on, of 6"),
        ([{"method": "lora"}], "from layer 0 on, of 6"),
        ([{"method": "bitfit", "layers": [4], "sites": ["embeddings_norm", "query"]}], "from layer 0 on, of 6"),
    ],
)
def test_where_a_task_differs_from_its_backbone(deltas: list[dict[str, Any]], told: str) -> None:
    assert _where({"deltas": deltas, "backbone": {"layers": 6}}) == told
