"""The choice of candidates, on devices that are only described, by processes that only pretend to try."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

import pytest
from fake_kernels import GPU

from jpets.config import NAMED_BACKBONES, Kernels
from jpets.deltas.operators import CANDIDATES, OVER_RUNS, Operators, usual_operators
from jpets.deltas.protocol import ClassKey
from jpets.engine.batch.bucket import Bucket, widest
from jpets.engine.kernels import choosing
from jpets.engine.kernels.choice import read_choice
from jpets.engine.kernels.choosing import AUTO, Chosen, choose, file_name, known_operators
from jpets.engine.kernels.trials import Name
from jpets.engine.programs.mesh import MeshSlice, first_device
from jpets.engine.programs.program import Family, ProgramKey, trace_program
from jpets.engine.workloads.encoder_network import EncoderNetwork
from jpets.engine.workloads.registry import family_from_json
from jpets.errors import InvalidInput
from pallas_kernels.gates import CPU, HOPPER, Device

MASK = ClassKey("mask", (("query", 0), ("ffn_in", 0)), (0,))
DIFF = ClassKey("diff", (("query", 3072),), (0,))
LORA = ClassKey("lora", (("query", 8),), (0,))
ADAPTER = ClassKey("adapter", (("after_attn_out", 64),), (0,), (("activation", "relu"), ("input", "output")))
KEYS = (ADAPTER, DIFF, LORA, MASK)
NETWORK = EncoderNetwork(NAMED_BACKBONES["bert-base"]).shortened(1)
FAMILY = Family(NETWORK, "bfloat16", tuple((key, 8) for key in KEYS), operators=usual_operators("gpu"))
PROGRAM = ProgramKey(Bucket(256, ((8, 32),)), widest(KEYS, heavy=True))
SCRIPT = """
import json, sys
ratios, most = json.loads(sys.argv[1]), int(sys.argv[2])
for name in json.loads(sys.stdin.readline())[:most]:
    print(json.dumps({"trying": name}), flush=True)
    ratio = ratios.get(name[2], 1.0)
    out = "" if ratio else "it is wrong"
    print(json.dumps({"found": name, "seconds": 1e-3, "ratio": ratio, "out": out}), flush=True)
"""


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """Each test is as if it were a process of its own."""
    choosing._tried.clear()
    yield
    choosing._tried.clear()


class Pretends:
    """Processes that find the given ratios, 0 for wrong results, of ``most`` candidates."""

    def __init__(self, ratios: Mapping[str, float], most: int = 1000) -> None:
        self.arguments = [json.dumps(ratios), str(most)]
        self.wanted: list[Sequence[Name]] = []

    def __call__(self, wanted: Sequence[Name]) -> subprocess.Popen[str]:
        self.wanted.append(wanted)
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *self.arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(wanted) + "\n")
        process.stdin.flush()
        return process


def chosen(folder: pathlib.Path, device: Device, start: Pretends | None = None, kernels: str = AUTO) -> Chosen:
    return choose(FAMILY, PROGRAM, first_device(), kernels, folder, device=device, start=start or Pretends({}))


def test_on_a_cpu_there_is_nothing_to_choose(tmp_path: pathlib.Path) -> None:
    start = Pretends({"batched": 9.0})
    assert chosen(tmp_path, CPU, start) == Chosen(FAMILY.operators)
    assert not start.wanted and not list(tmp_path.iterdir())


def test_references_compute_where_no_other_candidate_takes_the_numbers(tmp_path: pathlib.Path) -> None:
    """The usual shared product and attention of a GPU take 16 bits; with a reference alone nothing is measured."""
    usual = FAMILY.operators.replaced(packed_attention="cudnn")
    family, start = dataclasses.replace(FAMILY, dtype="float32", operators=usual), Pretends({"batched": 8.0})
    found = choose(family, PROGRAM, first_device(), AUTO, tmp_path, device=HOPPER, start=start).operators
    assert found["linear"] == found["packed_attention"] == "reference"
    assert found["masked_matmul"] == "batched"


def test_the_fastest_candidates_are_chosen_and_kept(tmp_path: pathlib.Path) -> None:
    start = Pretends({"batched": 8.0, "dense": 8.0, "mosaic": 16.0, "cudnn": 0.5})
    first = chosen(tmp_path, HOPPER, start)
    own = first.operators.of_class(str(MASK))
    assert own["masked_matmul"] == "mosaic" and first.operators["masked_matmul"] == "batched"
    assert first.operators.of_class(str(ADAPTER))["low_rank"] == "mosaic"
    assert first.operators["packed_attention"] == "reference"  # cuDNN is slower here
    choosing._tried.clear()
    again = Pretends({})
    assert chosen(tmp_path, HOPPER, again).operators == first.operators and not again.wanted
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("nvidia-h100-80gb-hbm3-") and path.name == file_name(
        FAMILY, HOPPER, first_device().devices[0]
    )
    kept = json.loads(path.read_text())
    assert "9.0" in kept["about"]["device"] and kept["about"]["dtype"] == "bfloat16"
    assert kept["operators"]["packed_attention"]["12 heads of 64 bfloat16"]["cudnn"]["ratio"] == 0.5


def test_candidates_that_the_device_cannot_run_are_not_tried(tmp_path: pathlib.Path) -> None:
    start = Pretends({"batched": 8.0})
    first = chosen(tmp_path, GPU, start)
    assert "mosaic" not in {candidate for _, _, candidate in start.wanted[0]}
    assert first.choice is not None and "mosaic" not in str(first.operators)
    (reasons,) = {str(own["mosaic"]) for own in first.choice.found.values() if "mosaic" in own}
    assert "needs compute capability 9.0 exactly" in reasons and "8.0" in reasons
    assert "masked_matmul" in {operator for operator, _, _ in start.wanted[0]}
    # of low-rank products only the reference is left there: decided without a trial
    assert "low_rank" not in {operator for operator, _, _ in start.wanted[0]}


@pytest.mark.parametrize("ratio", [0.0, 7.9, 8.1])
def test_what_is_wrong_or_not_clearly_faster_is_out(tmp_path: pathlib.Path, ratio: float) -> None:
    first = chosen(tmp_path, HOPPER, Pretends({"batched": 8.0, "dense": 8.0, "mosaic": ratio, "cudnn": 0.5}))
    assert first.operators.of_class(str(MASK))["masked_matmul"] == "batched"
    assert first.operators.of_class(str(DIFF))["sparse_matmul"] == "dense"


def test_where_the_usual_candidate_is_wrong_another_one_computes(tmp_path: pathlib.Path) -> None:
    first = chosen(tmp_path, HOPPER, Pretends({"batched": 0.0, "mosaic": 0.5, "dense": 8.0}))
    assert first.operators.of_class(str(MASK))["masked_matmul"] == "mosaic"


def test_references_that_loop_compute_only_where_nothing_else_is_right(tmp_path: pathlib.Path) -> None:
    """An accelerator waits for the host at each step: they are not even timed."""
    start = Pretends({"batched": 0.0, "mosaic": 0.0, "dense": 0.1})
    first = chosen(tmp_path, HOPPER, start)
    assert first.operators.of_class(str(MASK))["masked_matmul"] == "reference"
    assert first.operators.of_class(str(DIFF))["sparse_matmul"] == "dense"
    looping = {operator for operator, _, candidate in start.wanted[0] if candidate == "reference"}
    assert looping and not looping & set(OVER_RUNS)


def test_what_there_was_no_time_for_is_tried_at_the_next_start(tmp_path: pathlib.Path) -> None:
    ratios = {"batched": 8.0, "dense": 8.0, "mosaic": 16.0}
    first = Pretends(ratios, most=2)
    before = chosen(tmp_path, HOPPER, first).operators
    assert before.of_class(str(MASK)) == FAMILY.operators.of_class(str(MASK))
    assert chosen(tmp_path, HOPPER, Pretends({})).operators == before  # another engine of the same process
    choosing._tried.clear()
    rest = Pretends(ratios)
    after = chosen(tmp_path, HOPPER, rest).operators
    assert list(rest.wanted[0]) == list(first.wanted[0])[2:]
    assert after.of_class(str(MASK))["masked_matmul"] == "mosaic"


def test_classes_that_come_later_have_what_earlier_trials_found(tmp_path: pathlib.Path) -> None:
    """Of their shape, whatever layers they are of."""
    first = chosen(tmp_path, HOPPER, Pretends({"batched": 8.0, "dense": 8.0, "mosaic": 16.0}))
    late = ClassKey("mask", (("query", 0), ("ffn_in", 0)), (0,), (("note", "late"),))
    other = ClassKey("diff", (("query", 6144),), (0,))
    family = dataclasses.replace(
        FAMILY, operators=first.operators, slots=tuple(sorted([*FAMILY.slots, (late, 8), (other, 8)]))
    )
    found = known_operators(family, PROGRAM, first_device(), first.choice, HOPPER)
    assert found.of_class(str(late))["masked_matmul"] == "mosaic"
    assert found.of_class(str(other))["sparse_matmul"] == "dense", "it was never tried"
    assert set(first.operators.classes) < set(found.classes)
    assert known_operators(FAMILY, PROGRAM, first_device(), None) == FAMILY.operators


def test_a_damaged_file_is_made_anew(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / file_name(FAMILY, HOPPER, first_device().devices[0])
    path.write_text('{"about": {}}')
    start = Pretends({"mosaic": 16.0})
    chosen(tmp_path, HOPPER, start)
    assert start.wanted and "is made anew" in caplog.text
    choice = read_choice(path)
    assert choice is not None and choice.found


def test_a_choice_can_be_forced(tmp_path: pathlib.Path) -> None:
    assert chosen(tmp_path, HOPPER, kernels="reference").operators["masked_matmul"] == "reference"
    own = chosen(tmp_path, HOPPER, kernels="mosaic").operators
    assert (own["masked_matmul"], own["low_rank"], own["packed_attention"]) == (
        "mosaic",
        "mosaic",
        usual_operators("gpu")["packed_attention"],
    )
    assert chosen(tmp_path, CPU, kernels="batched").operators["sign_matmul"] == "batched"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kernels", "device", "problem"),
    [
        ("mosaik", HOPPER, "no operator has a candidate 'mosaik'; give one of ['auto', 'batched', 'cudnn', 'dense'"),
        ("mosaic", GPU, "mosaic cannot run here: it needs compute capability 9.0 exactly; this is Fake GPU (gpu, "),
        ("cudnn", CPU, "cudnn cannot run here: it needs a gpu; this is cpu"),
    ],
)
def test_what_cannot_be_forced_is_refused(tmp_path: pathlib.Path, kernels: str, device: Device, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        chosen(tmp_path, device, kernels=kernels)
    assert f"--kernels: {problem}" in str(refused.value)


def test_kernels_are_not_divided_among_devices(tmp_path: pathlib.Path) -> None:
    (device,) = first_device().devices
    several = MeshSlice([device])
    several.devices = (device, device)
    start = Pretends({})
    assert choose(FAMILY, PROGRAM, several, AUTO, tmp_path, device=HOPPER, start=start).operators == FAMILY.operators
    assert not start.wanted
    with pytest.raises(InvalidInput, match="cannot be divided among 2 devices"):
        choose(FAMILY, PROGRAM, several, "mosaic", tmp_path, device=HOPPER)


@pytest.mark.parametrize(("device", "kernels"), [(HOPPER, 5), (GPU, 0)], ids=["9.0", "8.0"])
def test_programs_hold_the_kernels_that_were_chosen(tmp_path: pathlib.Path, device: Device, kernels: int) -> None:
    """Of a mask at two sites, a sparse difference, a LoRA of rank 8 and an adapter, lowered for CUDA; never a loop."""
    operators = chosen(tmp_path, device, Pretends({"batched": 8.0, "dense": 8.0, "mosaic": 16.0})).operators
    traced = trace_program(dataclasses.replace(FAMILY, operators=operators), PROGRAM)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == kernels
    assert "stablehlo.while" not in text


def test_a_family_with_a_choice_survives_json() -> None:
    operators = Operators((("masked_matmul", "batched"),), ((str(MASK), "masked_matmul", "mosaic"),))
    own = dataclasses.replace(FAMILY, operators=operators)
    assert family_from_json(own.to_json()) == own


def test_every_candidate_can_be_forced() -> None:
    assert set(get_args(Kernels)) == {AUTO, *(name for own in CANDIDATES.values() for name in own)}
