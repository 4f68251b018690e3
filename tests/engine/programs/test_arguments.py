"""What a dispatch passes to a program: few arrays of the host, whatever classes a batch has."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from looked_up import LookedUpNetwork
from support import method_tasks, shallow

from jpets.deltas.bank import lower_task
from jpets.deltas.fold import fold_pooler
from jpets.engine.batch.bucket import Bucket, widest
from jpets.engine.programs.mesh import first_device
from jpets.engine.programs.network import Network
from jpets.engine.programs.program import Family, ProgramKey, abstract_arguments
from jpets.engine.workloads.encoder_network import EncoderNetwork

MOST_ARRAYS = 4


@pytest.mark.parametrize("bucket", [Bucket(256, ((16, 16),)), Bucket(256, ((14, 16), (6, 32), (2, 128)))], ids=str)
@pytest.mark.parametrize("kind", [EncoderNetwork, LookedUpNetwork])
def test_a_dispatch_passes_few_arrays_of_the_host(kind: type[EncoderNetwork], bucket: Bucket) -> None:
    backbone = shallow()
    tasks = [fold_pooler(task, backbone.config, dict(backbone.params)) for task in method_tasks(backbone)]
    classes = {part.key for task in tasks for part in lower_task(task, backbone.config)}
    network: Network = kind(backbone.config)
    family = Family(network, "float32", tuple((key, 2) for key in sorted(classes)))
    *_, buffers = abstract_arguments(family, ProgramKey(bucket, widest(classes, heavy=True)), first_device())
    passed = jax.tree.leaves(buffers)
    assert len(classes) > 9 and len(passed) <= MOST_ARRAYS
    assert {leaf.dtype for leaf in passed} == {np.dtype(own.dtype) for own in network.inputs.values()} | {
        np.dtype(np.int32)
    }
