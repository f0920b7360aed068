"""Tell whether a model is a chain of modules, as BackPACK's second-order extensions need it."""

from __future__ import annotations

from torch import Tensor


class NoChainError(RuntimeError):
    """The model is no chain of modules."""


class Chain:
    """Sees that each leaf module takes exactly what the one before it returned.

    BackPACK finds the module that produced a tensor by the tensor's address. An operation in between that works in
    place or makes a view would be skipped silently; so shapes, strides and versions must agree as well.
    """

    def __init__(self) -> None:
        self._last: tuple[object, ...] | None = None
        self._last_path = "the model's input"
        self._broken: str | None = None
        self._called: set[str] = set()

    @staticmethod
    def _print(tensor: object) -> tuple[object, ...] | None:
        if not isinstance(tensor, Tensor):
            return None
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor._version

    def before(self, path: str, args: tuple[object, ...]) -> None:
        """A leaf module begins."""
        if path in self._called:
            self._broken = self._broken or f"in the second call of '{path}'"
        self._called.add(path)
        if self._last is not None and (len(args) != 1 or self._print(args[0]) != self._last):
            self._broken = self._broken or f"between '{self._last_path}' and '{path}'"

    def after(self, path: str, output: object) -> None:
        """A leaf module ends."""
        self._last, self._last_path = self._print(output), path

    def check(self) -> None:
        """Raise if the model is not a chain of its leaf modules.

        Raises:
            NoChainError: Names the place.
        """
        if self._broken:
            raise NoChainError(
                f"Something happens {self._broken}: a functional call (write it as a module: nn.ReLU, nn.Flatten), a "
                "branch, or a second use of a layer."
            )
