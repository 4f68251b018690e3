"""The operators on a device that have several candidates, and the one of each that a program calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping

from pallas_kernels import low_rank, masked_matmul, packed_attention, sparse_matmul
from pallas_kernels.linear import LINEAR
from pallas_kernels.packed_attention import cudnn
from pallas_kernels.windows import REFERENCE

CANDIDATES: Mapping[str, Collection[str]] = {
    "masked_matmul": (REFERENCE, *masked_matmul.MASKED),
    "sign_matmul": (REFERENCE, *masked_matmul.SIGNED),
    "sparse_matmul": (REFERENCE, *sparse_matmul.SPARSE),
    "block_sparse_matmul": (REFERENCE, *sparse_matmul.BLOCKS),
    "low_rank": tuple(low_rank.CANDIDATES),
    "packed_attention": tuple(packed_attention.CANDIDATES),
    "linear": tuple(LINEAR),
}
"""Names of candidates by operator. Each function of these names takes one as ``candidate``, with equal results."""
OVER_RUNS = ("masked_matmul", "sign_matmul", "sparse_matmul", "block_sparse_matmul")
"""The operators of heavy classes, whose references loop over runs."""
WITHOUT_LOOPS = {
    "masked_matmul": "batched",
    "sign_matmul": "batched",
    "sparse_matmul": "dense",
    "block_sparse_matmul": "dense",
}


@dataclasses.dataclass(frozen=True)
class Operators:
    """The candidate of each operator, as (operator, candidate) pairs; the reference of those that are not named.

    ``classes`` are exceptions, as (class's name, operator, candidate). Raises ``ValueError`` for an unknown name.
    """

    chosen: tuple[tuple[str, str], ...] = ()
    classes: tuple[tuple[str, str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, candidate in (*self.chosen, *(pair for _, *pair in self.classes)):
            if candidate not in CANDIDATES.get(name, ()):
                known = {operator: list(own) for operator, own in CANDIDATES.items()}
                raise ValueError(f"an operator and one of its candidates must be of {known}, got {name}={candidate}")

    def __getitem__(self, operator: str) -> str:
        return dict(self.chosen).get(operator, REFERENCE)

    @functools.cached_property
    def static_runs(self) -> bool:
        """Whether an operator of a heavy class computes all runs that there is room for, taken or not."""
        return any(self[operator] != REFERENCE for operator in OVER_RUNS)

    def replaced(self, **candidates: str) -> Operators:
        """With these candidates in the place of those that there were."""
        return Operators(tuple(sorted({**dict(self.chosen), **candidates}.items())), self.classes)

    def entries(self) -> Iterator[tuple[str, str, str]]:
        """(class's name, operator, candidate) of all operators; the name is empty for classes that are no exception."""
        yield from (("", operator, self[operator]) for operator in CANDIDATES)
        yield from self.classes

    def of_class(self, name: str) -> Operators:
        """The operators that the class of this name calls."""
        own = self._exceptions(name)
        return Operators(self.chosen).replaced(**own) if own else Operators(self.chosen)

    def exceptions_of(self, name: str) -> str:
        """What the class of this name calls in place of the others' candidates; empty where it is no exception."""
        return ",".join(f"{operator}={candidate}" for operator, candidate in sorted(self._exceptions(name).items()))

    def within(self, names: Collection[str]) -> Operators:
        """Without the exceptions of other classes than these."""
        return Operators(self.chosen, tuple(own for own in self.classes if own[0] in names))

    def renamed(self, names: Mapping[str, str]) -> Operators:
        """With exceptions for classes of these new names, by the old ones."""
        known = ((names[name], operator, own) for name, operator, own in self.classes if name in names)
        return Operators(self.chosen, tuple(sorted(set(known))))

    def _exceptions(self, name: str) -> dict[str, str]:
        return {operator: candidate for other, operator, candidate in self.classes if other == name}


REFERENCES = Operators()


def usual_operators(platform: str) -> Operators:
    """References on a CPU, where a loop costs nothing, and a product is fastest in f32; elsewhere forms in plain XLA
    without loops and atomic additions, shared products in 16 bits, and cuDNN's attention where it is supported."""
    if platform == "cpu":
        return REFERENCES
    attention = {"packed_attention": "cudnn"} if cudnn.supported() else {}
    return REFERENCES.replaced(**WITHOUT_LOOPS, **attention, linear="narrow")
