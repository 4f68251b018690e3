"""What an adapter's folder says of the model that it was trained on."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from imported_tasks import IMPORTS, imported
from support import FIXTURES, tiny

from checkpoints.imports.heads import Wishes
from checkpoints.imports.task import base_model, read_adapter
from jpets.errors import InvalidTask


def test_a_revision_of_the_base_model_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    folder = shutil.copytree(IMPORTS / "peft/lora", tmp_path / "lora")

    def notes(revision: str) -> tuple[str, ...]:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"revision": revision}))
        found = read_adapter(folder, tiny(), Wishes())
        assert found is not None
        return found.notes

    assert any("revision 'v1.0'" in note for note in notes("v1.0"))
    with pytest.raises(InvalidTask, match="revision: expected none, or main"):
        base_model(folder)
    assert not any("revision" in note for note in notes("main")) and base_model(folder)


def test_an_adapter_for_other_tokens_is_refused(tmp_path: Path) -> None:
    """A trainer saves the tokenizer beside it."""
    folder = shutil.copytree(IMPORTS / "peft/lora", tmp_path / "lora")
    own = json.loads((FIXTURES / "tiny-bert" / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(own))
    assert imported(folder).deltas
    own["normalizer"]["lowercase"] = not own["normalizer"]["lowercase"]
    (folder / "tokenizer.json").write_text(json.dumps(own))
    with pytest.raises(InvalidTask, match="texts would become other tokens"):
        imported(folder)


@pytest.mark.parametrize(("usual", "own", "length"), [(16, 32, 32), (0, 32, None), (16, 16, None), (16, None, 128)])
def test_a_longer_limit_of_the_models_own_tokenizer_is_kept(
    tmp_path: Path, usual: int, own: int | None, length: int | None
) -> None:
    """By a shorter one texts would be refused, which the model's pipeline reads."""
    folder = shutil.copytree(IMPORTS / "peft/lora", tmp_path / "lora")
    shutil.copy(FIXTURES / "tiny-bert" / "tokenizer.json", folder)
    settings = {"tokenizer_class": "BertTokenizer", **({"model_max_length": own} if own is not None else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    backbone = dataclasses.replace(tiny(), config=dataclasses.replace(tiny().config, usual_length=usual))
    found = read_adapter(folder, backbone, Wishes())
    assert found is not None and backbone.config.max_positions == 128
    assert found.preprocessing.max_length == length and not found.preprocessing.truncation
    assert any("cuts texts to 32 tokens" in note for note in found.notes) == (usual == 0)


def test_what_several_outputs_decide_is_noted_where_nothing_says_it(tmp_path: Path) -> None:
    folder = shutil.copytree(IMPORTS / "peft/lora", tmp_path / "lora")

    def noted(wishes: Wishes) -> bool:
        found = read_adapter(folder, tiny(), wishes)
        assert found is not None
        return any("--problem multi-label" in note for note in found.notes)

    assert noted(Wishes()) and not noted(Wishes(problem="multi-label"))
    (folder / "config.json").write_text(json.dumps({"problem_type": "single_label_classification"}))
    assert not noted(Wishes())


def test_the_models_own_settings_say_what_a_classifier_decides(tmp_path: Path) -> None:
    folder = shutil.copytree(IMPORTS / "peft/lora", tmp_path / "lora")
    labels = {str(at): f"own-{at}" for at in range(imported(folder).head.outputs)}
    own = {"problem_type": "multi_label_classification", "id2label": labels}
    (folder / "config.json").write_text(json.dumps(own))
    found = imported(folder)
    assert found.head.problem == "multi-label" and found.labels == tuple(labels.values())
    (folder / "config.json").write_text(json.dumps({"problem_type": "guess"}))
    with pytest.raises(InvalidTask, match="problem_type: expected one of"):
        imported(folder)
