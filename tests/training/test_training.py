"""Training by the functions that serve: recipes, whole runs, runs that were killed, tasks trained together."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from one_task import task_logits
from support import ENGINE_SETTINGS, shallow

from checkpoints.task_file import read_task, task_to_bytes
from jpets.deltas import trainable
from jpets.deltas.diff import DiffGates
from jpets.deltas.mask import MaskScores, kept
from jpets.deltas.merge import kernel
from jpets.deltas.recipe import Recipe
from jpets.engine.batch.bucket import Bucket
from jpets.engine.engine import Engine
from jpets.errors import InvalidInput, OutOfSpace
from jpets.model.encoder import random_params, split
from jpets.tokenizing import TextEncoder
from jpets.training import metrics
from jpets.training.checkpoints import Checkpoints, claimed
from jpets.training.data import Example
from jpets.training.heads import new_head
from jpets.training.labels import label_names, make_rows
from jpets.training.many import train_many
from jpets.training.methods import direct_recipe, is_direct
from jpets.training.plan import Training, TrainingPlan
from jpets.training.run import UpdateReport, train
from jpets.training.session import evaluate_task, run_training
from jpets.training.together import Member, train_together
from jpets.training.tokens import rectangle
from jpets.types import Classification, Preprocessing, Query

WORDS: Mapping[str, list[str]] = {"code": ["library", "python", "module"], "fun": ["game", "music", "sound"]}
RULE = Preprocessing(max_length=16, truncation=True)
PLAN = TrainingPlan(epochs=2, batch=8, dtype="float32", seed=1)


def examples(count: int, seed: int = 0) -> list[Example]:
    """Texts of 9 to 16 tokens, so that only one program of each kind is compiled."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(sorted(WORDS), count)
    return [Example(" ".join(rng.choice(WORDS[label], rng.integers(12, 15))), None, str(label)) for label in labels]


BACKBONE = shallow(layers=1)
CONFIG = BACKBONE.config
"""One layer: it compiles three times as fast as three."""


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return jax.tree.map(np.asarray, random_params(CONFIG))


def rows_of(given: list[Example]) -> Any:
    head = new_head("sequence-classification", "single-label", 2, CONFIG.hidden_size)
    names = label_names(given, "sequence-classification", "single-label")
    return head, make_rows(given, head, names, TextEncoder.of(BACKBONE), RULE)


def recipes(base: dict[str, Any]) -> dict[str, Recipe]:
    config = CONFIG
    found: dict[str, Recipe] = {name: direct_recipe(name, {}, config, base) for name in trainable() if is_direct(name)}
    return found | {"mask": MaskScores(base, config), "diff": DiffGates(config, base)}


@pytest.mark.parametrize("method", ["adapter", "bitfit", "ia3", "prompt", "mask", "diff"])
def test_recipes_start_where_the_backbone_is_and_end_in_a_task(method: str, base: dict[str, Any]) -> None:
    config, encoder, recipe = CONFIG, split(CONFIG), recipes(base)[method]
    head, rows = rows_of(examples(4))
    batch = rectangle(rows.tokens, 16, 0)
    tensors = {name: jnp.asarray(array) for name, array in head.tensors.items()}
    params = jax.tree.map(jnp.asarray, base)
    tree = recipe.start(np.random.default_rng(0))
    own, deltas = recipe.vary(params, tree, None)
    found = task_logits(encoder, own, deltas, head, batch, tensors)
    plain = task_logits(encoder, params, (), head, batch, tensors)
    if method == "prompt":
        assert 1e-4 < np.abs(found - plain).max() < 1.0
    elif method == "mask":
        weight = kernel(params, config, 0, "ffn_in")
        changed = kernel(own, config, 0, "ffn_in")
        assert 0.03 < float((changed == 0).mean()) < 0.07
        np.testing.assert_array_equal(changed[changed != 0], weight[changed != 0])
    else:
        np.testing.assert_allclose(found, plain, atol=1e-5)
    finished = recipe.finish(tree)
    assert [delta.method for delta in finished] == [method]


def test_a_masks_gradient_is_that_of_the_mask_itself(base: dict[str, Any]) -> None:
    config = CONFIG
    recipe = MaskScores(base, config)
    params = jax.tree.map(jnp.asarray, base)
    tree = recipe.start(np.random.default_rng(0))
    probe = jnp.asarray(np.random.default_rng(1).normal(size=config.dims("ffn_in")), jnp.float32)

    def loss(scores: Any) -> Any:
        return (kernel(recipe.vary(params, scores, None)[0], config, 0, "ffn_in") * probe).sum()

    slopes = jax.grad(loss)(tree)
    np.testing.assert_allclose(slopes["ffn_in"][0], kernel(params, config, 0, "ffn_in") * probe, rtol=1e-5)
    assert not np.any(slopes["ffn_out"]) and not np.any(slopes["query"])
    assert abs(float(kept(tree["query"][0]).mean()) - 0.95) < 0.02


def test_a_search_is_projected_to_its_density(base: dict[str, Any]) -> None:
    config, block = CONFIG, 16
    search = DiffGates(config, base, density=0.02, block=block)
    tree = search.start(np.random.default_rng(0))
    rng = np.random.default_rng(2)
    tree["values"] = {
        site: jnp.asarray(rng.normal(size=own.shape), jnp.float32) for site, own in tree["values"].items()
    }
    values = search.then(tree)
    (delta,) = values.finish(values.start(rng))
    total = sum(own.size for own in tree["values"].values())
    found = sum(array.size for name, array in delta.tensors.items() if name.endswith("/values"))
    assert found == pytest.approx(0.02 * total, abs=block**2)
    assert delta.settings.get("block", 1) == block
    drawn = search.vary(jax.tree.map(jnp.asarray, base), tree, jax.random.key(0))[0]
    closed = kernel(drawn, config, 0, "ffn_in") == kernel(base, config, 0, "ffn_in")
    assert float(jnp.mean(closed)) < 0.2  # gates start nearly open
    assert float(search.penalty(tree)) == pytest.approx(search.price * total * 0.9933, rel=1e-3)


class Killed(Exception):
    pass


def test_a_killed_run_goes_on_to_the_same_task_and_serves_as_it_was_trained(
    tmp_path: Path, base: dict[str, Any]
) -> None:
    encoder, recipe = split(CONFIG), direct_recipe("lora", {"rank": 4}, CONFIG, base)
    head, rows = rows_of(examples(40))
    given, judged = rows.take(range(32)), rows.take(range(32, 40))
    plan = dataclasses.replace(PLAN, rate=1e-2, head_rate=1e-2, epochs=4, accumulate=2)
    whole = train(encoder, base, recipe, head, given, plan, held_out=judged)
    assert len(whole.losses) == 16 and np.mean(whole.losses[-4:]) < 0.8 * np.mean(whole.losses[:4])

    def kill(step: UpdateReport) -> None:
        if step.number == 7:
            raise Killed

    for report in (kill, lambda step: None):
        keeper = Checkpoints(tmp_path / "run")
        try:
            again = train(
                encoder, base, recipe, head, given, plan, held_out=judged, keeper=keeper, save_every=3, report=report
            )
        except Killed:
            pass
        finally:
            keeper.close()
    assert again.losses == whole.losses and again.held_out == whole.held_out
    for mine, theirs in zip(again.deltas, whole.deltas, strict=True):
        for name, array in mine.tensors.items():
            np.testing.assert_array_equal(array, theirs.tensors[name])


def test_devices_share_a_batch(base: dict[str, Any]) -> None:
    encoder, recipe = split(CONFIG), direct_recipe("bitfit", {}, CONFIG, base)
    head, rows = rows_of(examples(16))
    plan = dataclasses.replace(PLAN, epochs=1)
    one = train(encoder, base, recipe, head, rows, plan)
    two = train(encoder, base, recipe, head, rows, plan, devices=jax.local_devices()[:2])
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-5)
    for name, array in two.deltas[0].tensors.items():
        np.testing.assert_allclose(array, one.deltas[0].tensors[name], atol=1e-4)
    with pytest.raises(InvalidInput, match="3 devices must divide the batch"):
        run_training("own", BACKBONE, Training("lora", {}, PLAN), examples(16), devices=jax.local_devices()[:3])


def test_training_together_is_training_each(base: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpets.training.groups.PROGRAMS", 2)  # fewer to compile
    encoder, config = split(CONFIG), CONFIG
    members = []
    for seed, count in enumerate((16, 30, 16, 16, 16)):  # more than one group of them
        head, rows = rows_of(examples(count, seed))
        if seed == 1:
            head = new_head("sequence-classification", "single-label", 3, config.hidden_size, seed=seed)
        judged = rows_of(examples(12, seed=7))[1] if seed < 2 else None
        members.append(Member(direct_recipe("lora", {"rank": 4}, config, base, seed), head, rows, judged))
    together = train_together(encoder, base, members, PLAN)
    for at in (0, 1, 4):
        member, found = members[at], together[at]
        alone = train(encoder, base, member.recipe, member.head, member.rows, PLAN, held_out=member.judged)
        np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-4)
        assert found.held_out == (pytest.approx(alone.held_out, rel=1e-4) if at < 2 else None)
        assert found.head.outputs == member.head.outputs
        for name, array in found.deltas[0].tensors.items():
            np.testing.assert_allclose(array, alone.deltas[0].tensors[name], atol=1e-5)
    other = Member(direct_recipe("lora", {"rank": 8}, config, base), members[0].head, members[0].rows)
    kinds = [direct_recipe("adapter", {"bottleneck": 8, "activation": each}, config, base) for each in ("relu", "gelu")]
    one, another = (Member(recipe, members[0].head, members[0].rows) for recipe in kinds)
    for unlike in ([members[0], other], [one, another]):
        with pytest.raises(InvalidInput, match="same methods, settings and shapes"):
            train_together(encoder, base, unlike, PLAN)
    pooled = dataclasses.replace(members[0], head=dataclasses.replace(members[0].head, pooling="cls"))
    with pytest.raises(InvalidInput, match="heads of one type"):
        train_together(encoder, base, [members[0], pooled], PLAN)


def test_a_trained_task_learns_is_scored_and_served(tmp_path: Path) -> None:
    training = Training(
        "adapter", {"bottleneck": 8}, dataclasses.replace(PLAN, epochs=4, rate=1e-2, head_rate=1e-2), max_length=16
    )
    seen: list[UpdateReport] = []
    found = run_training("own", BACKBONE, training, examples(64), report=seen.append)
    assert seen[-1].number == seen[-1].of == len(found.losses)
    assert found.scores["accuracy"] > 0.9
    task = read_task(task_to_bytes(found.task), id="own", config=CONFIG, backbone=BACKBONE.ref())
    others = examples(32, seed=9)
    scored = evaluate_task(task, BACKBONE, others)
    with Engine(
        BACKBONE, [task], ENGINE_SETTINGS, cache_dir=tmp_path, buckets=[Bucket(256, ((16, 16),))]
    ).start() as engine:
        answers = engine.infer([Query("own", str(each.text)) for each in others])
    labels = [answer.label for answer in answers if isinstance(answer, Classification)]
    right = [label == each.label for label, each in zip(labels, others, strict=True)]
    assert scored["accuracy"] == pytest.approx(np.mean(right)) and np.mean(right) > 0.9
    resumed = run_training(
        "own",
        BACKBONE,
        dataclasses.replace(training, settings={}, plan=dataclasses.replace(PLAN, epochs=1)),
        examples(64),
        start=task,
    )
    assert resumed.losses[0] < found.losses[0] / 2


def test_a_training_that_could_not_be_scored_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "seqeval" else object())
    began: list[UpdateReport] = []
    with pytest.raises(InvalidInput, match=r"install jpets\[train\]"):
        run_training("own", BACKBONE, Training("lora", {}, PLAN), examples(16), report=began.append)
    assert not began


def test_a_folder_is_one_runs(tmp_path: Path) -> None:
    """The progress of another run in the folder is never taken for this one's."""
    training = Training("frozen", {}, dataclasses.replace(PLAN, epochs=1), max_length=16)
    texts = examples(16)

    def run(training: Training, texts: list[Example]) -> list[float]:
        return [*run_training("own", BACKBONE, training, texts, folder=tmp_path / "run").losses]

    assert run(training, texts) == run(training, texts)
    longer = dataclasses.replace(training, plan=dataclasses.replace(PLAN, epochs=2))
    first, second = sorted({str(each.label) for each in texts})
    flipped = [dataclasses.replace(each, label=second if each.label == first else first) for each in texts]
    for other, own in ((longer, texts), (dataclasses.replace(training, method="bitfit"), texts), (training, flipped)):
        with pytest.raises(InvalidInput, match="run: it holds the progress of a run with other texts"):
            run(other, own)


def test_a_folder_is_one_process_at_a_time_and_of_whole_files(tmp_path: Path) -> None:
    training = Training("frozen", {}, dataclasses.replace(PLAN, epochs=1), max_length=16)

    def run() -> None:
        run_training("own", BACKBONE, training, examples(16), folder=tmp_path / "run")

    with claimed(tmp_path / "run", "another"), pytest.raises(InvalidInput, match="run: another process trains in it"):
        run()
    shutil.rmtree(tmp_path / "run")
    run()
    for path in (tmp_path / "run").rglob("*METADATA*"):
        path.write_text("damaged")
    with pytest.raises(InvalidInput, match=r"run/0: its checkpoint \d+ is damaged"):
        run()


def test_a_full_disk_is_told_and_nothing_half_written_stays(
    tmp_path: Path, base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, recipe = split(CONFIG), direct_recipe("bitfit", {}, CONFIG, base)
    head, rows = rows_of(examples(8))
    keeper = Checkpoints(tmp_path / "run")

    def full(manager: Any, step: int, **how: Any) -> None:
        (tmp_path / "run" / f"{step}.orbax-checkpoint-tmp").mkdir()
        raise ValueError("RESOURCE_EXHAUSTED: Error writing [OS error 28: ENOSPC No space left on device]")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(OutOfSpace, match="the disk is full"):
        train(encoder, base, recipe, head, rows, dataclasses.replace(PLAN, epochs=1), keeper=keeper)
    assert not list((tmp_path / "run").iterdir())
    keeper.close()


def test_too_few_batches_for_an_update_are_refused() -> None:
    plan = dataclasses.replace(PLAN, epochs=1, accumulate=64)
    with pytest.raises(InvalidInput, match="make no update of 64 batches"):
        run_training("own", BACKBONE, Training("frozen", {}, plan, max_length=16), examples(16))


def test_what_cannot_be_trained_is_refused() -> None:
    def run(method: Any, settings: Mapping[str, Any] = {}, count: int = 16) -> None:
        run_training("own", BACKBONE, Training(method, settings, PLAN, max_length=16), examples(count))

    for method, settings, message in (
        ("mask", {"rank": 3}, r"mask takes no settings, found \['rank'\]"),
        ("diff", {"densty": 0.1}, r"diff takes the settings .*, found \['densty'\]"),
        ("diff", {"price": "x"}, "price must be a number"),
        ("lora", {"r": 64}, r"lora takes the settings .*, found \['r'\]"),
        ("lora", {"alpha": 10**400}, "alpha must be a number above 0"),
        ("lora", {"alpha": 0}, "alpha must be a number above 0"),
        ("diff", {"price": 10**400}, "price must be a number"),
        ("lora", {"rank": 0}, "rank must be a whole number up to the hidden size, 64, found 0"),
        ("lora", {"rank": 1_000_000_000}, "rank must be a whole number up to the hidden size"),
        ("prompt", {"tokens": True}, "tokens must be a whole number"),
        ("diff", {"block": 7}, "diff: block must divide the sizes of all matrices, found 7"),
        ("diff", {"block": 0}, "block must be a whole number"),
        ("diff", {"density": 0}, "density must be a share above 0"),
        ("diff", {"density": float("nan")}, "density must be a share above 0"),
        ("bitfit", {"sites": ["nowhere"]}, "^bitfit: sites must be some of"),
        ("bitfit", {"layers": [7]}, "^bitfit: layers must be increasing numbers"),
        ("adapter", {"placement": "nowhere"}, "adapter: adapter placement must be"),
        ("lora", {"sites": ["nowhere"]}, "sites must be a non-empty subset"),
    ):
        with pytest.raises(InvalidInput, match=message):
            run(method, settings)
    with pytest.raises(InvalidInput, match="to train on and to hold out"):
        run("lora", count=4)


def test_what_does_worse_on_texts_held_out_is_not_kept_and_ends_its_training(base: dict[str, Any]) -> None:
    """Each task by itself, also if others continue."""
    encoder, config = split(CONFIG), CONFIG
    plan = dataclasses.replace(PLAN, epochs=4, patience=0, rate=0.02, head_rate=0.02)
    recipe = direct_recipe("bitfit", {}, config, base)
    members = []
    for seed, flipped in ((0, False), (1, True)):
        head, rows = rows_of(examples(16, seed))
        judged = rows_of(examples(8, seed=7))[1]
        if flipped:  # everything that is learnt is wrong there
            judged = judged._replace(targets=[1 - target for target in judged.targets])
        members.append(Member(recipe, head, rows, judged))
    together = train_together(encoder, base, members, plan)
    assert len(together[0].losses) > len(together[1].losses)
    for member, found in zip(members, together, strict=True):
        alone = train(encoder, base, recipe, member.head, member.rows, plan, held_out=member.judged)
        np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-3)
        assert found.held_out == pytest.approx(alone.held_out, rel=1e-3)
        for name, array in found.deltas[0].tensors.items():
            np.testing.assert_allclose(array, alone.deltas[0].tensors[name], atol=1e-4)


def test_many_tasks_are_what_each_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jpets.training.groups.PROGRAMS", 2)  # fewer to compile
    training = Training("ia3", {}, dataclasses.replace(PLAN, epochs=1), held_out=0.25, max_length=16)
    rated = [dataclasses.replace(each, label=len(str(each.label)) / 2.5) for each in examples(16, 3)]
    sets = [dataclasses.replace(each, label=["x", *str(each.label)[: at % 3]]) for at, each in enumerate(examples(16))]
    few = [dataclasses.replace(each, label=["yes"][: at % 2]) for at, each in enumerate(examples(16))]
    given = {"kinds": examples(16, 1), "few": few, "values": rated, "sets": sets}
    given["answers"] = [
        Example("what is it", f"{each.text}", {"text": "library", "answer_start": str(each.text).index("library")})
        for each in examples(64)
        if str(each.text).startswith(("library", "module library"))
    ]
    found = train_many(BACKBONE, training, given)
    assert list(found) == list(given) and found["values"].task.head.problem == "regression"
    assert found["few"].task.head.outputs < found["sets"].task.head.outputs
    for name in ("few", "values", "answers"):
        alone = run_training(name, BACKBONE, training, given[name])
        np.testing.assert_allclose(found[name].losses, alone.losses, rtol=1e-3)
        assert found[name].held_out == pytest.approx(alone.held_out, rel=1e-3)
        assert found[name].scores == pytest.approx(alone.scores, rel=1e-2) and found[name].task.id == name
    with pytest.raises(InvalidInput, match=r"are trained by one of .*, found mask"):
        train_many(BACKBONE, dataclasses.replace(training, method="mask"), given)
    whole = dataclasses.replace(training, plan=dataclasses.replace(PLAN, epochs=1, accumulate=3))
    with pytest.raises(InvalidInput, match="kinds: 2 batches of 8 texts make no update"):
        train_many(BACKBONE, whole, given)
    with pytest.raises(InvalidInput, match=r"same: .*at least two labels"):
        train_many(BACKBONE, training, {"same": [dataclasses.replace(each, label="x") for each in examples(4)]})
