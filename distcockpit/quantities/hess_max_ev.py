"""Largest eigenvalue of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from distcockpit.curvature.lanczos import STATUS, WHICH, LargestEigenvalue
from distcockpit.quantities.base import Quantity, Sums, Totals
from distcockpit.quantities.batch import LocalBatch, Model, Needs
from distcockpit.store.schema import Field, Group, Row


@dataclass(frozen=True, kw_only=True)
class HessMaxEV(Quantity):
    r"""Largest eigenvalue of the Hessian of the pooled loss $L$ with respect to the tracked parameters.

    Computed by Lanczos iteration (ARPACK) on rank 0, with Hessian-vector products distributed over all ranks: it costs
    about 20 to 100 times two backward passes, and blocks all ranks. Schneider et al. 2021, arXiv:2102.06604. In units
    of loss per squared parameter; gradient descent is stable up to 2 / learning rate. NaN with a status if not found.

    Args:
        which: "LM": the eigenvalue of largest magnitude, with its sign, as a power iteration finds it; "LA": the
            largest one.
        tolerance: Bound on the residual relative to the eigenvalue, positive; the error is of the order of its square
            over the gap to the next eigenvalue.
        max_products: Hessian-vector products after which to give up, at least 2.
        seed: Seed of the start vector. The global random state is not changed.
    """

    which: str = "LM"
    tolerance: float = 1e-4
    max_products: int = 500
    seed: int = 0

    source: ClassVar[str] = "Schneider et al. 2021, arXiv:2102.06604; ARPACK by way of SciPy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.which not in WHICH:
            raise ValueError(f"HessMaxEV(which={self.which!r}): must be one of {list(WHICH)}.")
        if not self.tolerance > 0:
            raise ValueError(f"HessMaxEV(tolerance={self.tolerance!r}): must be positive.")
        if isinstance(self.max_products, bool) or not isinstance(self.max_products, int) or self.max_products < 2:
            raise ValueError(f"HessMaxEV(max_products={self.max_products!r}): must be an integer of at least 2.")

    @property
    def _kind(self) -> LargestEigenvalue:
        return LargestEigenvalue(self.which, self.tolerance, self.max_products, self.seed)

    @property
    def needs(self) -> Needs:
        """The eigenvalue."""
        return Needs(eigenvalue=self._kind)

    def group(self, model: Model) -> Group:
        """The eigenvalue, its status, and what it cost."""
        fields = {
            "hess_max_ev": Field((), "largest Hessian eigenvalue", "loss / parameter^2", f"which={self.which}"),
            "status": Field((), "status of the eigenvalue", dtype="int8", codes=STATUS),
            "products": Field((), "Hessian-vector products", dtype="int32"),
        }
        return Group(fields)

    def local(self, batch: LocalBatch, memory: dict[str, Any]) -> Sums:
        """What rank 0 found."""
        found = batch.eigenvalues[self._kind]
        facts = [found.value, float(STATUS.index(found.status)), float(found.products)]
        return {"found": batch.replicated(lambda: batch.vector(facts))}

    def finalize(self, totals: Totals, n: int) -> Row:
        """The same."""
        value, status, products = totals["found"]
        return {"hess_max_ev": value, "status": int(status), "products": int(products)}
